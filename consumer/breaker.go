package consumer

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/twiceproof/twiceproof/inbox"
)

// Breaker says when so many runs fail that the handler's downstream must be out. Then
// the intake and due retries pause, and one message at a time is run as a probe, whose
// failure counts for no message. Permanent failures, discards and unknown types do not
// count: they say something about messages. The zero value is ready.
type Breaker struct {
	// Share is the share of failed runs that opens it. 0 means 0.9; negative: never.
	Share float64
	// Runs is the number of runs in Window that are needed to judge. 0 means 50.
	Runs int
	// Window is what is looked back at. 0 means 10 s.
	Window time.Duration
	// Pause and MaxPause bound the time between probes, which doubles. 0: 1 s and 30 s.
	Pause, MaxPause time.Duration
}

func (b *Breaker) defaults() {
	def(&b.Share, 0.9)
	def(&b.Runs, 50)
	def(&b.Window, 10*time.Second)
	def(&b.Pause, time.Second)
	def(&b.MaxPause, 30*time.Second)
}

// breaker counts in two halves of the window, the older of which falls off.
type breaker struct {
	cfg    Breaker
	report func(err error)

	mu      sync.Mutex
	began   time.Time // of the younger half
	runs    [2]int    // younger, older
	failed  [2]int
	open    bool
	probing bool
	pause   time.Duration
	next    time.Time     // of the next probe
	changed chan struct{} // closed when it closes or a probe ends
}

func newBreaker(cfg Breaker, report func(error)) *breaker {
	return &breaker{cfg: cfg, report: report, began: time.Now(), changed: make(chan struct{})}
}

func (b *breaker) isOpen() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.open
}

// enter waits until a run may begin, and reports whether it is a probe. ok is false
// when ctx ended first.
func (b *breaker) enter(ctx context.Context) (probe, ok bool) {
	for {
		b.mu.Lock()
		if !b.open {
			b.mu.Unlock()
			return false, true
		}
		wait := time.Until(b.next)
		if !b.probing && wait <= 0 {
			b.probing = true
			b.mu.Unlock()
			return true, true
		}
		changed, probing := b.changed, b.probing
		b.mu.Unlock()
		if probing {
			wait = b.cfg.MaxPause // its end is a change
		}
		t := time.NewTimer(wait)
		select {
		case <-changed:
		case <-t.C:
		case <-ctx.Done():
		}
		t.Stop()
		if ctx.Err() != nil {
			return false, false
		}
	}
}

// ended notes how a run ended: it failed for a reason that may be the downstream's, or
// it got through. neutral: it says nothing.
func (b *breaker) ended(probe, failed, neutral bool, err error) {
	if b.cfg.Share < 0 {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if probe {
		b.probed(failed, neutral)
		return
	}
	if neutral || b.open {
		return
	}
	if now := time.Now(); now.Sub(b.began) >= b.cfg.Window/2 {
		b.runs[1], b.failed[1] = b.runs[0], b.failed[0]
		if now.Sub(b.began) >= b.cfg.Window {
			b.runs[1], b.failed[1] = 0, 0
		}
		b.runs[0], b.failed[0], b.began = 0, 0, now
	}
	b.runs[0]++
	if !failed {
		return
	}
	b.failed[0]++
	runs, bad := b.runs[0]+b.runs[1], b.failed[0]+b.failed[1]
	if runs >= b.cfg.Runs && float64(bad) >= b.cfg.Share*float64(runs) {
		b.open, b.pause = true, b.cfg.Pause
		b.schedule()
		b.report(errors.Join(errors.New("the handler fails for nearly every message: what it depends on seems to be out; consuming is paused and probed"), err))
	}
}

// probed ends a probe. The caller holds the lock.
func (b *breaker) probed(failed, neutral bool) {
	b.probing = false
	switch {
	case neutral:
		b.next = time.Now()
	case failed:
		b.pause = min(2*b.pause, b.cfg.MaxPause)
		b.schedule()
	default:
		b.open = false
		b.runs, b.failed, b.began = [2]int{}, [2]int{}, time.Now()
		b.report(nil)
	}
	close(b.changed)
	b.changed = make(chan struct{})
}

func (b *breaker) schedule() { b.next = time.Now().Add(b.pause/2 + rand.N(b.pause/2+1)) }

// enter waits while the breaker is open, unless the job is to be its probe. It reports
// false when the job was given back instead.
func (l *loop[Tx]) enter(j *job) bool {
	if !l.breaker.isOpen() {
		j.probe = false
		return true
	}
	ctx := l.stopping
	if limit := l.holdLimit(); limit > 0 && j.d != nil {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, j.received.Add(limit))
		defer cancel()
	}
	var ok bool
	if j.probe, ok = l.breaker.enter(ctx); ok {
		return true
	}
	l.release(j)
	if l.stopping.Err() == nil {
		l.giveBackQueued()
	}
	return false
}

// judged tells the breaker how a run ended.
func (l *loop[Tx]) judged(j *job, failed, neutral bool, err error) {
	l.breaker.ended(j.probe, failed, neutral, err)
	j.probe = false
}

// blameless: the run was the breaker's probe and failed as it had to.
func (l *loop[Tx]) blameless(j *job, o outcome, err error) bool {
	may := !o.discard && o.reason != inbox.ReasonUnknownType && o.failure.Class != "permanent"
	probe := j.probe
	l.judged(j, may, !may, err)
	return probe && may
}
