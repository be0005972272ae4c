package consumer

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime/debug"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/inbox"
	"github.com/twiceproof/twiceproof/internal/lanes"
)

// job is a delivery, or a held message that is due.
type job struct {
	d        *brokers.Delivery
	head     *inbox.Head
	item     *inbox.Item
	defect   error // why the message can only be held
	received time.Time
	arrival  uint64 // the deliveries' order

	ctx context.Context // what the interceptors gave, nil without
	err error           // how the last run ended, for the interceptors

	out       bool                            // a head that counts as taken
	suspect   bool                            // it may have ended a process before
	judged    bool                            // suspect is known
	probe     bool                            // the breaker's: its failure counts for nothing
	tries     int                             // failed runs of this delivery
	first     time.Time                       // when the first run began
	reruns    int                             // serialization failures in a row
	broken    int                             // lost connections in a row
	waits     int                             // claims that timed out in a row
	ended     bool                            // the handler ended the transaction; claim again to know
	pending   *outcome                        // what is to be kept, when keeping it has failed before
	owed      func(ctx context.Context) error // what is still to be written about the head
	unwritten int                             // failures of that in a row, with a database that is there
}

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

// next is what a worker does with a job afterwards.
type next struct {
	again bool // put it back at the front of its key, which stays closed for after
	after time.Duration
}

var over = next{}

func again(after time.Duration) next { return next{true, after} }

// work runs jobs until the scheduler is closed.
func (l *loop[Tx]) work() {
	for {
		t, ok := l.jobs.Next()
		if !ok {
			return
		}
		l.busy.Add(1)
		n := l.process(t.Job)
		l.busy.Add(-1)
		l.finish(t, n)
	}
}

func (l *loop[Tx]) finish(t lanes.Ticket[*job], n next) {
	switch {
	case !n.again:
		l.progress.Store(time.Now().UnixNano())
		l.headDone(t.Job)
		l.jobs.End(t)
	case !l.jobs.Again(t, n.after):
		l.jobs.End(t)
		l.release(t.Job) // shutting down
	}
	if t.Job.head != nil {
		l.nudgeHeads()
	}
}

// process takes a job one step further.
func (l *loop[Tx]) process(j *job) next {
	if !l.pass(j) {
		return over
	}
	if j.owed != nil {
		return l.writeHead(j, j.owed)
	}
	if j.head != nil {
		if !l.enter(j) {
			return over
		}
		return l.intercept(j, l.retry)
	}
	switch {
	case j.d.Context != nil && j.d.Context.Err() != nil:
		l.drop(j)
		return over
	case isClosed(j.d.Draining):
		l.release(j)
		return over
	case j.pending != nil:
		return l.record(j, *j.pending)
	case j.defect != nil:
		reason := inbox.ReasonBadID
		if errors.Is(j.defect, inbox.ErrNoID) {
			reason = inbox.ReasonNoID
		}
		j.item.ID = ""
		return l.record(j, outcome{reason: reason, dead: true, err: j.defect, failure: failure("id", j.defect)})
	}
	if !l.enter(j) {
		return over
	}
	return l.intercept(j, l.careful)
}

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

func failure(class string, err error) inbox.Failure {
	f := inbox.Failure{Class: class, Text: err.Error()}
	var p *panicError
	if errors.As(err, &p) {
		f.Class, f.Stack = "panic", p.stack
	}
	return f
}

// message is what the next run of a job's handler gets.
func (l *loop[Tx]) message(j *job) *Message {
	if h := j.head; h != nil {
		return &Message{Message: h.Item.Message, Consumer: l.cfg.Name, Coordinates: h.Item.Coordinates, Attempt: h.Attempts + 1, Replayed: true}
	}
	return &Message{Message: &j.d.Message, Consumer: l.cfg.Name, Coordinates: j.d.Coordinates, Attempt: j.tries + 1}
}

