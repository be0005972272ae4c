package outbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"github.com/twiceproof/twiceproof/brokers"
)

// RelayConfig configures a relay. Zero values are defaults.
type RelayConfig struct {
	// Batch is the most messages of one Publish. The relay takes fewer while a Publish
	// takes more than a quarter of Lease. 0: 500.
	Batch int
	// BatchBytes is the most payload bytes of one Publish; a single larger message
	// goes alone. 0: 16 MiB.
	BatchBytes int
	// Lease is how long a relay owns its keys without saying that it lives: the time
	// after which others take over from one that died. A Publish gets a context that
	// ends before it. 0: 30 s; at least 100 ms.
	Lease time.Duration
	// MaxAttempts is the failed attempt after which a message is parked. 0: 20, about
	// an hour with the default backoff. -1: never; what the broker refuses for good
	// is parked all the same.
	//
	// A refusal or an unknown outcome is an attempt only if another message was
	// accepted in the same Publish, or since this one was tried last. While nothing
	// gets through, it is an outage, and an outage parks nothing.
	MaxAttempts int
	// Backoff and MaxBackoff bound the delay after a failed attempt, which doubles
	// from one to the other with jitter. What waits because nothing got through is
	// tried again at once when something does. 0: 1 s and 5 min.
	Backoff, MaxBackoff time.Duration
	// IdlePoll is the longest pause between two looks for work, and between two tries
	// while the broker or the database is away; InTx and Nudge end the former. 0: 1 s.
	IdlePoll time.Duration
	// SkipParked lets later messages of a key overtake a parked one. The default is
	// that it blocks its key (and no other) until somebody looks at it.
	SkipParked bool
	// Logger: nil logs nowhere.
	Logger *slog.Logger
}

// RelayStats are counts of messages since the relay was made.
type RelayStats struct {
	// Published is what the broker accepted, repeats included.
	Published int64
	// Refused and Unknown are outcomes, whether they counted as attempts or not.
	Refused, Unknown int64
	// Parked is what was parked.
	Parked int64
	// LeaseLost is the rows that a mark did not find: another relay has their share
	// by now and publishes them again (or somebody deleted them).
	LeaseLost int64
}

// Relay publishes what is in an outbox.
type Relay struct {
	q   Queue
	pub brokers.Publisher
	cfg RelayConfig

	running                                         atomic.Bool
	publishedN, refused, parked, unknown, leaseLost atomic.Int64
}

// NewRelay returns a relay. It does no I/O. A wrong configuration is an error that
// names everything that is wrong.
//
// A relay uses up to two connections of the outbox's pool, each for one short
// statement; on PostgreSQL a pool of one is refused, since a transaction of the
// program that waits for the relay, or the other way round, would wait for ever.
// It neither opens nor closes the publisher.
func NewRelay(q Queue, pub brokers.Publisher, cfg RelayConfig) (*Relay, error) {
	if q == nil || pub == nil {
		return nil, errors.New("relay: queue and publisher are required")
	}
	def(&cfg.Batch, 500)
	def(&cfg.BatchBytes, 16<<20)
	def(&cfg.Lease, 30*time.Second)
	def(&cfg.MaxAttempts, 20)
	def(&cfg.Backoff, time.Second)
	def(&cfg.MaxBackoff, max(5*time.Minute, cfg.Backoff))
	def(&cfg.IdlePoll, time.Second)
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	var errs []error
	refuse := func(bad bool, format string, args ...any) {
		if bad {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	refuse(cfg.Batch < 0, "Batch is %d: it must not be negative", cfg.Batch)
	refuse(cfg.BatchBytes < 0, "BatchBytes is %d: it must not be negative", cfg.BatchBytes)
	refuse(cfg.Lease < 100*time.Millisecond, "Lease is %s: it must be 100 ms or more", cfg.Lease)
	refuse(cfg.MaxAttempts < -1, "MaxAttempts is %d: it must be -1 (never), 0 (the default) or more", cfg.MaxAttempts)
	refuse(cfg.Backoff < 0 || cfg.MaxBackoff < cfg.Backoff, "Backoff is %s and MaxBackoff %s: the first must not be negative or above the second", cfg.Backoff, cfg.MaxBackoff)
	refuse(cfg.IdlePoll < 0, "IdlePoll is %s: it must not be negative", cfg.IdlePoll)
	refuse(q.connections() == 1, "the outbox's pool has one connection: give it 2 or more, or the relay a pool of its own (outbox.Postgres on another pool)")
	if len(errs) > 0 {
		return nil, fmt.Errorf("relay: %w", errors.Join(errs...))
	}
	return &Relay{q: q, pub: pub, cfg: cfg}, nil
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
	return RelayStats{
		Published: r.publishedN.Load(), Refused: r.refused.Load(), Parked: r.parked.Load(),
		Unknown: r.unknown.Load(), LeaseLost: r.leaseLost.Load(),
	}
}

// errRunning: a relay does one thing at a time.
var errRunning = errors.New("relay: Run or Flush of this relay is going on: make another one with NewRelay")

// Run publishes until ctx ends, and returns nil then. It waits for everything that
// can pass by itself: a database or a broker that is away. Missing tables are an
// error, and so is a publisher that is configured wrong (class Fatal) before
// anything was ever accepted; later that is logged and tried again.
func (r *Relay) Run(ctx context.Context) error {
	if !r.running.CompareAndSwap(false, true) {
		return errRunning
	}
	defer r.running.Store(false)
	u := r.newRun()
	defer u.end(ctx)
	u.log.Debug("relay starts")
	const busyPoll = 10 * time.Millisecond
	pause, checked := busyPoll, false
	for ctx.Err() == nil {
		nudged := r.q.nudged()
		worked, err := false, error(nil)
		if !checked {
			var passing bool
			if err, passing = r.q.check(ctx); err != nil && !passing && ctx.Err() == nil {
				return err
			}
			checked = err == nil
		}
		if checked {
			worked, err = u.step(ctx)
		}
		switch {
		case err != nil && u.misconfigured(err):
			return err
		case err != nil && ctx.Err() == nil:
			pause = min(2*pause, r.cfg.IdlePoll)
			u.trouble(err)
			nudged = nil // writers must not drive the tries of an outage
		case worked:
			u.trouble(nil)
			pause = busyPoll
			continue
		default:
			pause = min(2*pause, r.cfg.IdlePoll)
			// A look that finds nothing and takes long (a large backlog behind blocked
			// keys) must not keep the database busy.
			pause = max(pause, min(4*u.fetchTook, 10*time.Second))
		}
		t := time.NewTimer(pause)
		select {
		case <-ctx.Done():
		case <-nudged:
			pause = busyPoll
		case <-t.C:
		}
		t.Stop()
	}
	return nil
}

// newRun starts a membership of its own: a relay that was abandoned and one that
// runs again are two.
func (r *Relay) newRun() *run {
	id := uuid.NewString()
	return &run{Relay: r, id: id, batch: r.cfg.Batch, log: r.cfg.Logger.With("relay", id), tries: map[int64]try{}}
}
