package brokertest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
)

func publishCases() []testCase {
	missing := needsHook(func(f Fixture) bool { return f.Missing != "" }, "Missing")
	return []testCase{
		{name: "publish/one-result-each", run: oneResultEach},
		{name: "publish/many-in-one-call", run: manyInOneCall},
		{name: "publish/concurrently", run: concurrently},
		{name: "publish/same-id-again", run: sameIDAgain},
		{name: "publish/unroutable", run: unroutable, not: missing},
		{name: "publish/key-stops-at-the-first-failure", run: keyStops, not: missing},
		{name: "publish/on-an-ended-ctx", run: publishOnEndedCtx},
		{name: "publish/limits", run: limits},
		{name: "publish/after-close", run: publishAfterClose},
	}
}

// results checks that a result has an error if and only if it is not Accepted.
func (e *env) results(rs []brokers.Result, n int) {
	e.Helper()
	if len(rs) != n {
		e.Fatalf("%d results for %d messages", len(rs), n)
	}
	for i, r := range rs {
		if (r.Err == nil) != (r.Outcome == brokers.Accepted) {
			e.Errorf("result %d: %v with error %v", i, r.Outcome, r.Err)
		}
	}
}

func oneResultEach(e *env) {
	if rs := e.pub.Publish(context.Background()); len(rs) != 0 {
		e.Errorf("Publish of nothing returned %v", rs)
	}
	src := e.open(10)
	ms := []*brokers.Message{e.message(0), e.message(1), e.message(2)}
	ctx, cancel := context.WithTimeout(context.Background(), e.Wait)
	defer cancel()
	rs := e.pub.Publish(ctx, ms...)
	e.results(rs, 3)
	for i, r := range rs {
		if r.Outcome != brokers.Accepted {
			e.Errorf("result %d: %v, %v", i, r.Outcome, r.Err)
		}
	}
	ds := e.receive(src, 3)
	e.sameIDs(ds, 3)
	e.done(src, ds...)
}

func manyInOneCall(e *env) {
	const n = 300
	src := e.open(n)
	ms := make([]*brokers.Message, n)
	for i := range ms {
		ms[i] = e.message(i)
		ms[i].Key = fmt.Sprintf("key-%d", i%7)
	}
	e.publish(ms...)
	got := map[string]bool{}
	ctx, cancel := context.WithTimeout(context.Background(), e.Wait)
	defer cancel()
	for len(got) < n {
		ds := e.tryReceive(ctx, src, 50)
		if ds == nil {
			e.Fatalf("received %d of %d", len(got), n)
		}
		for _, d := range ds {
			got[d.ID] = true
		}
		e.done(src, ds...)
	}
}

func concurrently(e *env) {
	const workers, each = 4, 25
	src := e.open(200)
	var wg sync.WaitGroup
	var mu sync.Mutex
	var bad []brokers.Result
	for w := range workers {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), e.Wait)
			defer cancel()
			for i := range each {
				for _, r := range e.pub.Publish(ctx, e.message(w*each+i)) {
					if r.Outcome != brokers.Accepted {
						mu.Lock()
						bad = append(bad, r)
						mu.Unlock()
					}
				}
			}
		})
	}
	wg.Wait()
	if len(bad) > 0 {
		e.Fatalf("%d not accepted, the first: %v, %v", len(bad), bad[0].Outcome, bad[0].Err)
	}
	ds := e.receive(src, workers*each)
	e.sameIDs(ds, workers*each)
	e.done(src, ds...)
}

// sameIDAgain is what a relay does after an unknown outcome: both copies may arrive,
// one must.
func sameIDAgain(e *env) {
	src := e.open(10)
	e.publish(e.message(0))
	e.publish(e.message(0))
	d := e.receive(src, 1)[0]
	e.equal("ID", d.ID, e.message(0).ID)
	e.done(src, d)
	ctx, cancel := context.WithTimeout(context.Background(), e.Quiet)
	defer cancel()
	for ds := e.tryReceive(ctx, src, 10); ds != nil; ds = e.tryReceive(ctx, src, 10) {
		e.equal("ID", ds[0].ID, e.message(0).ID)
		e.done(src, ds...)
	}
}

