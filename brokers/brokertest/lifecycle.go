package brokertest

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
)

func lifecycleCases() []testCase {
	return []testCase{
		{name: "lifecycle/open-missing-is-fatal", run: openMissing, not: needsHook(func(f Fixture) bool { return f.MissingSource != nil }, "MissingSource")},
		{name: "lifecycle/open-on-an-ended-ctx", run: openOnEndedCtx},
		{name: "lifecycle/open-twice", run: openTwice},
		{name: "lifecycle/observer-hears-connected", run: hearsConnected},
		{name: "lifecycle/status", run: status},
		{name: "lifecycle/close-gives-back", run: closeGivesBack},
		{name: "lifecycle/close-ends-contexts", run: closeEndsContexts},
		{name: "lifecycle/close-wakes-receive", run: closeWakesReceive},
		{name: "lifecycle/close-before-open", run: closeBeforeOpen},
		{name: "lifecycle/close-twice", run: closeTwice},
		{name: "lifecycle/close-on-an-ended-ctx", run: closeOnEndedCtx},
		{name: "lifecycle/calls-after-close", run: afterClose},
	}
}

func openMissing(e *env) {
	src := e.f.MissingSource()
	ctx, cancel := context.WithTimeout(context.Background(), e.Wait)
	defer cancel()
	_, err := src.Open(ctx, brokers.OpenOptions{})
	if brokers.ClassOf(err) != brokers.Fatal || !errors.Is(err, brokers.ErrNoRoute) {
		e.Errorf("Open: %v (%v), want ErrNoRoute of class fatal", err, brokers.ClassOf(err))
	}
	e.close(src)
}

func openOnEndedCtx(e *env) {
	src := e.f.Source()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	e.within("Open on an ended ctx", func() {
		if _, err := src.Open(ctx, brokers.OpenOptions{}); err == nil {
			e.Error("Open succeeded on an ended ctx")
		}
	})
	e.close(src)
}

func openTwice(e *env) {
	src := e.open(10)
	if _, err := src.Open(context.Background(), brokers.OpenOptions{}); err == nil {
		e.Error("a second Open succeeded")
	}
	e.send(1)
	e.done(src, e.receive(src, 1)...) // and the first one is none the worse
}

func hearsConnected(e *env) {
	var mu sync.Mutex
	kinds := map[brokers.EventKind]int{}
	heard := make(chan struct{}, 1)
	e.openWith(brokers.OpenOptions{Room: 10, Observer: func(ev brokers.Event) {
		mu.Lock()
		kinds[ev.Kind]++
		mu.Unlock()
		if ev.Kind == brokers.EventConnected {
			select {
			case heard <- struct{}{}:
			default:
			}
		}
	}})
	t := time.NewTimer(e.Wait)
	defer t.Stop()
	select {
	case <-heard:
	case <-t.C:
		mu.Lock()
		defer mu.Unlock()
		e.Errorf("no connected event within %v, only %v", e.Wait, kinds)
	}
}

// status accepts brokers that count slowly, or only what is not handed over.
func status(e *env) {
	src := e.open(10)
	e.send(5)
	ds := e.receive(src, 5)
	st := e.status(src)
	if !st.Connected {
		e.Error("Status of an open Source says that it is not connected")
	}
	if lag := st.Lag(); lag < -1 || lag > 5 {
		e.Errorf("lag %d with 5 messages in hand", lag)
	}
	e.done(src, ds...)
	deadline := time.Now().Add(e.Wait)
	for lag := int64(1); lag > 0; {
		if lag = e.status(src).Lag(); lag > 0 {
			if time.Now().After(deadline) {
				e.Fatalf("lag %d after everything was settled", lag)
			}
			e.pause(context.Background())
		}
	}
}

func (e *env) status(src brokers.Source) brokers.Status {
	e.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), e.Wait)
	defer cancel()
	st, err := src.Status(ctx)
	if err != nil {
		e.Fatalf("Status: %v", err)
	}
	return st
}

func closeGivesBack(e *env) {
	src := e.open(10)
	e.send(10, "one key")
	e.receive(src, 4) // some in hand, some perhaps buffered
	e.close(src)
	next := e.open(10)
	again := e.receive(next, 10)
	e.sameIDs(again, 10)
	e.done(next, again...)
	e.quiet(next)
}

func closeEndsContexts(e *env) {
	src := e.open(10)
	e.send(3, "one key")
	ds := e.receive(src, 3)
	e.close(src)
	for _, d := range ds {
		if d.Context.Err() == nil {
			e.Errorf("%s: its Context goes on after Close", d.ID)
		}
		e.ends(d, brokers.ErrClosed, brokers.ErrOwnershipLost)
	}
}

func closeWakesReceive(e *env) {
	src := e.open(10)
	got := make(chan error, 1)
	go func() {
		_, err := src.Receive(context.Background(), 10)
		got <- err
	}()
	e.pause(context.Background()) // let it begin to wait; if it has not, Close comes first, which is as good
	e.close(src)
	t := time.NewTimer(e.Wait)
	defer t.Stop()
	select {
	case err := <-got:
		e.fails(brokers.ErrClosed, []error{err})
	case <-t.C:
		e.Fatalf("Receive did not return within %v of Close", e.Wait)
	}
}

func closeBeforeOpen(e *env) {
	src := e.f.Source()
	e.close(src)
	if _, err := src.Open(context.Background(), brokers.OpenOptions{}); err == nil {
		e.Error("Open succeeded after Close")
		e.close(src)
	}
}

func closeTwice(e *env) {
	src := e.open(10)
	e.close(src)
	e.close(src)
}

func closeOnEndedCtx(e *env) {
	src := e.open(10)
	e.send(3)
	e.receive(src, 2)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	e.within("Close on an ended ctx", func() { _ = src.Close(ctx) }) // an error is fair: not all was given back
	next := e.open(10)
	e.done(next, e.receive(next, 3)...)
}

func afterClose(e *env) {
	src := e.open(10)
	e.send(1)
	d := e.receive(src, 1)[0]
	e.close(src)
	for _, err := range e.settle(src, brokers.Done, d) {
		if !errors.Is(err, brokers.ErrClosed) && !errors.Is(err, brokers.ErrOwnershipLost) {
			e.Errorf("Settle after Close: %v", err)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), e.Wait)
	defer cancel()
	_, err := src.Receive(ctx, 1)
	e.fails(brokers.ErrClosed, []error{err})
	next := e.open(10)
	e.done(next, e.receive(next, 1)...) // the late settlement did nothing
}
