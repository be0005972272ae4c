package outbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
)

// markTimeout bounds the wait for the database with what is published already.
const markTimeout = 10 * time.Second

// slowFetch is when reading the backlog deserves a line in the log.
const slowFetch = time.Second

// run is one membership of a relay: from the first lease until it leaves.
type run struct {
	*Relay
	id  string
	log *slog.Logger

	renewed time.Time     // when the last renewal was sent
	shares  map[int]int64 // share -> token, as of then
	short   bool          // they are less than its part
	owed    []*row        // accepted by the broker, and the mark has failed so far
	marking *marking      // a mark on its way while the next batch is published
	batch   int           // messages of the next Publish
	dirty   bool          // published rows may be due for cleanup

	fetchTook                 time.Duration // the last look for work
	troubleSince, troubleSaid time.Time

	accepted int64         // by this run
	tries    map[int64]try // rows whose last failure was no attempt
}

// try is the last failure of a row that was no attempt.
type try struct {
	row      *row // without its message
	n        int
	accepted int64 // what the run had got accepted by then
	aside    bool  // it waits for its next try
}

// marking is a mark that runs beside the next fetch and Publish.
type marking struct {
	rows []*row
	done chan struct{}
	n    int
	err  error
}

// step renews the lease when it is time, and publishes one batch. worked: there may
// be more at once.
func (u *run) step(ctx context.Context) (worked bool, err error) {
	// First the marks that are owed: a renewal may give up the shares they need.
	if err := u.markOwed(ctx); err != nil {
		return false, err
	}
	every := u.cfg.Lease / 4
	if u.short {
		every = u.cfg.Lease / 20 // what others give up, or leave behind, is taken soon
	}
	if time.Since(u.renewed) > every {
		if err := u.renew(ctx); err != nil {
			return false, err
		}
	}
	if u.dirty {
		if u.dirty, err = u.q.cleanup(ctx); err != nil {
			return false, fmt.Errorf("clean up published messages: %w", err)
		}
	}
	rows, err := u.fetch(ctx)
	if err != nil {
		return false, err
	}
	if len(rows) == 0 {
		return false, u.finishMark()
	}
	return u.publish(ctx, rows)
}

func (u *run) renew(ctx context.Context) error {
	if err := u.finishMark(); err != nil {
		return err
	}
	sent := time.Now()
	shares, short, err := u.q.lease(ctx, u.id, u.cfg.Lease)
	if err != nil {
		return fmt.Errorf("renew the lease: %w", err)
	}
	if len(shares) != len(u.shares) {
		u.log.Info("relay has another part of the keys", "shares", len(shares), "of", Shares)
	}
	u.renewed, u.shares, u.short, u.dirty = sent, shares, short, true
	return nil
}

func (u *run) fetch(ctx context.Context) ([]*row, error) {
	f := fetch{most: u.batch, bytes: u.cfg.BatchBytes, skipParked: u.cfg.SkipParked}
	if u.marking != nil {
		f.except = u.marking.rows
	}
	start := time.Now()
	rows, err := u.q.fetch(ctx, u.id, f)
	if err != nil {
		return nil, fmt.Errorf("read the backlog: %w", err)
	}
	u.fetchTook = time.Since(start)
	if u.fetchTook > slowFetch {
		u.log.Warn("reading the backlog is slow: look for transactions that are open for long, for much backlog behind blocked keys, and at autovacuum", "took", u.fetchTook)
	}
	rows = slices.DeleteFunc(rows, func(w *row) bool {
		token, mine := u.shares[w.share]
		w.token = token
		return !mine
	})
	return rows, nil
}

var errResults = errors.New("the publisher returned too few results: its contract is one for each message")

