package brokertest

import (
	"fmt"
	"slices"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
)

func settleCases() []testCase {
	supported := func(yes bool, why string) string {
		if !yes {
			return why
		}
		return ""
	}
	return []testCase{
		{name: "settle/done-is-final", run: doneIsFinal},
		{name: "settle/done-in-any-order", run: doneInAnyOrder},
		{name: "settle/twice", run: settleTwice},
		{name: "settle/one-error-each", run: oneErrorEach},
		{name: "settle/nothing", run: settleNothing},
		{name: "settle/foreign-delivery", run: settleForeign},
		{name: "settle/unknown-verb", run: unknownVerb},
		{name: "settle/release", run: release, not: needsGiveBack},
		{name: "settle/release-leaves-others", run: releaseLeavesOthers, not: func(s *suite) string {
			return supported(s.caps.GiveBack == brokers.GiveBackMessage, "GiveBack is "+s.caps.GiveBack.String())
		}},
		{name: "settle/release-takes-the-lane", run: releaseTakesLane, not: func(s *suite) string {
			return supported(s.caps.GiveBack == brokers.GiveBackLane, "GiveBack is "+s.caps.GiveBack.String())
		}},
		{name: "settle/release-unsupported", run: unsupported(brokers.Release), not: func(s *suite) string {
			return supported(s.caps.GiveBack == brokers.GiveBackNone, "GiveBack is "+s.caps.GiveBack.String())
		}},
		{name: "settle/retry-at-once", run: retryAtOnce, not: func(s *suite) string {
			return supported(s.caps.MaxRetryDelay > 0, "MaxRetryDelay is 0")
		}},
		{name: "settle/retry-after", run: retryAfter, not: func(s *suite) string {
			return supported(s.caps.MaxRetryDelay >= time.Second, fmt.Sprintf("MaxRetryDelay is %v", s.caps.MaxRetryDelay))
		}},
		{name: "settle/retry-unsupported", run: unsupported(brokers.Retry), not: func(s *suite) string {
			return supported(s.caps.MaxRetryDelay == 0, fmt.Sprintf("MaxRetryDelay is %v", s.caps.MaxRetryDelay))
		}},
		{name: "settle/reject", run: reject, not: func(s *suite) string {
			return supported(s.caps.Reject, "Reject is false")
		}},
		{name: "settle/reject-unsupported", run: unsupported(brokers.Reject), not: func(s *suite) string {
			return supported(!s.caps.Reject, "Reject is true")
		}},
		{name: "settle/prefix-waits-for-the-oldest", run: prefixWaits, not: func(s *suite) string {
			return supported(s.caps.PrefixSettle, "PrefixSettle is false")
		}},
	}
}

func doneIsFinal(e *env) {
	src := e.open(10)
	e.send(5)
	e.done(src, e.receive(src, 5)...)
	e.quiet(src)
	e.close(src)
	e.quiet(e.open(10))
}

func doneInAnyOrder(e *env) {
	src := e.open(50)
	e.send(20)
	ds := e.receive(src, 20)
	for _, i := range []int{19, 3, 7, 0, 11} {
		e.done(src, ds[i])
	}
	rest := slices.Concat(ds[1:3], ds[4:7], ds[8:11], ds[12:19])
	slices.Reverse(rest)
	e.done(src, rest...)
	e.close(src)
	e.quiet(e.open(10))
}

func settleTwice(e *env) {
	src := e.open(10)
	e.send(2, "one key")
	ds := e.receive(src, 2)
	e.done(src, ds[0])
	for _, v := range []brokers.Verb{brokers.Done, brokers.Release, brokers.Retry, brokers.Reject} {
		e.fails(brokers.ErrAlreadySettled, e.settle(src, v, ds[0]))
	}
	e.alive(ds[1]) // and nothing else was touched
	e.done(src, ds[1])
	e.close(src)
	e.quiet(e.open(10))
}

func oneErrorEach(e *env) {
	src := e.open(10)
	e.send(4)
	ds := e.receive(src, 4)
	e.done(src, ds[1])
	errs := e.settle(src, brokers.Done, ds...)
	for i, err := range errs {
		if i == 1 {
			e.fails(brokers.ErrAlreadySettled, []error{err})
		} else if err != nil {
			e.Errorf("settlement %d: %v", i, err)
		}
	}
	e.close(src)
	e.quiet(e.open(10))
}

func settleNothing(e *env) {
	if errs := e.open(10).Settle(e.Context()); len(errs) != 0 {
		e.Errorf("Settle of nothing returned %v", errs)
	}
}

func settleForeign(e *env) {
	src := e.open(10)
	for _, d := range []*brokers.Delivery{nil, {}, {Handle: "somebody else's"}} {
		if errs := e.settle(src, brokers.Done, d); errs[0] == nil {
			e.Errorf("a delivery that is none of its own was settled: %+v", d)
		}
	}
	e.send(1)
	e.done(src, e.receive(src, 1)...)
}

