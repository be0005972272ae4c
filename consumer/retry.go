package consumer

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/twiceproof/twiceproof/inbox"
)

// tendHeld takes due held messages while there are workers for them, counts the
// held ones for MaxHeld, and repairs heads, until ctx ends.
func (l *loop[Tx]) tendHeld(ctx context.Context) {
	const (
		busyPoll = 100 * time.Millisecond
		idlePoll = time.Second
	)
	var counted, repaired time.Time
	pause := busyPoll
	for l.gate.wait(ctx) && l.pause.wait(ctx) {
		if time.Since(counted) >= time.Second {
			counted = time.Now()
			l.countForLimit(ctx)
			l.watch()
		}
		if time.Since(repaired) >= 5*time.Second {
			repaired = time.Now()
			if _, err := l.store.RepairHeads(ctx, l.cfg.Name, l.cfg.AfterDead == Continue); err != nil && ctx.Err() == nil {
				l.cfg.Logger.Warn("repair of held messages failed", "error", err)
			}
		}
		pause = min(2*pause, idlePoll)
		if l.takeHeads(ctx) {
			pause = busyPoll
		}
		t := time.NewTimer(pause)
		select {
		case <-t.C:
		case <-l.wake:
			pause = busyPoll
		case <-ctx.Done():
		}
		t.Stop()
	}
}

func (l *loop[Tx]) nudgeHeads() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

func (l *loop[Tx]) countForLimit(ctx context.Context) {
	s, err := l.store.Held(ctx, l.cfg.Name)
	if err != nil {
		return
	}
	full := s.Total >= l.cfg.MaxHeld
	if full != l.full.Swap(full) {
		if full {
			l.st.report("held", errors.New("MaxHeld is reached: intake is paused; look at the held messages"))
		} else {
			l.st.report("held", nil)
		}
	}
}

// headDone counts a head that is not in hand any more.
func (l *loop[Tx]) headDone(j *job) {
	if j.out {
		j.out = false
		l.heads.Add(-1)
	}
}

// takeHeads takes as many due heads as there are idle workers, and a share of the
// workers also where a backlog on the broker keeps all of them busy: retries must not
// wait for its end.
func (l *loop[Tx]) takeHeads(ctx context.Context) bool {
	out := int(l.heads.Load())
	n := max(l.cfg.Concurrency-int(l.busy.Load()), max(1, l.cfg.Concurrency/4)-out)
	n = min(n, l.cfg.Concurrency-out)
	if l.breaker.isOpen() {
		n = min(n, 1)
		if l.room.inHand() > 0 {
			n = 0 // a delivery is there to probe with
		}
	}
	if n <= 0 {
		return false
	}
	if n = l.budget.take(n); n == 0 {
		return false
	}
	lease := l.cfg.ClaimTimeout + l.cfg.HandlerTimeout
	if l.cfg.HandlerTimeout < 0 {
		lease = time.Hour
	}
	// Not Run's own context: its end would leave heads taken that nobody knows of, which
	// wait for the end of their lease then and look like runs that died. A database that
	// hangs must not hold the shutdown up for longer than the drain takes.
	take, cancel := l.storeContext()
	defer context.AfterFunc(l.drained, cancel)()
	heads, err := l.store.TakeHeads(take, inbox.HeadQuery{Consumer: l.cfg.Name, Max: n, Lease: lease + l.cfg.Grace})
	cancel()
	l.budget.give(n - len(heads))
	if err != nil && ctx.Err() == nil && !inbox.Rerun(err) && !errors.Is(err, inbox.ErrClaimTimeout) {
		l.gate.trip(err)
	}
	for _, h := range heads {
		j := &job{head: h, item: h.Item, received: time.Now(), out: true}
		if err != nil { // perhaps taken: they go back as soon as the database answers
			j.owed = func(ctx context.Context) error { return l.store.ReturnHead(ctx, h, 0) }
		}
		l.heads.Add(1)
		if !l.jobs.PushFront(string(h.Item.OrderKey), j) {
			l.headDone(j)
			l.returnHead(j, 0)
		}
	}
	return len(heads) > 0
}

// retry runs a held message.
func (l *loop[Tx]) retry(j *job) next {
	h := j.head
	ctx, cancel := l.storeContext()
	a, err := l.store.BeginRetry(ctx, h, l.unit(j))
	cancel()
	if err != nil {
		l.judged(j, false, true, nil)
		return l.retryNotBegun(j, err)
	}
	if died := h.Starts - 1 - h.Attempts; died >= l.cfg.CrashLimit {
		l.judged(j, false, true, nil)
		err := errors.New("the process ended during too many runs of this message")
		return l.failHead(j, a, outcome{reason: inbox.ReasonCrashLoop, dead: true, attempts: h.Attempts, err: err, failure: failure("crash-loop", err)})
	}
	m := l.message(j)
	r := l.call(j, a, m, nil)
	if r.err == nil {
		return l.commitHead(j, a, m)
	}
	rerun, broken := a.Rerun(r.err), !r.ended && a.Broken()
	if r.drained || rerun || broken {
		l.judged(j, false, true, nil)
	}
	switch {
	case r.drained, rerun:
		_ = a.Rollback(l.values)
		return l.takeBack(j, backoff(5*time.Millisecond, time.Second, 1))
	case broken:
		return l.headConnectionLost(j, a, r.err)
	}
	if l.blameless(j, l.decide(r.err, j.head.Attempts+1, j.head.Age), r.err) {
		_ = a.Rollback(l.values)
		return l.takeBack(j, 0)
	}
	return l.failHead(j, a, l.decideHead(j, r.err))
}

