package consumer_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/brokers/memory"
	"github.com/twiceproof/twiceproof/consumer"
	"github.com/twiceproof/twiceproof/inbox"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
	"github.com/twiceproof/twiceproof/outbox"
)

// Nearly every run fails: intake and retries pause, one probe at a time is run, and no
// probe's failure is anybody's.
func TestBreakerPausesAndItsProbesCountForNoMessage(t *testing.T) {
	t.Parallel()
	onAll(t, func(t *testing.T, db database) {
		b := memory.New(memory.Config{})
		var down atomic.Bool
		var runs, running, most atomic.Int64
		down.Store(true)
		cfg := quick()
		cfg.Tries, cfg.MaxAttempts, cfg.Room = 1, 3, 64
		cfg.Breaker = consumer.Breaker{Runs: 10, Pause: 20 * time.Millisecond, MaxPause: 60 * time.Millisecond}
		r := db.start(t, b.Source("q"), cfg, func(_ context.Context, exec execFunc, m *consumer.Message) error {
			most.Store(max(most.Load(), running.Add(1)))
			defer running.Add(-1)
			runs.Add(1)
			if down.Load() {
				return errors.New("downstream is out")
			}
			return effect(exec, m)
		})
		const n = 300
		for i := range n {
			publish(t, b, msg("q", fmt.Sprint(i), fmt.Sprint("k", i%50), "x"))
		}
		eventually(t, "open", func() bool { err := r.Healthy(); return err != nil })
		require.ErrorContains(t, r.Healthy(), "downstream is out")
		// In-flight runs end; from then on there are probes only.
		eventually(t, "quiet", func() bool { return running.Load() == 0 })
		failures, before := r.Stats().Failures, runs.Load()
		most.Store(0)
		eventually(t, "probes", func() bool { return runs.Load() >= before+10 })
		require.LessOrEqual(t, most.Load(), int64(1), "one probe at a time")
		require.LessOrEqual(t, r.Stats().Failures, failures+int64(cfg.Room), "probes count for nothing")
		require.Zero(t, db.query(t, `SELECT count(*) FROM held_messages WHERE dead`))
		require.Positive(t, b.Len("q"), "the rest stays on the broker")
		down.Store(false)
		eventually(t, "all", func() bool { return db.query(t, `SELECT count(DISTINCT id) FROM effects`) == n })
		require.NoError(t, r.Healthy())
		require.Zero(t, r.Stats().Dead)
		require.NoError(t, r.stop())
		require.Equal(t, n, db.query(t, `SELECT count(*) FROM effects`))
	})
}

// Permanent failures are of the messages: they never open the breaker.
func TestBreakerIsNotForPermanentFailures(t *testing.T) {
	t.Parallel()
	onAll(t, func(t *testing.T, db database) {
		b := memory.New(memory.Config{})
		cfg := quick()
		cfg.Breaker = consumer.Breaker{Runs: 10}
		r := db.start(t, b.Source("q"), cfg, func(context.Context, execFunc, *consumer.Message) error {
			return consumer.Permanent(errors.New("no such account"))
		})
		for i := range 100 {
			publish(t, b, msg("q", fmt.Sprint(i), "", "x"))
		}
		eventually(t, "all dead", func() bool { return r.Stats().Dead == 100 })
		require.NoError(t, r.Healthy())
		require.NoError(t, r.stop())
	})
}

// Each class of errors has a policy of its own.
func TestPoliciesByErrorClass(t *testing.T) {
	t.Parallel()
	onAll(t, func(t *testing.T, db database) {
		b := memory.New(memory.Config{})
		busy, odd := errors.New("busy"), errors.New("odd")
		cfg := quick()
		cfg.Tries = 1
		cfg.Class = func(err error) string {
			if errors.Is(err, busy) {
				return "busy"
			}
			return ""
		}
		cfg.Policies = map[string]consumer.RetryPolicy{"busy": {MaxAttempts: 4}, "handler": {MaxAttempts: 2}, "panic": {MaxAttempts: 1}}
		r := db.start(t, b.Source("q"), cfg, func(_ context.Context, _ execFunc, m *consumer.Message) error {
			switch m.ID {
			case "busy":
				return fmt.Errorf("call: %w", busy)
			case "panic":
				panic("oh")
			}
			return odd
		})
		publish(t, b, msg("q", "busy", "", "x"), msg("q", "odd", "", "x"), msg("q", "panic", "", "x"))
		eventually(t, "all dead", func() bool { return r.Stats().Dead == 3 })
		require.NoError(t, r.stop())
		for class, n := range map[string]int{"busy": 4, "handler": 2, "panic": 1} {
			require.Equal(t, 1, db.query(t, fmt.Sprintf(`SELECT count(*) FROM held_messages WHERE last_error_class = '%s' AND attempts = %d`, class, n)), class)
		}
	})
}

