package consumer_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/brokers/memory"
	"github.com/twiceproof/twiceproof/consumer"
	"github.com/twiceproof/twiceproof/inbox"
)

var seq atomic.Int64

func effect(exec func(string, ...any) error, m *consumer.Message) error {
	return exec(`INSERT INTO effects (seq, id, key, n) VALUES ($1, $2, $3, $4)`, seq.Add(1), m.ID, m.Key, m.Attempt)
}

func publish(t *testing.T, b *memory.Broker, ms ...*brokers.Message) {
	for i, r := range b.Publisher().Publish(t.Context(), ms...) {
		require.NoError(t, r.Err, "message %d", i)
	}
}

func msg(topic, id, key, body string) *brokers.Message {
	return &brokers.Message{ID: id, Topic: topic, Key: key, Payload: []byte(body)}
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	require.Eventually(t, ok, 20*time.Second, 5*time.Millisecond, what)
}

func TestEveryMessageHasOneEffectHoweverOftenItComes(t *testing.T) {
	t.Parallel()
	onAll(t, func(t *testing.T, db database) {
		b := memory.New(memory.Config{})
		b.Topic("t", memory.TopicConfig{Partitions: 3})
		r := db.start(t, b.Source("t", memory.Group("g")), consumer.Config{}, func(_ context.Context, exec func(string, ...any) error, m *consumer.Message) error {
			return effect(exec, m)
		})
		const n = 300
		for i := range 3 * n {
			publish(t, b, msg("t", fmt.Sprint("id", i%n), fmt.Sprint("k", i%7), fmt.Sprint(i%n)))
		}
		eventually(t, "all deliveries are settled", func() bool { s := r.Stats(); return s.Processed+s.Duplicates == 3*n })
		require.NoError(t, r.stop())
		require.Equal(t, n, db.query(t, `SELECT count(*) FROM effects`))
		require.Equal(t, n, db.query(t, `SELECT count(DISTINCT id) FROM effects`))
		require.Equal(t, n, db.query(t, `SELECT count(*) FROM processed_messages`))
	})
}

func TestFailingMessageIsHeldRetriedAndKeepsItsKeyInOrder(t *testing.T) {
	t.Parallel()
	onAll(t, func(t *testing.T, db database) {
		b := memory.New(memory.Config{})
		b.Topic("t", memory.TopicConfig{Partitions: 1})
		var down atomic.Bool
		down.Store(true)
		cfg := consumer.Config{Tries: 1, Backoff: 50 * time.Millisecond, MaxBackoff: 100 * time.Millisecond, MaxAttempts: 10_000, Concurrency: 4}
		r := db.start(t, b.Source("t", memory.Group("g")), cfg, func(_ context.Context, exec func(string, ...any) error, m *consumer.Message) error {
			if err := effect(exec, m); err != nil {
				return err
			}
			if m.ID == "a0" && down.Load() {
				return errors.New("downstream \x00 is down")
			}
			return nil
		})
		for i := range 5 {
			publish(t, b, msg("t", fmt.Sprint("a", i), "a", "x"), msg("t", fmt.Sprint("b", i), "b", "x"))
		}
		eventually(t, "the other key is done and this one held", func() bool { s := r.Stats(); return s.Processed == 5 && s.Held == 5 })
		require.Equal(t, 5, db.query(t, `SELECT count(*) FROM held_messages`))
		require.Equal(t, 4, db.query(t, `SELECT count(*) FROM held_messages WHERE reason = 'behind' AND due_at IS NULL`))
		down.Store(false)
		eventually(t, "held messages are drained", func() bool { return r.Stats().Processed == 10 })
		require.NoError(t, r.stop())
		require.Equal(t, 0, db.query(t, `SELECT count(*) FROM held_messages`))
		require.Equal(t, 10, db.query(t, `SELECT count(*) FROM processed_messages WHERE state = 0`))
		require.Equal(t, 0, db.query(t, `SELECT count(*) FROM effects x JOIN effects y ON x.key = y.key AND x.id < y.id AND x.seq > y.seq`), "order of a key")
	})
}

