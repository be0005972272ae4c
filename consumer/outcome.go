package consumer

import (
	"context"
	"errors"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/inbox"
)

// outcome is what to keep of a message that was not processed.
type outcome struct {
	discard  bool
	reason   string
	dead     bool
	delay    time.Duration
	attempts int
	err      error
	failure  inbox.Failure
}

func failure(class string, err error) inbox.Failure {
	f := inbox.Failure{Class: class, Text: err.Error()}
	var p *panicError
	if errors.As(err, &p) {
		f.Class, f.Stack = "panic", p.stack
	}
	return f
}

// failed decides what a failed run of a delivery means.
func (l *loop[Tx]) failed(j *job, err error) next {
	j.broken, j.reruns = 0, 0
	if l.blameless(j, l.decide(err, j.tries+1, time.Since(j.received)), err) {
		return again(0)
	}
	j.tries++
	l.countFailure(&Message{Message: &j.d.Message, Consumer: l.cfg.Name, Coordinates: j.d.Coordinates, Attempt: j.tries}, err)
	o := l.decide(err, j.tries, time.Since(j.received))
	retryable := !o.dead && !o.discard && o.reason == inbox.ReasonRetry && !isAfter(err)
	if retryable && j.tries < l.cfg.policy(o.failure.Class).Tries && time.Since(j.first) < l.cfg.TryFor && l.stopping.Err() == nil && !isClosed(j.d.Draining) && l.budget.take(1) == 1 {
		return again(backoff(20*time.Millisecond, l.cfg.TryFor/2, j.tries))
	}
	return l.record(j, o)
}

func isAfter(err error) bool {
	var e retryAfterError
	return errors.As(err, &e)
}

// decide is the policy: what to keep of a message whose n-th run has failed with err.
func (l *loop[Tx]) decide(err error, n int, age time.Duration) outcome {
	o := outcome{reason: inbox.ReasonRetry, attempts: n, err: err, failure: failure("handler", err)}
	var discard discardError
	var permanent permanentError
	var after retryAfterError
	isPermanent, unknown := errors.As(err, &permanent), errors.Is(err, ErrUnknownType)
	switch {
	case isPermanent:
		o.failure.Class = "permanent"
	case unknown:
		o.failure.Class = "unknown-type"
	case errors.Is(err, context.DeadlineExceeded) && o.failure.Class == "handler":
		o.failure.Class = "timeout"
	}
	if l.cfg.Class != nil {
		if c := l.cfg.Class(err); c != "" {
			o.failure.Class = c
		}
	}
	p := l.cfg.policy(o.failure.Class)
	switch {
	case errors.As(err, &discard):
		o.discard = true
	case isPermanent:
		o.dead, o.reason = true, inbox.ReasonDead
	case unknown:
		o.reason, o.attempts = inbox.ReasonUnknownType, n-1
		o.delay = backoff(p.Backoff, p.MaxBackoff, 20)
		o.dead = age >= l.cfg.UnknownTypeFor
	case n >= p.MaxAttempts:
		o.dead, o.reason = true, inbox.ReasonDead
	case errors.As(err, &after):
		o.delay = after.after
	default:
		o.delay = backoff(p.Backoff, p.MaxBackoff, n-min(n-1, p.Tries-1))
	}
	return o
}

// record keeps the outcome of a delivery in a transaction of its own and settles it.
func (l *loop[Tx]) record(j *job, o outcome) next {
	if l.full.Load() && !o.discard {
		j.pending = &o
		return again(time.Second)
	}
	ctx, cancel := l.storeContext()
	vs, err := l.store.Record(ctx, l.unit(j), l.outcome(j, o))
	cancel()
	if err != nil {
		j.pending = &o
		return l.storeFailed(j, err)
	}
	j.pending = nil
	switch vs[0] {
	case inbox.Recorded:
		return l.held(j, o)
	case inbox.Conflict:
		return l.conflict(j)
	}
	return l.duplicate(j)
}

func (l *loop[Tx]) outcome(j *job, o outcome) inbox.Outcome[Tx] {
	out := inbox.Outcome[Tx]{Item: j.item, Discard: o.discard, Reason: o.reason, Dead: o.dead, Delay: o.delay,
		Attempts: o.attempts, Failure: o.failure}
	if o.dead && !o.discard && l.deadLetter != nil {
		out.With = func(ctx context.Context, tx Tx, death int) error { return l.deadLetter(ctx, tx, j.item, o, death) }
	}
	return out
}

func (l *loop[Tx]) held(j *job, o outcome) next {
	l.countHeld(j.item.Message, o)
	l.settler.add(j, brokers.Done)
	return over
}

func (l *loop[Tx]) countHeld(m *brokers.Message, o outcome) {
	if o.discard {
		l.st.stats.discarded.Add(1)
		return
	}
	l.st.stats.held.Add(1)
	if o.dead {
		l.st.stats.dead.Add(1)
		l.cfg.Logger.Error("message is dead", "message_id", m.ID, "reason", o.reason, "error", o.err)
	}
	if f := l.cfg.Hooks.Held; f != nil {
		f(&Message{Message: m, Consumer: l.cfg.Name, Attempt: o.attempts}, o.reason, o.err)
	}
}

func (l *loop[Tx]) countFailure(m *Message, err error) {
	l.st.stats.failures.Add(1)
	if f := l.cfg.Hooks.Failed; f != nil {
		f(m, err)
	}
}