// retryNotBegun decides what an error of BeginRetry means.
func (l *loop[Tx]) retryNotBegun(j *job, err error) next {
	switch {
	case errors.Is(err, inbox.ErrHeadLost):
	case errors.Is(err, inbox.ErrTxEnded):
		l.cfg.Logger.Error("handler ended its transaction itself; its work is committed", "message_id", j.item.Message.ID, "error", err)
	default:
		if !errors.Is(err, inbox.ErrClaimTimeout) && !inbox.Rerun(err) {
			l.gate.trip(err)
		}
		return l.takeBack(j, time.Second)
	}
	return over
}

// headConnectionLost is connectionLost for a held message: what it did before is
// remembered here, since a start that counts for nothing leaves no trace.
func (l *loop[Tx]) headConnectionLost(j *job, a inbox.Attempt[Tx], err error) next {
	if l.well() {
		n := 1
		if v, ok := l.broken.Load(j.head.Seq); ok {
			n += v.(int)
		}
		l.broken.Store(j.head.Seq, n)
		if n >= brokenLimit {
			l.broken.Delete(j.head.Seq)
			return l.failHead(j, a, l.decideHead(j, fmt.Errorf("the database connection was lost in %d runs in a row, and the database is well: %w", n, err)))
		}
	} else {
		l.gate.trip(err)
	}
	_ = a.Rollback(l.values)
	return l.takeBack(j, backoff(20*time.Millisecond, time.Second, 1))
}

func (l *loop[Tx]) decideHead(j *job, err error) outcome {
	l.broken.Delete(j.head.Seq)
	l.countFailure(l.message(j), err)
	return l.decide(err, j.head.Attempts+1, j.head.Age)
}

func (l *loop[Tx]) commitHead(j *job, a inbox.Attempt[Tx], m *Message) next {
	ctx, cancel := context.WithTimeout(l.values, 30*time.Second)
	defer cancel()
	result, err := a.Commit(ctx)
	l.judged(j, false, result != inbox.CommitYes, nil)
	switch {
	case result == inbox.CommitYes:
		l.budget.give(1)
		l.broken.Delete(j.head.Seq)
		j.err = nil
		l.processed(ctx, m)
	case result == inbox.CommitUnknown:
		// The row is gone with its start, or the start counts for nothing.
		l.cfg.Logger.Warn("commit of a held message is unknown; taking its start back if it is still there", "message_id", m.ID, "error", err)
		return l.takeBack(j, backoff(20*time.Millisecond, time.Second, 1))
	case result != inbox.CommitNo:
		// Ended by the handler: due again after its lease, with its mark if the handler
		// had committed it.
		l.cfg.Logger.Warn("commit of a held message did not end as it should", "message_id", m.ID, "error", err)
	case a.Broken():
		return l.headConnectionLost(j, a, err)
	case errors.Is(err, inbox.ErrHeadLost), inbox.Rerun(err):
		return l.takeBack(j, backoff(5*time.Millisecond, time.Second, 1))
	default:
		return l.failHead(j, a, l.decideHead(j, err))
	}
	return over
}

// failHead keeps the outcome of a failed run on the held message.
func (l *loop[Tx]) failHead(j *job, a inbox.Attempt[Tx], o outcome) next {
	return l.writeHead(j, func(ctx context.Context) error {
		err := a.Fail(ctx, l.outcome(j, o))
		if err == nil && (o.dead || o.discard) {
			l.countHeld(j.item.Message, o)
		}
		return err
	})
}

// takeBack takes the start of a head back: it counts for nothing.
func (l *loop[Tx]) takeBack(j *job, after time.Duration) next {
	return l.writeHead(j, func(ctx context.Context) error { return l.store.ReturnHead(ctx, j.head, after) })
}

// writeHead ends a run of a held message by a write about it. While the database is
// away it is owed: the run has counted as begun, and if nothing were written it would
// wait for the end of its lease and look like one that died with its process.
func (l *loop[Tx]) writeHead(j *job, write func(ctx context.Context) error) next {
	ctx, cancel := l.storeContext()
	err := write(ctx)
	cancel()
	j.owed = nil
	if err == nil || errors.Is(err, inbox.ErrHeadLost) {
		return over
	}
	l.cfg.Logger.Warn("what became of the run of a held message could not be written", "message_id", j.item.Message.ID, "error", err)
	if !l.well() {
		j.owed = write
		l.gate.trip(err)
		return again(0)
	}
	// The error may be of a connection that an outage left behind.
	const limit = 5
	if j.unwritten++; j.unwritten < limit {
		j.owed = write
		return again(backoff(20*time.Millisecond, time.Second, j.unwritten))
	}
	return over // the database is there and will not have it: the lease ends by itself
}

// returnHead is takeBack for a head that has not run, or cannot wait.
func (l *loop[Tx]) returnHead(j *job, after time.Duration) {
	ctx, cancel := l.storeContext()
	defer cancel()
	if err := l.store.ReturnHead(ctx, j.head, after); err != nil {
		l.cfg.Logger.Warn("held message could not be given back; it is due again after its lease", "message_id", j.item.Message.ID, "error", err)
	}
}
