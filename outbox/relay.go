package outbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"github.com/twiceproof/twiceproof/brokers"
)

var errLeaseLost = errors.New("the lease on these keys is lost: another relay publishes them now")

// RelayConfig configures a relay. Zero values are defaults.
type RelayConfig struct {
	// Batch is the most messages of one Publish. 0: 500.
	Batch int
	// Lease is how long a relay owns its keys without saying that it lives. 0: 30 s.
	Lease time.Duration
	// MaxAttempts is the failed attempt after which a message is parked. 0: 20.
	MaxAttempts int
	// Backoff and MaxBackoff bound the delay of a refused message. 0: 1 s and 5 min.
	Backoff, MaxBackoff time.Duration
	// IdlePoll is the longest pause between two looks for work. 0: 1 s.
	IdlePoll time.Duration
	// Logger: nil logs nowhere.
	Logger *slog.Logger
}

// RelayStats are counts since Run began.
type RelayStats struct{ Published, Refused, Parked, Unknown, LeaseLost int64 }

// Relay publishes what is in an outbox.
type Relay struct {
	q   Queue
	pub brokers.Publisher
	cfg RelayConfig
	id  string

	publishedN, refused, parked, unknown, leaseLost atomic.Int64

	renewed  time.Time      // when the last renewal was sent
	unmarked map[int64]bool // published by this relay, and the mark has failed so far
}

// NewRelay returns a relay. It does no I/O.
func NewRelay(q Queue, pub brokers.Publisher, cfg RelayConfig) (*Relay, error) {
	if q == nil || pub == nil {
		return nil, errors.New("relay: queue and publisher are required")
	}
	if cfg.Batch < 0 || cfg.MaxAttempts < 0 || cfg.Lease < 0 {
		return nil, errors.New("relay: Batch, MaxAttempts and Lease must not be negative")
	}
	def(&cfg.Batch, 500)
	def(&cfg.Lease, 30*time.Second)
	def(&cfg.MaxAttempts, 20)
	def(&cfg.Backoff, time.Second)
	def(&cfg.MaxBackoff, 5*time.Minute)
	def(&cfg.IdlePoll, time.Second)
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	return &Relay{q: q, pub: pub, cfg: cfg, id: uuid.NewString(), unmarked: map[int64]bool{}}, nil
}

func def[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}

// Nudge tells the relay that there is work.
func (r *Relay) Nudge() { r.q.Nudge() }

// Stats returns the counts.
func (r *Relay) Stats() RelayStats {
	return RelayStats{r.publishedN.Load(), r.refused.Load(), r.parked.Load(), r.unknown.Load(), r.leaseLost.Load()}
}

// Run publishes until ctx ends, and returns nil then. Missing tables are an error;
// everything that can pass by itself is waited for.
func (r *Relay) Run(ctx context.Context) error {
	if err := r.q.check(ctx); err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	defer func() {
		leave, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		_ = r.q.leave(leave, r.id) // else its leases end by themselves
	}()
	const busyPoll = 10 * time.Millisecond
	pause := busyPoll
	for ctx.Err() == nil {
		nudged := r.q.nudged()
		worked, err := r.step(ctx)
		switch {
		case err != nil && ctx.Err() == nil:
			r.cfg.Logger.Warn("relay step failed; trying again", "error", err, "pause", pause)
			pause = min(2*pause, 5*time.Second)
		case worked:
			pause = busyPoll
			continue
		default:
			pause = min(2*pause, r.cfg.IdlePoll)
		}
		t := time.NewTimer(pause)
		select {
		case <-ctx.Done():
		case <-nudged:
			if err == nil {
				pause = busyPoll
			}
		case <-t.C:
		}
		t.Stop()
	}
	return nil
}