func unroutable(e *env) {
	src := e.open(10)
	lost := e.message(1)
	lost.Topic = e.f.Missing
	ctx, cancel := context.WithTimeout(context.Background(), e.Wait)
	defer cancel()
	rs := e.pub.Publish(ctx, e.message(0), lost, e.message(2))
	e.results(rs, 3)
	if rs[1].Outcome != brokers.Refused || !errors.Is(rs[1].Err, brokers.ErrNoRoute) {
		e.Errorf("to nowhere: %v, %v; want refused, ErrNoRoute", rs[1].Outcome, rs[1].Err)
	}
	for _, i := range []int{0, 2} { // other keys are not its business
		if rs[i].Outcome != brokers.Accepted {
			e.Errorf("its neighbour %d: %v, %v", i, rs[i].Outcome, rs[i].Err)
		}
	}
	e.done(src, e.receive(src, 2)...)
}

func keyStops(e *env) {
	ms := []*brokers.Message{e.message(0), e.message(1), e.message(2), e.message(3)}
	for _, m := range ms[:3] {
		m.Key = "one key"
	}
	ms[1].Topic = e.f.Missing
	ctx, cancel := context.WithTimeout(context.Background(), e.Wait)
	defer cancel()
	rs := e.pub.Publish(ctx, ms...)
	e.results(rs, 4)
	if rs[0].Outcome != brokers.Accepted || rs[1].Outcome == brokers.Accepted {
		e.Errorf("%v, then to nowhere %v", rs[0], rs[1])
	}
	if rs[2].Outcome == brokers.Accepted {
		e.Error("a message was accepted after one of the same key that was not")
	}
	if rs[3].Outcome != brokers.Accepted {
		e.Errorf("another key: %v, %v", rs[3].Outcome, rs[3].Err)
	}
}

func publishOnEndedCtx(e *env) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	var rs []brokers.Result
	e.within("Publish on an ended ctx", func() { rs = e.pub.Publish(ctx, e.message(0), e.message(1)) })
	e.results(rs, 2)
	for i, r := range rs {
		if r.Outcome != brokers.NotSent && r.Outcome != brokers.Unknown {
			e.Errorf("result %d: %v, %v; want not sent or unknown", i, r.Outcome, r.Err)
		}
	}
	e.send(1) // and the Publisher lives
}

func limits(e *env) {
	l := e.pub.Limits()
	if l.Messages < 0 || l.Bytes < 0 || l.MessageBytes < 0 || l.Headers < 0 {
		e.Errorf("negative limits: %+v", l)
	}
	if l.MessageBytes == 0 || l.MessageBytes > 64<<20 {
		return // none, or too large to try
	}
	m := e.message(0)
	m.Payload = make([]byte, l.MessageBytes+1)
	ctx, cancel := context.WithTimeout(context.Background(), e.Wait)
	defer cancel()
	rs := e.pub.Publish(ctx, m, e.message(1))
	e.results(rs, 2)
	if rs[0].Outcome != brokers.Refused || brokers.ClassOf(rs[0].Err) != brokers.Permanent {
		e.Errorf("a message over the limit: %v, %v; want refused for good", rs[0].Outcome, rs[0].Err)
	}
	if rs[1].Outcome != brokers.Accepted {
		e.Errorf("its neighbour: %v, %v", rs[1].Outcome, rs[1].Err)
	}
}

func publishAfterClose(e *env) {
	pub := e.f.Publisher()
	e.close(pub)
	e.close(pub)
	ctx, cancel := context.WithTimeout(context.Background(), min(e.Wait, 5*time.Second))
	defer cancel()
	rs := pub.Publish(ctx, e.message(0))
	e.results(rs, 1)
	if rs[0].Outcome != brokers.NotSent || !errors.Is(rs[0].Err, brokers.ErrClosed) {
		e.Errorf("after Close: %v, %v; want not sent, ErrClosed", rs[0].Outcome, rs[0].Err)
	}
}