// publish sends rows outside any transaction, bounded by the lease on the local
// clock from when its renewal was sent.
func (u *run) publish(ctx context.Context, rows []*row) (worked bool, err error) {
	ms := make([]*brokers.Message, len(rows))
	for i, w := range rows {
		ms[i] = w.m
	}
	pctx, cancel := context.WithDeadline(ctx, u.renewed.Add(u.cfg.Lease*3/4))
	begin := time.Now()
	results := u.pub.Publish(pctx, ms...)
	cancel()
	u.fit(time.Since(begin), results)
	for len(results) < len(rows) {
		results = append(results, brokers.Result{Outcome: brokers.Unknown, Err: errResults})
	}
	lastErr := u.finishMark()
	var accepted, rest []int
	for i := range rows {
		if results[i].Outcome == brokers.Accepted {
			u.owed = append(u.owed, rows[i])
			delete(u.tries, rows[i].seq)
			accepted = append(accepted, i)
		} else {
			rest = append(rest, i)
		}
	}
	u.accepted += int64(len(accepted))
	u.publishedN.Add(int64(len(accepted)))
	// A batch whose context ended with Run still marks what the broker has accepted.
	mark, cancel := context.WithTimeout(context.WithoutCancel(ctx), markTimeout)
	defer cancel()
	if len(accepted) > 0 {
		lastErr = errors.Join(lastErr, u.release(mark))
	}
	if lastErr == nil && len(rest) == 0 && ctx.Err() == nil {
		u.startMark(ctx)
		return true, nil
	}
	var failures []failure
	var trouble error
	for _, i := range rest {
		f, keep := u.judge(rows[i], results[i], len(accepted) > 0)
		if keep {
			failures = append(failures, f)
		}
		if trouble == nil || brokers.ClassOf(results[i].Err) == brokers.Fatal {
			trouble = results[i].Err
		}
	}
	// Failures first: they only forbid, and the rows behind them must not be read
	// before they are known.
	err = errors.Join(u.keep(mark, failures), lastErr, u.markOwed(mark))
	switch {
	case err != nil:
		return false, err
	case len(accepted) == 0:
		return false, trouble
	}
	return true, nil
}

// fit keeps a Publish well within the lease, by what the publisher got done: one that
// is cut short leaves a message with an unknown outcome, which is sent again. One
// that got nothing done was not slow; it hung.
func (u *run) fit(took time.Duration, results []brokers.Result) {
	switch {
	case took > u.cfg.Lease/4:
		done := 0
		for _, r := range results {
			if r.Outcome == brokers.Accepted {
				done++
			}
		}
		if done > 0 {
			u.batch = max(1, done/2)
		}
	case took < u.cfg.Lease/16:
		u.batch = min(u.cfg.Batch, 2*u.batch)
	}
}

// judge says what becomes of a row that was not accepted. What was not sent is as
// if nothing had happened.
func (u *run) judge(w *row, res brokers.Result, others bool) (f failure, keep bool) {
	class := brokers.ClassOf(res.Err)
	forGood := false
	switch res.Outcome {
	case brokers.Refused:
		u.refused.Add(1)
		forGood = class == brokers.Permanent
	case brokers.Unknown:
		u.unknown.Add(1)
	default:
		return failure{}, false
	}
	last, again := u.tries[w.seq]
	counts := forGood || class != brokers.Throttled && (others || again && u.accepted > last.accepted)
	n := last.n + 1
	if counts {
		w.attempts++
		n = w.attempts
		delete(u.tries, w.seq)
	} else {
		u.remember(try{&row{seq: w.seq, share: w.share, token: w.token}, n, u.accepted, class != brokers.Throttled})
	}
	f = failure{row: w, why: fmt.Sprint(res.Err)}
	f.parked = forGood || counts && u.cfg.MaxAttempts > 0 && w.attempts >= u.cfg.MaxAttempts
	f.delay = max(backoff(u.cfg.Backoff, u.cfg.MaxBackoff, n), brokers.RetryAfterOf(res.Err))
	log := u.log.With("message_id", w.m.ID, "topic", w.m.Topic, "seq", w.seq, "outcome", res.Outcome.String(), "attempts", w.attempts, "error", res.Err)
	switch {
	case f.parked:
		log.Error("message is parked and blocks its key", "blocks", !u.cfg.SkipParked && w.m.Key != "")
	case counts:
		log.Warn("message was not published", "again_in", f.delay)
	default:
		log.Debug("message was not published, and nothing else was: no attempt", "again_in", f.delay)
	}
	return f, true
}

// remember bounds the memory of failures that were no attempts; forgetting one makes
// its next failure a first one.
func (u *run) remember(t try) {
	const most = 10_000
	if len(u.tries) >= most {
		clear(u.tries)
	}
	u.tries[t.row.seq] = t
}

