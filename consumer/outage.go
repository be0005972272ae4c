package consumer

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
)

// gate is closed while the database cannot be used: nothing is received and no
// attempt starts until a probe succeeds. An outage counts for no message.
type gate struct {
	check  func(ctx context.Context) error
	report func(err error)
	relax  func(since time.Time) // gives back what cannot be kept that long

	mu      sync.Mutex
	open    chan struct{} // closed while the gate is open
	tripped chan struct{}
}

func newGate[Tx any](l *loop[Tx]) *gate {
	open := make(chan struct{})
	close(open)
	return &gate{open: open, tripped: make(chan struct{}, 1), check: l.store.Check,
		report: func(err error) {
			l.st.report("database", err)
			if err != nil {
				l.cfg.Logger.Error("database cannot be used; consuming is paused", "error", err)
			} else {
				l.cfg.Logger.Info("database is back; consuming goes on")
			}
		},
		relax: l.relax}
}

// trip closes the gate.
func (g *gate) trip(err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !isClosed(g.open) {
		return
	}
	g.open = make(chan struct{})
	g.report(err)
	select {
	case g.tripped <- struct{}{}:
	default:
	}
}

// wait blocks while the gate is closed; false when ctx ended.
func (g *gate) wait(ctx context.Context) bool {
	g.mu.Lock()
	open := g.open
	g.mu.Unlock()
	select {
	case <-open:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}

// run probes with backoff whenever the gate is closed, until ctx ends.
func (g *gate) run(ctx context.Context) {
	for {
		select {
		case <-g.tripped:
		case <-ctx.Done():
			return
		}
		since := time.Now()
		for pause := 50 * time.Millisecond; ; pause = min(2*pause, 5*time.Second) {
			if !sleep(ctx, pause/2+rand.N(pause/2)) {
				return
			}
			probe, cancel := context.WithTimeout(ctx, 5*time.Second)
			err := g.check(probe)
			cancel()
			if err == nil {
				break
			}
			g.relax(since)
		}
		g.mu.Lock()
		close(g.open)
		g.mu.Unlock()
		g.report(nil)
	}
}

// relax gives back, once an outage outlasts three quarters of what the broker lets a
// delivery be held, everything that has not started.
func (l *loop[Tx]) relax(time.Time) {
	if l.caps.MaxHold == 0 || l.caps.GiveBack == brokers.GiveBackNone {
		return
	}
	js := l.jobs.Take()
	keep := js[:0]
	oldest := time.Duration(0)
	for _, j := range js {
		if j.d != nil {
			oldest = max(oldest, time.Since(j.received))
		}
	}
	if oldest < l.caps.MaxHold*3/4 {
		keep = js
	} else {
		l.giveBack(js)
	}
	for _, j := range keep {
		if !l.jobs.Push(string(j.item.OrderKey), j) {
			l.giveBack([]*job{j})
		}
	}
}