// step renews the lease when it is time, and publishes one batch. worked: there may
// be more at once.
func (r *Relay) step(ctx context.Context) (worked bool, err error) {
	// First the marks that are owed: a renewal may give up the shares they need.
	if err := r.markAgain(ctx); err != nil {
		return false, err
	}
	if time.Since(r.renewed) > r.cfg.Lease/4 {
		sent := time.Now()
		if _, err := r.q.lease(ctx, r.id, r.cfg.Lease); err != nil {
			return false, fmt.Errorf("renew the lease: %w", err)
		}
		r.renewed = sent
	}
	rows, err := r.q.fetch(ctx, r.id, r.cfg.Batch)
	if err != nil || len(rows) == 0 {
		return false, err
	}
	return r.publish(ctx, rows)
}

// publish sends rows outside any transaction, bounded by the lease on the local
// clock from when its renewal was sent.
func (r *Relay) publish(ctx context.Context, rows []*row) (worked bool, err error) {
	ms := make([]*brokers.Message, len(rows))
	for i, w := range rows {
		ms[i] = w.m
	}
	pctx, cancel := context.WithDeadline(ctx, r.renewed.Add(r.cfg.Lease*3/4))
	results := r.pub.Publish(pctx, ms...)
	cancel()
	accepted := 0
	for i, res := range results {
		if res.Outcome == brokers.Accepted {
			accepted++
			r.unmarked[rows[i].seq] = true
		}
	}
	r.publishedN.Add(int64(accepted))
	// A batch whose context ended with Run still marks what the broker has accepted.
	mark, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	if err := r.markAgain(mark); err != nil {
		return false, err
	}
	var trouble error
	for i, res := range results {
		if res.Outcome == brokers.Accepted {
			continue
		}
		trouble = res.Err
		if err := r.notAccepted(mark, rows[i], res, accepted > 0); err != nil {
			return false, err
		}
	}
	if accepted == 0 {
		return false, trouble
	}
	return true, nil
}

// markAgain marks what is published and not marked, without publishing it again.
func (r *Relay) markAgain(ctx context.Context) error {
	if len(r.unmarked) == 0 {
		return nil
	}
	seqs := make([]int64, 0, len(r.unmarked))
	for s := range r.unmarked {
		seqs = append(seqs, s)
	}
	n, err := r.q.published(ctx, r.id, seqs)
	if err != nil {
		return fmt.Errorf("mark as published: %w", err)
	}
	if n < len(seqs) {
		r.leaseLost.Add(1)
		r.cfg.Logger.Warn("messages were published but not marked; another relay publishes them again", "count", len(seqs)-n, "error", errLeaseLost)
		r.renewed = time.Time{}
	}
	clear(r.unmarked)
	return nil
}

// notAccepted keeps what became of a message that the broker did not accept. What
// was not sent, or is unknown while nothing got through, counts for nothing.
func (r *Relay) notAccepted(ctx context.Context, w *row, res brokers.Result, others bool) error {
	switch res.Outcome {
	case brokers.Refused:
		r.refused.Add(1)
	case brokers.Unknown:
		r.unknown.Add(1)
		if !others {
			return nil
		}
	default:
		return nil
	}
	w.attempts++
	park := w.attempts >= r.cfg.MaxAttempts || brokers.ClassOf(res.Err) == brokers.Permanent
	delay := r.cfg.Backoff << min(w.attempts-1, 20)
	if delay <= 0 || delay > r.cfg.MaxBackoff {
		delay = r.cfg.MaxBackoff
	}
	delay = max(delay/2+rand.N(delay/2+1), brokers.RetryAfterOf(res.Err))
	if park {
		r.parked.Add(1)
		r.cfg.Logger.Error("message is parked and blocks its key", "message_id", w.m.ID, "topic", w.m.Topic, "attempts", w.attempts, "error", res.Err)
	}
	err := r.q.failed(ctx, r.id, w, delay, park, fmt.Sprint(res.Err))
	if errors.Is(err, errLeaseLost) {
		r.leaseLost.Add(1)
		return nil
	}
	return err
}
