package brokertest

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
)

func receiveCases() []testCase {
	return []testCase{
		{name: "receive/at-most-max", run: atMostMax},
		{name: "receive/waits-for-the-first", run: waitsForTheFirst},
		{name: "receive/on-an-ended-ctx", run: receiveOnEndedCtx},
		{name: "receive/loses-nothing-when-ctx-ends", run: losesNothing},
		{name: "receive/never-more-than-room", run: neverMoreThanRoom},
		{name: "receive/buffers-within-room", run: buffersWithinRoom, not: needsNoLaneOrder},
		{name: "receive/order-of-a-key", run: orderOfAKey, not: needsLaneOrder},
		{name: "receive/order-of-a-key-with-two-consumers", run: orderWithTwo, not: needsLaneOrder},
		{name: "receive/two-consumers-share", run: twoShare, not: needsNoLaneOrder},
		{name: "receive/paused-lane", run: pausedLane, not: func(s *suite) string {
			if !s.pauses {
				return "the Source is no LanePauser"
			}
			return ""
		}},
	}
}

func atMostMax(e *env) {
	src := e.open(50)
	e.send(20)
	var all []*brokers.Delivery
	ctx, cancel := context.WithTimeout(context.Background(), e.Wait)
	defer cancel()
	for len(all) < 20 {
		ds := e.tryReceive(ctx, src, 3) // checks the bound
		if ds == nil {
			e.Fatalf("received %d of 20", len(all))
		}
		all = append(all, ds...)
	}
	e.sameIDs(all, 20)
	e.done(src, all...)
}

func waitsForTheFirst(e *env) {
	src := e.open(10)
	got := make(chan []*brokers.Delivery, 1)
	ctx, cancel := context.WithTimeout(context.Background(), e.Wait)
	defer cancel()
	go func() {
		ds, _ := src.Receive(ctx, 10)
		got <- ds
	}()
	quiet := time.NewTimer(e.Quiet)
	defer quiet.Stop()
	select {
	case ds := <-got:
		e.Fatalf("Receive returned %v from an empty destination", ids(ds))
	case <-quiet.C:
	}
	e.send(1)
	ds := <-got
	if len(ds) != 1 {
		e.Fatalf("Receive returned %v, want the message", ids(ds))
	}
	e.done(src, ds...)
}

func receiveOnEndedCtx(e *env) {
	src := e.open(10)
	e.send(1)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	var ds []*brokers.Delivery
	var err error
	e.within("Receive on an ended ctx", func() { ds, err = src.Receive(ctx, 10) })
	if err == nil {
		e.done(src, ds...) // a buffered delivery may be handed over all the same
	} else if !errors.Is(err, context.Canceled) || len(ds) > 0 {
		e.Errorf("got %v and %v, want context.Canceled", ids(ds), err)
	}
}

func losesNothing(e *env) {
	src := e.open(100)
	const n = 30
	var wg sync.WaitGroup
	wg.Go(func() { // while others give up waiting, again and again
		for i := range n {
			e.pub.Publish(context.Background(), e.message(i))
		}
	})
	seen := map[string]bool{}
	deadline := time.Now().Add(e.Wait)
	for turn := 0; len(seen) < n; turn++ {
		if time.Now().After(deadline) {
			wg.Wait()
			e.Fatalf("%d of %d messages came within %v", len(seen), n, e.Wait)
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Duration(turn%5)*time.Millisecond)
		ds := e.tryReceive(ctx, src, 2)
		cancel()
		for _, d := range ds {
			if seen[d.ID] || d.Attempt > 1 {
				e.Errorf("%s: a redelivery (attempt %d): an earlier hand-over was lost", d.ID, d.Attempt)
			}
			seen[d.ID] = true
		}
		if len(ds) > 0 {
			e.done(src, ds...)
		}
		if turn%5 == 4 { // real servers need a moment
			long, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
			e.pause(long)
			cancel()
		}
	}
	wg.Wait()
}