func (l *loop[Tx]) countFailure(m *Message, err error) {
	l.st.stats.failures.Add(1)
	if f := l.cfg.Hooks.Failed; f != nil {
		f(m, err)
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

// backoff doubles from first to limit, with full jitter.
func backoff(first, limit time.Duration, n int) time.Duration {
	d := first
	for i := 1; i < n && d < limit; i++ {
		d *= 2
	}
	d = min(d, limit)
	return d/10 + rand.N(d)
}

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

// drop forgets a delivery whose ownership is lost.
func (l *loop[Tx]) drop(j *job) {
	l.st.stats.lost.Add(1)
	l.room.give(j.d.Size())
}

// panicError is a handler's panic.
type panicError struct {
	value any
	stack string
}

func (e *panicError) Error() string { return fmt.Sprintf("handler panicked: %v", e.value) }

// result is how a handler came back.
type result struct {
	err     error
	lost    bool // its delivery's ownership was lost
	drained bool // the drain deadline ended it
	ended   bool // its context had ended
}

// call runs the handler with its deadline. A handler that ignores its context past
// the grace period loses its connection.
func (l *loop[Tx]) call(j *job, a inbox.Attempt[Tx], m *Message, owned context.Context) result {
	values := l.values
	if j.ctx != nil {
		values = context.WithoutCancel(j.ctx) // an interceptor's
	}
	ctx, cancel := context.WithCancelCause(values)
	defer cancel(nil)
	if l.cfg.HandlerTimeout > 0 {
		var stop context.CancelFunc
		ctx, stop = context.WithTimeoutCause(ctx, l.cfg.HandlerTimeout, fmt.Errorf("handler timeout of %s: %w", l.cfg.HandlerTimeout, context.DeadlineExceeded))
		defer stop()
	}
	if owned != nil {
		defer context.AfterFunc(owned, func() { cancel(brokers.ErrOwnershipLost) })()
	}
	defer context.AfterFunc(l.drained, func() { cancel(errDraining) })()
	done := make(chan error, 1)
	go func() {
		defer func() {
			if v := recover(); v != nil {
				done <- &panicError{v, string(debug.Stack())}
			}
		}()
		done <- l.handler(ctx, a.Tx(), m)
	}()
	var err error
	select {
	case err = <-done:
	case <-ctx.Done():
		err = l.awaitReturn(ctx, a, m, done)
	}
	cause := context.Cause(ctx)
	j.err = err
	r := result{err: err, ended: ctx.Err() != nil}
	if err != nil {
		r.lost = errors.Is(cause, brokers.ErrOwnershipLost)
		r.drained = errors.Is(cause, errDraining)
		if r.ended && errors.Is(cause, context.DeadlineExceeded) {
			r.err = errors.Join(cause, err)
		}
	}
	return r
}

// awaitReturn gives a handler whose context has ended the grace period, and cuts its
// connection then.
func (l *loop[Tx]) awaitReturn(ctx context.Context, a inbox.Attempt[Tx], m *Message, done <-chan error) error {
	t := time.NewTimer(l.cfg.Grace)
	defer t.Stop()
	select {
	case err := <-done:
		return err
	case <-t.C:
	}
	stuck := fmt.Errorf("handler of message %q ignores its context", m.ID)
	l.abandon(+1, stuck)
	killCtx, cancel := context.WithTimeout(l.values, 5*time.Second)
	err := a.Kill(killCtx)
	cancel()
	l.cfg.Logger.Error("handler ignores its context; its connection is cut", "message_id", m.ID, "cause", context.Cause(ctx), "error", err)
	if err != nil {
		// Nobody can end its transaction but itself (SQLite).
		err = errors.Join(<-done, stuck)
		l.abandon(-1, nil)
		return err
	}
	go func() {
		<-done
		l.abandon(-1, nil)
	}()
	return stuck
}

// abandon counts the handlers that go on although their context has ended.
func (l *loop[Tx]) abandon(n int64, stuck error) {
	if n > 0 {
		l.st.stats.abandoned.Add(1)
		l.st.report("handler", stuck)
	}
	if l.stuck.Add(n) == 0 {
		l.st.report("handler", nil)
	}
}
