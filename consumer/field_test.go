package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
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
	"github.com/twiceproof/twiceproof/migrations"
	"github.com/twiceproof/twiceproof/outbox"
)

// Faults that were met in other consumers, beyond the rows of the event table.

// jackc/pgx#2499: workers that hold a connection each and need one more wait for each
// other for ever. The framework needs none; handlers that do have two to spare.
func TestHandlersThatTakeASecondConnectionDoNotDeadlock(t *testing.T) {
	t.Parallel()
	pool := devtest.PostgresPool(t, 4)
	db := onPool(t, pool, pool)
	b := memory.New(memory.Config{})
	r := db.start(t, b.Source("q"), quick(), func(ctx context.Context, exec execFunc, m *consumer.Message) error {
		var one int
		if err := pool.QueryRow(ctx, `SELECT 1`).Scan(&one); err != nil {
			return err
		}
		return effect(exec, m)
	})
	for i := range 100 {
		publish(t, b, msg("q", fmt.Sprint(i), "", "x"))
	}
	eventually(t, "all", func() bool { return r.Stats().Processed == 100 })
	require.NoError(t, r.stop())
	require.Zero(t, r.Stats().Failures)
}

// Particular/NServiceBus#3070: a duplicate must not send again what the first one sent.
func TestDuplicatesPublishNothing(t *testing.T) {
	t.Parallel()
	pool := devtest.PostgresPool(t, 6)
	_, err := migrations.Up(t.Context(), migrations.Pool(pool))
	require.NoError(t, err)
	out := outbox.Postgres(pool)
	b := memory.New(memory.Config{})
	r, err := consumer.New(inbox.Postgres(pool), b.Source("q"), func(ctx context.Context, tx pgx.Tx, m *consumer.Message) error {
		return out.Enqueue(ctx, tx, &brokers.Message{Topic: "next", Payload: []byte("x")})
	}, consumer.Config{Name: t.Name(), Hooks: consumer.Hooks{AfterCommit: func(context.Context, *consumer.Message) { out.Nudge() }}})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	for range 10 {
		publish(t, b, msg("q", "1", "", "x"))
	}
	eventually(t, "all", func() bool { s := r.Stats(); return s.Processed == 1 && s.Duplicates == 9 })
	cancel()
	require.NoError(t, <-done)
	var n int
	require.NoError(t, pool.QueryRow(context.Background(), `SELECT count(*) FROM outbox_messages`).Scan(&n))
	require.Equal(t, 1, n)
}

// zendesk/ruby-kafka#821, spring-projects/spring-kafka#1995: a message near the
// broker's limit with a long error must still find a place to be dead in.
func TestHugeMessageWithAHugeErrorIsHeld(t *testing.T) {
	t.Parallel()
	onAll(t, func(t *testing.T, db database) {
		b := memory.New(memory.Config{})
		r := db.start(t, b.Source("q"), quick(), func(context.Context, execFunc, *consumer.Message) error {
			return consumer.Permanent(errors.New(strings.Repeat("e", 1<<20)))
		})
		m := msg("q", "huge", "k", strings.Repeat("x", 8<<20))
		m.Headers = brokers.Headers{{Key: "h", Value: make([]byte, 1<<20)}}
		publish(t, b, m)
		eventually(t, "dead", func() bool { return r.Stats().Dead == 1 })
		require.NoError(t, r.stop())
		require.Zero(t, b.Len("q"))
		require.Equal(t, 1, db.query(t, `SELECT count(*) FROM held_messages WHERE dead AND length(payload) = 8388608 AND length(last_error) <= 8192`))
	})
}

// centrifugal/centrifugo#1196: errors of the handler's own contexts are no shutdown.
func TestForeignContextErrorsAreFailedRuns(t *testing.T) {
	t.Parallel()
	onAll(t, func(t *testing.T, db database) {
		b := memory.New(memory.Config{})
		b.Topic("t", memory.TopicConfig{Partitions: 1})
		cfg := quick()
		cfg.Backoff, cfg.MaxBackoff = time.Hour, time.Hour
		r := db.start(t, b.Source("t", memory.Group("g")), cfg, func(_ context.Context, exec execFunc, m *consumer.Message) error {
			switch m.ID {
			case "canceled":
				return fmt.Errorf("call: %w", context.Canceled)
			case "deadline":
				return fmt.Errorf("call: %w", context.DeadlineExceeded)
			}
			return effect(exec, m)
		})
		publish(t, b, msg("t", "1", "", "x"), msg("t", "canceled", "", "x"), msg("t", "deadline", "", "x"), msg("t", "2", "", "x"))
		eventually(t, "all", func() bool { s := r.Stats(); return s.Processed == 2 && s.Held == 2 })
		require.NoError(t, r.stop())
		require.Equal(t, 2, db.query(t, `SELECT count(*) FROM held_messages WHERE attempts = 3 AND NOT dead`))
		require.EqualValues(t, 4, b.Committed("t", "g", 0))
	})
}