func unknownVerb(e *env) {
	src := e.open(10)
	e.send(1)
	d := e.receive(src, 1)[0]
	if errs := e.settle(src, 0, d); errs[0] == nil {
		e.Error("a settlement without a verb was accepted")
	}
	e.alive(d)
	e.done(src, d)
}

func release(e *env) {
	src := e.open(10)
	e.send(3, "one key")
	ds := e.receive(src, 3)
	slices.Reverse(ds)
	e.must(e.settle(src, brokers.Release, ds[len(ds)-1:]...)...)
	if e.caps.GiveBack == brokers.GiveBackMessage {
		e.must(e.settle(src, brokers.Release, ds[:2]...)...)
	}
	again := e.receive(src, 3)
	e.sameIDs(again, 3)
	for _, d := range again {
		e.atLeast(d, 2)
	}
	e.done(src, again...)
	e.close(src)
	e.quiet(e.open(10))
}

func releaseLeavesOthers(e *env) {
	src := e.open(10)
	e.send(3, "one key")
	ds := e.receive(src, 3)
	e.must(e.settle(src, brokers.Release, ds[1])...)
	again := e.receive(src, 1)
	if again[0].ID != ds[1].ID {
		e.Errorf("released %s, received %s", ds[1].ID, again[0].ID)
	}
	e.alive(ds[0])
	e.alive(ds[2])
	e.done(src, ds[0], ds[2], again[0])
	e.close(src)
	e.quiet(e.open(10))
}

func releaseTakesLane(e *env) {
	src := e.open(10)
	e.send(3, "one key")
	ds := e.receive(src, 3)
	e.done(src, ds[0])
	e.must(e.settle(src, brokers.Release, ds[1])...)
	e.ends(ds[2], brokers.ErrOwnershipLost)
	e.fails(brokers.ErrOwnershipLost, e.settle(src, brokers.Done, ds[2]))
	again := e.receive(src, 2)
	if got, want := ids(again), ids(ds[1:]); !slices.Equal(got, want) {
		e.Errorf("received %v, want %v in order", got, want)
	}
	// All of it in one call, as at a shutdown.
	e.must(e.settle(src, brokers.Release, again...)...)
	again = e.receive(src, 2)
	if got, want := ids(again), ids(ds[1:]); !slices.Equal(got, want) {
		e.Errorf("received %v, want %v in order", got, want)
	}
	e.done(src, again...)
	e.close(src)
	e.quiet(e.open(10))
}

// unsupported checks that a verb the broker has not changes nothing.
func unsupported(v brokers.Verb) func(*env) {
	return func(e *env) {
		src := e.open(10)
		e.send(2, "one key")
		ds := e.receive(src, 2)
		e.fails(brokers.ErrUnsupported, e.settle(src, v, ds[0]))
		e.alive(ds[0])
		e.quiet(src)
		e.done(src, ds...) // it is not settled: Done works
		e.close(src)
		e.quiet(e.open(10))
	}
}

func retryAtOnce(e *env) {
	src := e.open(10)
	e.send(1)
	for i := range 3 {
		d := e.receive(src, 1)[0]
		e.atLeast(d, i+1)
		if i < 2 {
			e.must(e.settleAll(src, brokers.Settlement{Delivery: d, Verb: brokers.Retry})...)
			continue
		}
		e.done(src, d)
	}
	e.quiet(src)
}

func retryAfter(e *env) {
	src := e.open(10)
	e.send(1)
	d := e.receive(src, 1)[0]
	start := time.Now()
	e.must(e.settleAll(src, brokers.Settlement{Delivery: d, Verb: brokers.Retry, After: time.Second})...)
	d = e.receive(src, 1)[0]
	if took := time.Since(start); took < 900*time.Millisecond {
		e.Errorf("it came again after %v, want 1 s or more", took)
	}
	e.atLeast(d, 2)
	e.done(src, d)
}

func reject(e *env) {
	src := e.open(10)
	e.send(2, "one key")
	ds := e.receive(src, 2)
	e.must(e.settle(src, brokers.Reject, ds[0])...)
	e.done(src, ds[1])
	e.quiet(src)
	e.close(src)
	e.quiet(e.open(10))
}

func prefixWaits(e *env) {
	src := e.open(10)
	e.send(5, "one key")
	ds := e.receive(src, 5)
	e.done(src, ds[1], ds[2])
	e.close(src)
	// The position stayed before the first: everything comes again.
	next := e.open(10)
	again := e.receive(next, 5)
	e.sameIDs(again, 5)
	e.done(next, again...)
	e.close(next)
	e.quiet(e.open(10))
}
