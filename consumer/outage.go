package consumer

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
)

// gate is shut while the database cannot be used: nothing is received and no attempt
// starts until a probe succeeds. An outage counts for no message.
type gate struct {
	*valve
	check   func(ctx context.Context) error
	report  func(err error)
	relax   func() // gives back what cannot be kept any longer
	tripped chan struct{}
}

func newGate[Tx any](l *loop[Tx]) *gate {
	return &gate{valve: newValve(), tripped: make(chan struct{}, 1), check: l.store.Check,
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

// trip shuts the gate.
func (g *gate) trip(err error) {
	if g.shut() {
		g.report(err)
		g.tripped <- struct{}{} // its place is free: run opens the gate after it took the last one
	}
}

// run probes with backoff whenever the gate is shut, until ctx ends.
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
		g.report(nil) // before another trip can report
		g.open()
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