// segmentio/kafka-go#202: a finished message must not commit past an unfinished one.
func TestNothingIsCommittedPastAnUnfinishedMessage(t *testing.T) {
	t.Parallel()
	onAll(t, func(t *testing.T, db database) {
		if db.name == "sqlite" {
			return // one at a time there
		}
		b := memory.New(memory.Config{})
		b.Topic("t", memory.TopicConfig{Partitions: 1})
		leave := make(chan struct{})
		r := db.start(t, b.Source("t", memory.Group("g")), quick(), func(_ context.Context, exec execFunc, m *consumer.Message) error {
			if m.ID == "2" {
				<-leave
			}
			return effect(exec, m)
		})
		publish(t, b, msg("t", "1", "", "x"), msg("t", "2", "", "x"), msg("t", "3", "", "x"))
		eventually(t, "1 and 3", func() bool { return r.Stats().Processed == 2 })
		eventually(t, "committed up to 2", func() bool { return b.Committed("t", "g", 0) == 1 })
		require.Never(t, func() bool { return b.Committed("t", "g", 0) > 1 }, 200*time.Millisecond, 10*time.Millisecond)
		close(leave)
		eventually(t, "all", func() bool { return b.Committed("t", "g", 0) == 3 })
	})
}

// The hook runs after a commit, once for each commit and never for a run that was
// rolled back and repeated.
func TestAfterCommitIsNotCalledForReruns(t *testing.T) {
	t.Parallel()
	db := postgres(t)
	b := memory.New(memory.Config{})
	var commits, runs atomic.Int64
	cfg := quick()
	cfg.Hooks.AfterCommit = func(context.Context, *consumer.Message) { commits.Add(1) }
	r := db.start(t, b.Source("q"), cfg, func(_ context.Context, exec execFunc, m *consumer.Message) error {
		if runs.Add(1) <= 3 {
			return exec(`DO $$ BEGIN RAISE serialization_failure; END $$`)
		}
		return effect(exec, m)
	})
	publish(t, b, msg("q", "1", "", "x"))
	eventually(t, "processed", func() bool { return r.Stats().Processed == 1 })
	require.NoError(t, r.stop())
	require.EqualValues(t, 1, commits.Load())
	require.EqualValues(t, 4, runs.Load())
	require.EqualValues(t, 3, r.Stats().Reruns)
	require.Zero(t, r.Stats().Failures)
	require.Equal(t, 1, db.query(t, `SELECT count(*) FROM effects WHERE n = 1`))
}

// confluentinc/parallel-consumer#875: one record that is never finished stops the
// position for ever, without an error. Health must go by what is finished.
func TestMessageThatNeverEndsTurnsHealthRed(t *testing.T) {
	t.Parallel()
	pool := devtest.PostgresPool(t, 6)
	db := onPool(t, pool, pool)
	b := memory.New(memory.Config{})
	cfg := quick()
	cfg.Name, cfg.HandlerTimeout, cfg.ClaimTimeout = t.Name(), 100*time.Millisecond, 100*time.Millisecond
	// Another transaction, of nobody knows whom, has the message's claim.
	other, _, err := inbox.Postgres(pool).Begin(t.Context(), inbox.Unit{Consumer: cfg.Name, Items: []*inbox.Item{{ID: "1"}}})
	require.NoError(t, err)
	r := db.start(t, b.Source("q"), cfg, func(_ context.Context, exec execFunc, m *consumer.Message) error { return effect(exec, m) })
	publish(t, b, msg("q", "1", "", "x"))
	eventually(t, "red", func() bool { return r.Healthy() != nil })
	require.ErrorContains(t, r.Healthy(), "none was finished")
	require.NoError(t, other.Rollback(context.Background()))
	eventually(t, "green", func() bool { return r.Healthy() == nil && r.Stats().Processed == 1 })
}