func TestOutcomesOfHandlers(t *testing.T) {
	t.Parallel()
	cases := []struct {
		id    string
		err   error
		check string // SQL that must count 1
	}{
		{"permanent", consumer.Permanent(errors.New("never")), `SELECT count(*) FROM held_messages WHERE message_id = 'permanent' AND dead AND reason = 'dead' AND attempts = 1`},
		{"discard", consumer.Discard(errors.New("not ours")), `SELECT count(*) FROM processed_messages WHERE message_id = 'discard' AND state = 2 AND reason = 'not ours'`},
		{"after", consumer.RetryAfter(time.Hour, errors.New("later")), `SELECT count(*) FROM held_messages WHERE message_id = 'after' AND NOT dead AND attempts = 1 AND due_at IS NOT NULL`},
		{"unknown", consumer.ErrUnknownType, `SELECT count(*) FROM held_messages WHERE message_id = 'unknown' AND reason = 'unknown-type' AND NOT dead AND attempts = 0`},
		{"plain", errors.New("no"), `SELECT count(*) FROM held_messages WHERE message_id = 'plain' AND attempts = 3 AND NOT dead`},
		{"canceled", context.Canceled, `SELECT count(*) FROM held_messages WHERE message_id = 'canceled' AND attempts = 3 AND NOT dead`},
	}
	onAll(t, func(t *testing.T, db database) {
		b := memory.New(memory.Config{})
		cfg := consumer.Config{Backoff: time.Hour, MaxBackoff: time.Hour}
		r := db.start(t, b.Source("q"), cfg, func(_ context.Context, exec func(string, ...any) error, m *consumer.Message) error {
			if m.ID == "panic" {
				panic("boom")
			}
			if err := effect(exec, m); err != nil {
				return err
			}
			for _, c := range cases {
				if c.id == m.ID {
					return c.err
				}
			}
			return nil
		})
		for _, c := range cases {
			publish(t, b, msg("q", c.id, "", "x"))
		}
		publish(t, b, msg("q", "panic", "", "x"), msg("q", "", "", "no id"), msg("q", "a\x00b", "", "bad id"), msg("q", "same", "", "1"))
		eventually(t, "the good one", func() bool { return r.Stats().Processed == 1 })
		publish(t, b, msg("q", "same", "", "2"))
		eventually(t, "all settled", func() bool { s := r.Stats(); return s.Held == 9 && s.Discarded == 1 })
		require.NoError(t, r.stop())
		for _, c := range cases {
			require.Equal(t, 1, db.query(t, c.check), c.id)
		}
		require.Equal(t, 1, db.query(t, `SELECT count(*) FROM held_messages WHERE message_id = 'panic' AND last_error_class = 'panic' AND last_stack LIKE '%runner_test%'`))
		require.Equal(t, 1, db.query(t, `SELECT count(*) FROM held_messages WHERE reason = 'no-id' AND dead AND message_id IS NULL`))
		require.Equal(t, 1, db.query(t, `SELECT count(*) FROM held_messages WHERE reason = 'bad-id' AND dead AND raw_id IS NOT NULL`))
		require.Equal(t, 1, db.query(t, `SELECT count(*) FROM held_messages WHERE reason = 'conflict' AND dead AND message_id = 'same'`))
		require.Equal(t, 1, db.query(t, `SELECT count(*) FROM effects`), "only the good one has an effect")
	})
}

func TestTwoRunnersOfOneNameAreRefused(t *testing.T) {
	t.Parallel()
	db := sqlite(t)
	b := memory.New(memory.Config{})
	nop := func(context.Context, func(string, ...any) error, *consumer.Message) error { return nil }
	first := db.start(t, b.Source("q"), consumer.Config{Name: "twice"}, nop)
	eventually(t, "running", func() bool { return first.Ready() == nil })
	second, err := consumer.New(inbox.SQLite(nil), b.Source("q"), func(context.Context, *sql.Tx, *consumer.Message) error { return nil }, consumer.Config{Name: "twice"})
	require.NoError(t, err)
	require.ErrorContains(t, second.Run(t.Context()), "runs in this process already")
}

