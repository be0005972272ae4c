package consumer

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/inbox"
)

// attempt runs the handler in a claimed transaction and ends it.
func (l *loop[Tx]) attempt(j *job, a inbox.Attempt[Tx]) next {
	if j.first.IsZero() {
		j.first = time.Now()
	}
	m := l.message(j)
	r := l.call(j, a, m, j.d.Context)
	if r.err == nil {
		return l.commit(j, a, m)
	}
	rerun, broken := a.Rerun(r.err), !r.ended && a.Broken()
	rolled := a.Rollback(l.values)
	if r.lost || r.drained || rerun || broken {
		l.judged(j, false, true, nil)
	}
	switch {
	case r.lost:
		l.drop(j)
		return over
	case r.drained:
		l.release(j)
		return over
	case rerun:
		return l.rerun(j, r.err)
	case broken:
		return l.connectionLost(j, r.err)
	case errors.Is(rolled, inbox.ErrTxEnded):
		l.cfg.Logger.Error("handler ended its transaction itself", "message_id", j.d.ID, "error", rolled)
	}
	return l.failed(j, r.err)
}

// rerun runs the same attempt again after a serialization failure or deadlock.
func (l *loop[Tx]) rerun(j *job, err error) next {
	const limit = 50
	if j.reruns++; j.reruns > limit {
		j.reruns = 0
		return l.failed(j, fmt.Errorf("%d serialization failures in a row: %w", limit, err))
	}
	l.st.stats.reruns.Add(1)
	return again(backoff(5*time.Millisecond, time.Second, j.reruns))
}

// commit ends a transaction whose handler was content.
func (l *loop[Tx]) commit(j *job, a inbox.Attempt[Tx], m *Message) next {
	ctx, cancel := context.WithTimeout(l.values, 30*time.Second)
	defer cancel()
	result, err := a.Commit(ctx)
	l.judged(j, false, result != inbox.CommitYes, nil)
	switch result {
	case inbox.CommitYes:
		l.processed(ctx, m)
		if j.tries > 0 {
			l.budget.give(1)
		} else {
			l.budget.earned()
		}
		l.settler.add(j, brokers.Done)
		j.err = nil
		return over
	case inbox.CommitUnknown:
		l.cfg.Logger.Warn("commit outcome unknown; claiming again", "message_id", j.d.ID, "error", err)
		return again(backoff(20*time.Millisecond, time.Second, 1))
	case inbox.CommitEnded:
		j.ended = true
		return again(0)
	}
	switch {
	case inbox.Rerun(err):
		return l.rerun(j, err)
	case a.Broken():
		return l.connectionLost(j, err)
	}
	return l.failed(j, err)
}

// connectionLost decides what a connection that went away under the handler means.
// It counts for nothing, unless the same message does it again and again to a
// database that is well: then the message kills its backend.
func (l *loop[Tx]) connectionLost(j *job, err error) next {
	if !l.well() {
		l.gate.trip(err)
		return again(0)
	}
	if j.broken++; j.broken >= brokenLimit {
		return l.failed(j, fmt.Errorf("the database connection was lost in %d runs in a row, and the database is well: %w", j.broken, err))
	}
	return again(backoff(20*time.Millisecond, time.Second, j.broken))
}

// brokenLimit is the lost connection in a row that counts as a failed run.
const brokenLimit = 3

// well probes the database once.
func (l *loop[Tx]) well() bool {
	ctx, cancel := context.WithTimeout(l.values, 2*time.Second)
	defer cancel()
	return l.store.Check(ctx) == nil
}

func (l *loop[Tx]) processed(ctx context.Context, m *Message) {
	l.st.stats.processed.Add(1)
	if f := l.cfg.Hooks.AfterCommit; f != nil {
		f(ctx, m)
	}
}
