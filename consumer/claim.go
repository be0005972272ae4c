package consumer

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/inbox"
)

func (l *loop[Tx]) claim(j *job) next {
	ctx, cancel := l.storeContext()
	u := l.unit(j)
	a, vs, err := l.store.Begin(ctx, u)
	cancel()
	if err != nil {
		l.judged(j, false, true, nil)
		return l.storeFailed(j, err)
	}
	j.waits = 0
	if vs[0] != inbox.Claimed || j.ended {
		l.judged(j, false, true, nil)
	}
	switch vs[0] {
	case inbox.Claimed:
		if j.ended {
			_ = a.Rollback(l.values)
			return l.record(j, outcome{reason: inbox.ReasonTxEnded, dead: true, attempts: j.tries + 1, err: inbox.ErrTxEnded,
				failure: failure("tx-ended", inbox.ErrTxEnded)})
		}
		if l.tooOld(j) {
			_ = a.Rollback(l.values)
			l.judged(j, false, true, nil)
			err := fmt.Errorf("it is of %s, older than what the inbox remembers: it may have been processed before", j.d.Time.UTC().Format(time.RFC3339))
			return l.record(j, outcome{reason: inbox.ReasonTooOld, dead: true, discard: l.cfg.TooOld == DiscardTooOld, err: err, failure: failure("too-old", err)})
		}
		return l.attempt(j, a)
	case inbox.Behind:
		if !u.HoldBehind { // what was asked, not what MaxHeld says by now: it is not held
			return again(time.Second)
		}
		return l.held(j, outcome{reason: inbox.ReasonBehind})
	case inbox.Conflict:
		return l.conflict(j)
	default:
		return l.duplicate(j)
	}
}

func (l *loop[Tx]) unit(j *job) inbox.Unit {
	u := inbox.Unit{Consumer: l.cfg.Name, Items: []*inbox.Item{j.item}, ClaimTimeout: l.cfg.ClaimTimeout,
		ContinueAfterDead: l.cfg.AfterDead == Continue, HoldBehind: !l.full.Load()}
	if l.cfg.HandlerTimeout > 0 {
		u.IdleTimeout = l.cfg.HandlerTimeout + l.cfg.ClaimTimeout
	}
	return u
}

// storeContext bounds the store's own statements; it outlives Run's context.
func (l *loop[Tx]) storeContext() (context.Context, context.CancelFunc) {
	return context.WithTimeout(l.values, l.cfg.ClaimTimeout+10*time.Second)
}

func (l *loop[Tx]) duplicate(j *job) next {
	if j.ended {
		l.cfg.Logger.Error("handler ended its transaction itself; its work is committed", "message_id", j.d.ID, "error", inbox.ErrTxEnded)
		l.st.stats.processed.Add(1)
	} else {
		l.st.stats.duplicates.Add(1)
		if f := l.cfg.Hooks.Duplicate; f != nil {
			f(l.message(j))
		}
	}
	l.settler.add(j, brokers.Done)
	return over
}

func (l *loop[Tx]) conflict(j *job) next {
	l.st.stats.conflicts.Add(1)
	if f := l.cfg.OnConflict; f != nil && f(l.message(j)) == Ignore {
		return l.duplicate(j)
	}
	err := fmt.Errorf("message id %q was used before for other content", j.d.ID)
	return l.record(j, outcome{reason: inbox.ReasonConflict, dead: true, err: err, failure: failure("conflict", err)})
}

// storeFailed decides what an error of claim or hold means.
func (l *loop[Tx]) storeFailed(j *job, err error) next {
	switch {
	case errors.Is(err, inbox.ErrClaimTimeout):
		j.waits++
		return again(backoff(100*time.Millisecond, 5*time.Second, j.waits))
	case inbox.Rerun(err):
		l.st.stats.reruns.Add(1)
		return again(backoff(5*time.Millisecond, time.Second, j.waits))
	}
	l.gate.trip(err)
	return again(0)
}