func TestWrongConfigIsReportedWhole(t *testing.T) {
	t.Parallel()
	_, err := consumer.New(inbox.SQLite(nil), memory.New(memory.Config{}).Source("q"),
		func(context.Context, *sql.Tx, *consumer.Message) error { return nil }, consumer.Config{Concurrency: -1})
	require.ErrorContains(t, err, "Name is missing")
	require.ErrorContains(t, err, "must not be negative")
}

func TestShutdownFinishesWhatRunsAndGivesBackTheRest(t *testing.T) {
	t.Parallel()
	onAll(t, func(t *testing.T, db database) {
		b := memory.New(memory.Config{})
		started, release := make(chan struct{}, 64), make(chan struct{})
		r := db.start(t, b.Source("q"), consumer.Config{Concurrency: 1}, func(_ context.Context, exec func(string, ...any) error, m *consumer.Message) error {
			started <- struct{}{}
			<-release
			return effect(exec, m)
		})
		for i := range 10 {
			publish(t, b, msg("q", fmt.Sprint(i), "k", "x"))
		}
		<-started
		go func() { _ = r.stop() }()
		close(release)
		require.NoError(t, r.stop())
		n := db.query(t, `SELECT count(*) FROM effects`)
		require.GreaterOrEqual(t, n, 1)
		require.Equal(t, 10-n, b.Len("q"), "what has no effect is back on the broker")
		require.Equal(t, 0, db.query(t, `SELECT count(*) FROM held_messages`))
	})
}

// A handler that holds the only connection while the consumer stops must not keep
// the drain deadline from running.
func TestDrainDeadlineEndsAHandlerThatHoldsTheLastConnection(t *testing.T) {
	t.Parallel()
	db := sqlite(t)
	b := memory.New(memory.Config{})
	publish(t, b, msg("q", "1", "", "x"))
	inHandler := make(chan struct{})
	r := db.start(t, b.Source("q"), consumer.Config{DrainTimeout: 10 * time.Millisecond}, func(ctx context.Context, exec func(string, ...any) error, m *consumer.Message) error {
		if err := effect(exec, m); err != nil {
			return err
		}
		close(inHandler)
		<-ctx.Done()
		return context.Cause(ctx)
	})
	<-inHandler
	// Long enough for the runner's own statements to be waiting for the connection.
	require.Never(t, func() bool { return r.Ready() != nil }, 1500*time.Millisecond, 100*time.Millisecond)
	start := time.Now()
	require.NoError(t, r.stop())
	require.Less(t, time.Since(start), 10*time.Second)
	require.Equal(t, 0, db.query(t, `SELECT count(*) FROM effects`))
	require.Equal(t, 0, db.query(t, `SELECT count(*) FROM held_messages`))
	require.Equal(t, 1, b.Len("q"), "it is back on the broker, and no attempt is counted")
}

// During a rolling deploy an old instance sees types it does not know; waiting for a
// newer one uses up neither attempts nor the crash limit (NikolayS/PgQue#136).
func TestUnknownTypeWaitsWithoutUsingUpAnything(t *testing.T) {
	t.Parallel()
	onAll(t, func(t *testing.T, db database) {
		b := memory.New(memory.Config{})
		var runs atomic.Int64
		cfg := consumer.Config{Backoff: 10 * time.Millisecond, MaxBackoff: 20 * time.Millisecond, MaxAttempts: 3}
		r := db.start(t, b.Source("q"), cfg, func(_ context.Context, exec func(string, ...any) error, m *consumer.Message) error {
			if runs.Add(1) < 10 {
				return consumer.ErrUnknownType
			}
			return effect(exec, m)
		})
		publish(t, b, msg("q", "new", "k", "x"))
		eventually(t, "the type is known in the end", func() bool { s := r.Stats(); return s.Processed == 1 || s.Dead > 0 })
		require.NoError(t, r.stop())
		require.Equal(t, 1, db.query(t, `SELECT count(*) FROM effects WHERE n = 1`))
		require.Equal(t, 0, db.query(t, `SELECT count(*) FROM held_messages`))
	})
}