func neverMoreThanRoom(e *env) {
	src := e.open(5)
	e.send(20, "one key")
	ctx, cancel := context.WithTimeout(context.Background(), e.Quiet)
	held := e.receive(src, 1)
	for {
		ds := e.tryReceive(ctx, src, 100)
		if ds == nil {
			break
		}
		held = append(held, ds...)
		if len(held) > 5 {
			e.Fatalf("%d unsettled deliveries, Room is 5", len(held))
		}
	}
	cancel()
	// Settling makes room.
	all := slices.Clone(held)
	e.done(src, held...)
	deadline, cancel := context.WithTimeout(context.Background(), e.Wait)
	defer cancel()
	for len(all) < 20 {
		ds := e.tryReceive(deadline, src, 100)
		if ds == nil {
			e.Fatalf("received %d of 20: settling did not make room", len(all))
		}
		e.done(src, ds...)
		all = append(all, ds...)
	}
	e.sameIDs(all, 20)
}

func buffersWithinRoom(e *env) {
	a := e.open(5)
	e.send(20)
	held := e.receive(a, 1)
	b := e.open(100)
	rest := e.receive(b, 15) // what a may not have buffered
	e.done(b, rest...)
	held = append(held, e.receive(a, 4)...)
	e.done(a, held...)
	e.sameIDs(append(held, rest...), 20)
}

// keyed publishes 20 messages of each of three keys in turn.
func (e *env) keyed() (n int) {
	var ms []*brokers.Message
	for i := range 60 {
		m := e.message(i)
		m.Key = []string{"red", "green", "blue"}[i%3]
		ms = append(ms, m)
	}
	e.publish(ms...)
	return len(ms)
}

// order notes first deliveries and complains about one before an earlier message of
// its key.
type order struct {
	mu    sync.Mutex
	seen  map[string]bool
	last  map[string]string
	wrong []string
}

func (o *order) note(ds []*brokers.Delivery) (first int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.seen == nil {
		o.seen, o.last = map[string]bool{}, map[string]string{}
	}
	for _, d := range ds {
		if o.seen[d.ID] {
			continue
		}
		o.seen[d.ID] = true
		if last := o.last[d.Key]; d.ID < last {
			o.wrong = append(o.wrong, d.Key+": "+d.ID+" after "+last)
		}
		o.last[d.Key] = max(o.last[d.Key], d.ID)
	}
	return len(o.seen)
}

func orderOfAKey(e *env) {
	src := e.open(7)
	n := e.keyed()
	var o order
	ctx, cancel := context.WithTimeout(context.Background(), e.Wait)
	defer cancel()
	for got := 0; got < n; {
		ds := e.tryReceive(ctx, src, 5)
		if ds == nil {
			e.Fatalf("received %d of %d", got, n)
		}
		got = o.note(ds)
		e.done(src, ds...)
	}
	for _, w := range o.wrong {
		e.Error(w)
	}
}

func orderWithTwo(e *env) {
	a, b := e.open(7), e.open(7)
	n := e.keyed()
	var o order
	ctx, cancel := context.WithTimeout(context.Background(), e.Wait)
	defer cancel()
	var wg sync.WaitGroup
	for _, src := range []brokers.Source{a, b} {
		wg.Go(func() {
			for ctx.Err() == nil {
				ds, err := src.Receive(ctx, 5)
				if err != nil {
					e.pause(ctx)
					continue
				}
				if o.note(ds) >= n {
					cancel()
				}
				ss := make([]brokers.Settlement, len(ds))
				for i, d := range ds {
					ss[i] = brokers.Settlement{Delivery: d, Verb: brokers.Done}
				}
				src.Settle(context.Background(), ss...) // ErrOwnershipLost is fair: the other one gets it
			}
		})
	}
	wg.Wait()
	if got := o.note(nil); got < n {
		e.Fatalf("received %d of %d", got, n)
	}
	for _, w := range o.wrong {
		e.Error(w)
	}
}

func twoShare(e *env) {
	a, b := e.open(5), e.open(5)
	e.send(10)
	da, db := e.receive(a, 5), e.receive(b, 5) // neither can hold more
	e.sameIDs(slices.Concat(da, db), 10)
	e.done(a, da...)
	e.done(b, db...)
	e.quiet(a)
}

func pausedLane(e *env) {
	src := e.open(1)
	p := src.(brokers.LanePauser)
	e.send(2, "one key")
	d := e.receive(src, 1)[0]
	p.Pause(d.Lane.Name)
	e.done(src, d)
	e.quiet(src)
	p.Resume(d.Lane.Name)
	d = e.receive(src, 1)[0]
	e.done(src, d)
}
