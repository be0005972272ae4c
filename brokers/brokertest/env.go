package brokertest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
)

// env is what a case works with.
type env struct {
	*testing.T
	*suite
	f   Fixture
	pub brokers.Publisher
}

func newEnv(t *testing.T, s *suite) *env {
	e := &env{T: t, suite: s, f: s.New(t)}
	e.pub = e.f.Publisher()
	t.Cleanup(func() { e.close(e.pub) })
	return e
}

type closer interface {
	Close(ctx context.Context) error
}

// close closes a Source or Publisher and fails if that takes too long.
func (e *env) close(c closer) {
	e.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), e.Wait)
	defer cancel()
	if err := c.Close(ctx); err != nil {
		e.Errorf("Close of %T: %v", c, err)
	}
}

// open returns an open Source that is closed at the end of the case.
func (e *env) open(room int) brokers.Source {
	e.Helper()
	return e.openWith(brokers.OpenOptions{Room: room})
}

func (e *env) openWith(o brokers.OpenOptions) brokers.Source {
	e.Helper()
	o.Consumer = "brokertest"
	src := e.f.Source()
	ctx, cancel := context.WithTimeout(context.Background(), e.Wait)
	defer cancel()
	caps, err := src.Open(ctx, o)
	if err != nil {
		e.Fatalf("Open: %v", err)
	}
	e.Cleanup(func() { e.close(src) })
	if caps != e.caps {
		e.Errorf("Open returned other capabilities than the first Source:\n%+v\n%+v", caps, e.caps)
	}
	return src
}

// message returns the i-th message of a case, with a key of its own.
func (e *env) message(i int) *brokers.Message {
	return &brokers.Message{
		ID:      fmt.Sprintf("id-%04d", i),
		Topic:   e.f.Destination,
		Key:     fmt.Sprintf("key-%d", i),
		Payload: fmt.Appendf(nil, "payload %d", i),
	}
}

// send publishes n messages, all with the given key if there is one.
func (e *env) send(n int, key ...string) {
	e.Helper()
	ms := make([]*brokers.Message, n)
	for i := range ms {
		ms[i] = e.message(i)
		if len(key) > 0 {
			ms[i].Key = key[0]
		}
	}
	e.publish(ms...)
}

// publish publishes and expects Accepted.
func (e *env) publish(ms ...*brokers.Message) {
	e.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), e.Wait)
	defer cancel()
	rs := e.pub.Publish(ctx, ms...)
	if len(rs) != len(ms) {
		e.Fatalf("Publish of %d messages returned %d results", len(ms), len(rs))
	}
	for i, r := range rs {
		if r.Outcome != brokers.Accepted || r.Err != nil {
			e.Fatalf("message %d of %d: %v, %v; want accepted", i, len(ms), r.Outcome, r.Err)
		}
	}
}

// receive receives until n different messages are in hand and returns the latest
// delivery of each in the order of their first. It settles nothing.
func (e *env) receive(src brokers.Source, n int) []*brokers.Delivery {
	e.Helper()
	var ds []*brokers.Delivery
	ctx, cancel := context.WithTimeout(context.Background(), e.Wait)
	defer cancel()
	for len(ds) < n {
		more := e.tryReceive(ctx, src, n-len(ds))
		if more == nil {
			e.Fatalf("received %d of %d messages within %v: %v", len(ds), n, e.Wait, ids(ds))
		}
		for _, d := range more {
			if i := slices.IndexFunc(ds, func(o *brokers.Delivery) bool { return o.ID == d.ID }); i >= 0 {
				ds[i] = d
				continue
			}
			ds = append(ds, d)
		}
	}
	return ds
}

// tryReceive is one Receive; nil when ctx ended. Errors that are worth another call
// get one.
func (e *env) tryReceive(ctx context.Context, src brokers.Source, max int) []*brokers.Delivery {
	e.Helper()
	for {
		ds, err := src.Receive(ctx, max)
		switch {
		case err == nil:
			if len(ds) == 0 || len(ds) > max {
				e.Fatalf("Receive(max %d) returned %d deliveries and no error", max, len(ds))
			}
			for _, d := range ds {
				e.wellFormed(d)
			}
			return ds
		case len(ds) > 0:
			e.Fatalf("Receive returned %d deliveries and the error %v: they would be lost", len(ds), err)
		case ctx.Err() != nil:
			if !errors.Is(err, ctx.Err()) {
				e.Errorf("Receive returned %v at the end of its ctx, want %v", err, ctx.Err())
			}
			return nil
		case brokers.ClassOf(err) == brokers.Fatal || errors.Is(err, brokers.ErrClosed):
			e.Fatalf("Receive: %v", err)
		}
		e.pause(ctx)
	}
}