// Retries that fail are bounded; those that succeed are not.
func TestRetryBudgetBoundsAStormAndNoReplay(t *testing.T) {
	t.Parallel()
	onAll(t, func(t *testing.T, db database) {
		b := memory.New(memory.Config{})
		var down atomic.Bool
		var retries atomic.Int64
		down.Store(true)
		cfg := quick()
		cfg.Tries, cfg.MaxAttempts, cfg.Breaker.Share = 1, 1_000_000, -1
		r := db.start(t, b.Source("q"), cfg, func(_ context.Context, exec execFunc, m *consumer.Message) error {
			if m.Replayed && down.Load() {
				retries.Add(1)
			}
			if down.Load() {
				return errors.New("downstream is out")
			}
			return effect(exec, m)
		})
		const n = 400
		for i := range n {
			publish(t, b, msg("q", fmt.Sprint(i), "", "x"))
		}
		eventually(t, "all held", func() bool { return db.query(t, `SELECT count(*) FROM held_messages`) == n })
		eventually(t, "the budget is used up", func() bool { return retries.Load() >= 100 })
		from, at := retries.Load(), time.Now()
		require.Never(t, func() bool { return retries.Load() > from+80+int64(20*time.Since(at).Seconds()) }, 2*time.Second, 50*time.Millisecond,
			"10 a second, and what was under way")
		down.Store(false)
		began := time.Now()
		eventually(t, "all", func() bool { return db.query(t, `SELECT count(*) FROM effects`) == n })
		require.Less(t, time.Since(began), 15*time.Second, "10 a second would take 40 s")
		require.NoError(t, r.stop())
	})
}

// There is exactly one dead letter of each death, in the outbox of the same database.
func TestDeadLettersGoThroughTheOutbox(t *testing.T) {
	t.Parallel()
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		h := sqliteHandle(t)
		store := inbox.SQLite(h)
		deadLetters[*sql.Tx](t, onSQLite(t, h), store, store.Operator(), outbox.SQLite(h))
	})
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		pool := devtest.PostgresPool(t, 20)
		store := inbox.Postgres(pool)
		deadLetters[pgx.Tx](t, onPool(t, pool, pool), store, store.Operator(), outbox.Postgres(pool))
	})
}

type failingEnqueuer[Tx any] struct {
	consumer.Enqueuer[Tx]
	failures atomic.Int64
}

func (f *failingEnqueuer[Tx]) Enqueue(ctx context.Context, tx Tx, ms ...*brokers.Message) error {
	if f.failures.Add(-1) >= 0 {
		return errors.New("the outbox table is locked")
	}
	return f.Enqueuer.Enqueue(ctx, tx, ms...)
}

func deadLetters[Tx any](t *testing.T, db database, store inbox.Store[Tx], op *inbox.Operator, w consumer.Enqueuer[Tx]) {
	b := memory.New(memory.Config{})
	enq := &failingEnqueuer[Tx]{Enqueuer: w}
	enq.failures.Store(2)
	cfg := quick()
	cfg.Name, cfg.Tries, cfg.MaxAttempts = t.Name(), 1, 2
	r, err := consumer.New(store, b.Source("q"), func(_ context.Context, _ Tx, m *consumer.Message) error {
		if m.ID == "permanent" {
			return consumer.Permanent(errors.New("no such account"))
		}
		return errors.New("no")
	}, cfg, consumer.DeadLetterTo(enq, "dead.billing"))
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	m := msg("q", "permanent", "k", "body")
	m.Headers = brokers.Headers{{Key: "trace", Value: []byte("1")}}
	publish(t, b, m, msg("q", "retried", "", "body"), msg("q", "", "", "no id"))
	const letters = `SELECT count(*) FROM outbox_messages`
	eventually(t, "three deaths", func() bool { return db.query(t, letters) == 3 })
	publish(t, b, msg("q", "", "", "no id")) // a copy at another place is another message
	eventually(t, "another one", func() bool { return db.query(t, letters) == 4 })

	held, err := op.Choose(t.Context(), inbox.HeldFilter{ID: "permanent"})
	require.NoError(t, err)
	require.NoError(t, op.Replay(t.Context(), held[0], inbox.By{Actor: "test"}))
	eventually(t, "a second death", func() bool { return db.query(t, letters) == 5 })
	cancel()
	require.NoError(t, <-done)
	for n := 1; n <= 2; n++ {
		id := brokers.JoinID("dead", cfg.Name, "permanent", fmt.Sprint(n))
		require.Equal(t, 1, db.query(t, fmt.Sprintf(`SELECT count(*) FROM outbox_messages WHERE message_id = '%s'`, id)), id)
	}
	require.EqualValues(t, 5, r.Stats().Dead)
}
