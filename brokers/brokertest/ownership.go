package brokertest

import (
	"context"
	"slices"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
)

func ownershipCases() []testCase {
	disconnects := needsHook(func(f Fixture) bool { return f.Disconnect != nil }, "Disconnect")
	return []testCase{
		{name: "ownership/lost-and-redelivered", run: lostAndRedelivered, not: disconnects},
		{name: "ownership/late-settle-touches-nobody", run: lateSettle, not: disconnects},
		{name: "ownership/later-ones-end-first", run: laterOnesEndFirst, not: func(s *suite) string {
			if !s.caps.LaneOrdered {
				return "LaneOrdered is false"
			}
			return disconnects(s)
		}},
		{name: "ownership/epoch-changes", run: epochChanges, not: disconnects},
		{name: "ownership/kept-while-held", run: keptWhileHeld, not: func(s *suite) string {
			if s.Lease == 0 {
				return "no Lease is configured"
			}
			return ""
		}},
		{name: "ownership/takeover-after-close", run: takeover},
		{name: "ownership/coordinates-are-stable", run: stableCoordinates, not: func(s *suite) string {
			if !s.caps.StableCoordinates {
				return "StableCoordinates is false"
			}
			return ""
		}},
	}
}

func lostAndRedelivered(e *env) {
	src := e.open(10)
	e.send(5, "one key")
	ds := e.receive(src, 5)
	e.f.Disconnect(src)
	for _, d := range ds {
		e.ends(d, brokers.ErrOwnershipLost)
	}
	again := e.receive(src, 5) // it heals by itself
	e.sameIDs(again, 5)
	for _, d := range again {
		e.atLeast(d, 2)
	}
	e.done(src, again...)
	e.close(src)
	e.quiet(e.open(10))
}

// lateSettle is the fault that loses messages where settlements are not fenced: an
// old delivery's settlement acknowledges another message of the new ownership.
// rabbitmq/amqp091-go's own reconnect and segmentio/kafka-go#1308 have it.
func lateSettle(e *env) {
	src := e.open(10)
	e.send(5, "one key")
	ds := e.receive(src, 5)
	e.f.Disconnect(src)
	for _, d := range ds {
		e.ends(d, brokers.ErrOwnershipLost)
	}
	e.fails(brokers.ErrOwnershipLost, e.settle(src, brokers.Done, ds[2]))
	again := e.receive(src, 5)
	for _, v := range []brokers.Verb{brokers.Done, brokers.Release} {
		e.fails(brokers.ErrOwnershipLost, e.settle(src, v, ds...))
	}
	for _, d := range again {
		e.alive(d)
	}
	e.close(src)
	next := e.open(10)
	last := e.receive(next, 5) // nothing was settled
	e.sameIDs(last, 5)
	e.done(next, last...)
}

// laterOnesEndFirst: whoever sees that a message is lost must find the later ones of
// its lane lost as well, or would start the next of its key in its place.
func laterOnesEndFirst(e *env) {
	for turn := range 5 {
		src := e.open(10)
		var ms []*brokers.Message
		for i := range 5 { // other IDs each turn: a FIFO queue drops those that it knows
			m := e.message(5*turn + i)
			m.Key = "one key"
			ms = append(ms, m)
		}
		e.publish(ms...)
		ds := e.receive(src, 5)
		early := make(chan int, len(ds))
		for i, d := range ds {
			go func() {
				<-d.Context.Done()
				n := 0
				for _, later := range ds[i+1:] {
					if later.Context.Err() == nil {
						n++
					}
				}
				early <- n
			}()
		}
		e.f.Disconnect(src)
		for range ds {
			if n := <-early; n > 0 {
				e.Errorf("a delivery's context ended while those of %d later ones of its lane had not", n)
			}
		}
		again := e.receive(src, 5)
		e.done(src, again...)
		e.close(src)
	}
}

func epochChanges(e *env) {
	src := e.open(10)
	e.send(1)
	first := e.receive(src, 1)[0]
	e.f.Disconnect(src)
	e.ends(first, brokers.ErrOwnershipLost)
	second := e.receive(src, 1)[0]
	if first.Lane == second.Lane {
		e.Errorf("lane %v before and after its ownership was lost", first.Lane)
	}
	e.done(src, second)
}

func keptWhileHeld(e *env) {
	a, b := e.open(1), e.open(10)
	e.send(1)
	var holder, other brokers.Source
	var d *brokers.Delivery
	// Either may get it.
	holder, other, d = e.firstOf(a, b)
	held := time.NewTimer(3 * e.Lease)
	defer held.Stop()
	got := make(chan []*brokers.Delivery, 1)
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		ds, _ := other.Receive(ctx, 10)
		got <- ds
	}()
	<-held.C
	cancel()
	if ds := <-got; len(ds) > 0 {
		e.Errorf("%v was handed to another consumer while it was held", ids(ds))
	}
	e.alive(d)
	e.done(holder, d)
	e.quiet(other)
}

// firstOf receives one delivery from whichever Source gets it.
func (e *env) firstOf(a, b brokers.Source) (holder, other brokers.Source, d *brokers.Delivery) {
	e.Helper()
	deadline := time.Now().Add(e.Wait)
	for time.Now().Before(deadline) {
		for _, s := range [][2]brokers.Source{{a, b}, {b, a}} {
			ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
			ds := e.tryReceive(ctx, s[0], 1)
			cancel()
			if len(ds) > 0 {
				return s[0], s[1], ds[0]
			}
		}
	}
	e.Fatalf("neither consumer received the message within %v", e.Wait)
	return nil, nil, nil
}

func takeover(e *env) {
	a := e.open(10)
	e.send(6, "one key")
	ds := e.receive(a, 4)
	e.done(a, ds[0], ds[1])
	b := e.open(10)
	e.close(a)
	for _, d := range ds[2:] {
		e.ends(d, brokers.ErrClosed, brokers.ErrOwnershipLost)
	}
	rest := e.receive(b, 4)
	want := []string{e.message(2).ID, e.message(3).ID, e.message(4).ID, e.message(5).ID}
	if got := slices.Sorted(slices.Values(ids(rest))); !slices.Equal(got, want) {
		e.Errorf("received %v, want %v", got, want)
	}
	for _, d := range rest {
		if d.ID == ds[2].ID || d.ID == ds[3].ID {
			e.atLeast(d, 2)
		}
	}
	e.done(b, rest...)
	e.quiet(b)
}

func stableCoordinates(e *env) {
	src := e.open(10)
	e.send(3)
	at := map[string]string{}
	owner := map[string]string{}
	for _, d := range e.receive(src, 3) {
		at[d.ID] = d.Coordinates
		if o := owner[d.Coordinates]; o != "" {
			e.Errorf("%s and %s are both at %s", o, d.ID, d.Coordinates)
		}
		owner[d.Coordinates] = d.ID
	}
	e.close(src)
	next := e.open(10)
	again := e.receive(next, 3)
	for _, d := range again {
		e.equal("coordinates of "+d.ID, d.Coordinates, at[d.ID])
	}
	e.done(next, again...)
}