// pause is the pause that Receive's contract asks for after an error.
func (e *env) pause(ctx context.Context) {
	t := time.NewTimer(50 * time.Millisecond)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// wellFormed checks what every delivery has.
func (e *env) wellFormed(d *brokers.Delivery) {
	e.Helper()
	switch {
	case d.Context == nil:
		e.Fatalf("%s: no Context", d.ID)
	case d.Lane.Name == "":
		e.Errorf("%s: no Lane", d.ID)
	case d.Coordinates == "":
		e.Errorf("%s: no Coordinates", d.ID)
	}
	if _, ok := d.Context.Deadline(); ok {
		e.Errorf("%s: its Context carries a deadline", d.ID)
	}
	switch {
	case e.caps.Counting == brokers.CountsNothing && d.Attempt != 0:
		e.Errorf("%s: attempt %d from a broker that counts nothing", d.ID, d.Attempt)
	case e.caps.Counting == brokers.CountsRedelivered && (d.Attempt < 1 || d.Attempt > 2):
		e.Errorf("%s: attempt %d from a broker that knows redelivered or not", d.ID, d.Attempt)
	case e.caps.Counting == brokers.CountsDeliveries && d.Attempt < 1:
		e.Errorf("%s: attempt %d from a broker that counts deliveries", d.ID, d.Attempt)
	}
}

// atLeast checks an attempt's lower bound.
func (e *env) atLeast(d *brokers.Delivery, n int) {
	e.Helper()
	if e.caps.Counting == brokers.CountsRedelivered {
		n = min(n, 2)
	}
	if e.caps.Counting != brokers.CountsNothing && d.Attempt < n {
		e.Errorf("%s: attempt %d, want at least %d", d.ID, d.Attempt, n)
	}
}

// quiet checks that nothing is handed over for a while.
func (e *env) quiet(src brokers.Source) {
	e.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), e.Quiet)
	defer cancel()
	if ds := e.tryReceive(ctx, src, 100); ds != nil {
		e.Fatalf("received %v, want nothing", ids(ds))
	}
}

// settle settles in one call and returns one error each.
func (e *env) settle(src brokers.Source, v brokers.Verb, ds ...*brokers.Delivery) []error {
	e.Helper()
	ss := make([]brokers.Settlement, len(ds))
	for i, d := range ds {
		ss[i] = brokers.Settlement{Delivery: d, Verb: v}
	}
	return e.settleAll(src, ss...)
}

func (e *env) settleAll(src brokers.Source, ss ...brokers.Settlement) []error {
	e.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), e.Wait)
	defer cancel()
	errs := src.Settle(ctx, ss...)
	if errs == nil {
		return make([]error, len(ss))
	}
	if len(errs) != len(ss) {
		e.Fatalf("Settle of %d returned %d errors", len(ss), len(errs))
	}
	return errs
}

// done settles as Done and expects success.
func (e *env) done(src brokers.Source, ds ...*brokers.Delivery) {
	e.Helper()
	e.must(e.settle(src, brokers.Done, ds...)...)
}

func (e *env) must(errs ...error) {
	e.Helper()
	for i, err := range errs {
		if err != nil {
			e.Fatalf("settlement %d of %d: %v", i, len(errs), err)
		}
	}
}

// one expects a single settlement to fail with want.
func (e *env) fails(want error, errs []error) {
	e.Helper()
	for _, err := range errs {
		if !errors.Is(err, want) {
			e.Errorf("got %v, want %v", err, want)
		}
	}
}

// ends waits until a delivery's Context ends and checks its cause.
func (e *env) ends(d *brokers.Delivery, causes ...error) {
	e.Helper()
	t := time.NewTimer(e.Wait)
	defer t.Stop()
	select {
	case <-d.Context.Done():
	case <-t.C:
		e.Fatalf("%s: its Context did not end within %v", d.ID, e.Wait)
	}
	cause := context.Cause(d.Context)
	if !slices.ContainsFunc(causes, func(c error) bool { return errors.Is(cause, c) }) {
		e.Errorf("%s: its Context ended with %v, want one of %v", d.ID, cause, causes)
	}
}

// alive checks that a delivery's Context has not ended.
func (e *env) alive(d *brokers.Delivery) {
	e.Helper()
	if err := context.Cause(d.Context); err != nil {
		e.Errorf("%s: its Context ended with %v", d.ID, err)
	}
}

func (e *env) sameIDs(ds []*brokers.Delivery, n int) {
	e.Helper()
	want := make([]string, n)
	for i := range want {
		want[i] = e.message(i).ID
	}
	got := slices.Sorted(slices.Values(ids(ds)))
	if !slices.Equal(got, want) {
		e.Errorf("received %v, want %v", got, want)
	}
}

func ids(ds []*brokers.Delivery) []string {
	s := make([]string, len(ds))
	for i, d := range ds {
		s[i] = d.ID
	}
	return s
}

// within runs f and fails if it takes longer than Wait.
func (e *env) within(what string, f func()) {
	e.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	t := time.NewTimer(e.Wait)
	defer t.Stop()
	select {
	case <-done:
	case <-t.C:
		e.Fatalf("%s did not return within %v", what, e.Wait)
	}
}

// Reasons why cases do not apply.

func needsGiveBack(s *suite) string {
	if s.caps.GiveBack == brokers.GiveBackNone {
		return "GiveBack is none"
	}
	return ""
}

func needsHook(ok func(Fixture) bool, name string) func(*suite) string {
	return func(s *suite) string {
		if !ok(s.hooks) {
			return "the Fixture has no " + name
		}
		return ""
	}
}

func needsLaneOrder(s *suite) string {
	if !s.caps.LaneOrdered {
		return "LaneOrdered is false"
	}
	return ""
}

func needsNoLaneOrder(s *suite) string {
	if s.caps.LaneOrdered {
		return "LaneOrdered: a lane goes to one consumer at a time"
	}
	return ""
}
