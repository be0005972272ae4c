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
	relax  func() // gives back what cannot be kept any longer

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

func (g *gate) isOpen() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return isClosed(g.open)
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
			g.relax()
		}
		g.mu.Lock()
		close(g.open)
		g.mu.Unlock()
		g.report(nil)
	}
}

// relax gives back everything that has not started, once a delivery has been in
// hand for three quarters of what the broker lets it be held: the whole of it, since
// on an ordered lane the later ones must go with the first.
func (l *loop[Tx]) relax() {
	if l.holdLimit() == 0 {
		return
	}
	if l.jobs.Any(func(j *job) bool { return j.d != nil && time.Since(j.received) >= l.holdLimit() }) {
		l.giveBackQueued()
	}
}

func (l *loop[Tx]) giveBackQueued() {
	l.giveBack(l.jobs.Take(func(j *job) bool { return j.d != nil }))
}

// holdLimit is how long an outage may keep a delivery in hand, 0 for ever.
func (l *loop[Tx]) holdLimit() time.Duration {
	if l.caps.GiveBack == brokers.GiveBackNone {
		return 0
	}
	return l.caps.MaxHold * 3 / 4
}

// pass waits until the database can be used. It reports false when the job was given
// back instead: the consumer stops, or the outage outlasts what the broker allows.
func (l *loop[Tx]) pass(j *job) bool {
	if l.gate.isOpen() {
		if l.stopping.Err() == nil {
			return true
		}
		l.release(j)
		return false
	}
	ctx := l.stopping
	if limit := l.holdLimit(); limit > 0 && j.d != nil {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, j.received.Add(limit))
		defer cancel()
	}
	if l.gate.wait(ctx) {
		return true
	}
	l.release(j)
	if l.stopping.Err() == nil {
		l.giveBackQueued()
	}
	return false
}