// release ends the waiting of what failed while nothing got through: something has
// got through.
func (u *run) release(ctx context.Context) error {
	var rows []*row
	for _, t := range u.tries {
		if t.aside {
			rows = append(rows, t.row)
		}
	}
	if len(rows) == 0 {
		return nil
	}
	if err := u.q.again(ctx, u.id, rows); err != nil {
		return fmt.Errorf("end the waiting after an outage: %w", err)
	}
	for _, w := range rows {
		t := u.tries[w.seq]
		t.aside = false
		u.tries[w.seq] = t
	}
	return nil
}

// backoff is the n-th delay, with jitter over its upper half.
func backoff(first, most time.Duration, n int) time.Duration {
	d := first << min(n-1, 20)
	if d <= 0 || d > most {
		d = most
	}
	return d/2 + rand.N(d/2+1)
}

// keep writes failures down.
func (u *run) keep(ctx context.Context, fs []failure) error {
	if len(fs) == 0 {
		return nil
	}
	n, err := u.q.failed(ctx, u.id, fs)
	if err != nil {
		return fmt.Errorf("keep failed attempts: %w", err)
	}
	for _, f := range fs {
		if f.parked && n == len(fs) {
			u.parked.Add(1)
		}
	}
	u.lost(len(fs) - n)
	return nil
}

// startMark marks what is owed while the next batch is fetched and published.
func (u *run) startMark(ctx context.Context) {
	m := &marking{rows: u.owed, done: make(chan struct{})}
	u.owed, u.marking = nil, m
	go func() {
		defer close(m.done)
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), markTimeout)
		defer cancel()
		m.n, m.err = u.q.published(ctx, u.id, m.rows)
	}()
}

// finishMark waits for the mark on its way. If it failed, it is owed: a message is
// not published again because the database did not take the mark.
func (u *run) finishMark() error {
	m := u.marking
	if m == nil {
		return nil
	}
	<-m.done
	u.marking = nil
	if m.err != nil {
		u.owed = append(m.rows, u.owed...)
		return fmt.Errorf("mark as published: %w", m.err)
	}
	u.lost(len(m.rows) - m.n)
	return nil
}

// markOwed marks what is owed.
func (u *run) markOwed(ctx context.Context) error {
	if len(u.owed) == 0 {
		return nil
	}
	n, err := u.q.published(ctx, u.id, u.owed)
	if err != nil {
		return fmt.Errorf("mark as published: %w", err)
	}
	u.lost(len(u.owed) - n)
	u.owed = nil
	return nil
}

// lost says that a mark did not find n rows, and asks for the shares anew.
func (u *run) lost(n int) {
	if n <= 0 {
		return
	}
	u.leaseLost.Add(int64(n))
	u.renewed = time.Time{}
	u.log.Warn("the lease on these messages was lost before they were marked: another relay publishes them again, with the same IDs", "count", n)
}

// trouble says that the relay cannot go on, when that begins and once a minute, and
// when it is over.
func (u *run) trouble(err error) {
	switch {
	case err == nil && !u.troubleSince.IsZero():
		u.log.Info("relay goes on", "after", time.Since(u.troubleSince))
		u.troubleSince = time.Time{}
	case err != nil && u.troubleSince.IsZero():
		u.troubleSince, u.troubleSaid = time.Now(), time.Now()
		u.log.Warn("relay cannot go on; it tries again until it can", "error", err)
	case err != nil && time.Since(u.troubleSaid) >= time.Minute:
		u.troubleSaid = time.Now()
		u.log.Warn("relay still cannot go on", "error", err, "for", time.Since(u.troubleSince))
	}
}

// misconfigured: nothing was ever accepted, and somebody has to change something.
func (u *run) misconfigured(err error) bool {
	return brokers.ClassOf(err) == brokers.Fatal && u.publishedN.Load() == 0
}

// end settles what is on its way and gives up the shares.
func (u *run) end(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), markTimeout/2)
	defer cancel()
	err := errors.Join(u.finishMark(), u.markOwed(ctx))
	if u.shares != nil || !u.renewed.IsZero() {
		err = errors.Join(err, u.q.leave(ctx, u.id))
	}
	if err != nil {
		u.log.Warn("relay did not leave properly: others take over when its lease ends", "error", err)
	}
	u.log.Debug("relay has left")
}
