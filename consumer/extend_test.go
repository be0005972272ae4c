package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers/memory"
	"github.com/twiceproof/twiceproof/consumer"
)

type traceKey struct{}

func TestInterceptorsWrapEveryRun(t *testing.T) {
	t.Parallel()
	onAll(t, func(t *testing.T, db database) {
		b := memory.New(memory.Config{})
		var mu sync.Mutex
		var log []string
		say := func(format string, args ...any) {
			mu.Lock()
			defer mu.Unlock()
			log = append(log, fmt.Sprintf(format, args...))
		}
		wrap := func(name string) consumer.Interceptor {
			return func(ctx context.Context, m *consumer.Message, next func(context.Context) error) error {
				say("%s in %s/%d", name, m.ID, m.Attempt)
				err := next(context.WithValue(ctx, traceKey{}, name))
				say("%s out %v", name, err)
				return errors.New("ignored: the run has decided")
			}
		}
		cfg := quick()
		cfg.Tries = 1
		cfg.Interceptors = []consumer.Interceptor{wrap("outer"), wrap("inner")}
		var held atomic.Bool
		r := db.start(t, b.Source("q"), cfg, func(ctx context.Context, exec execFunc, m *consumer.Message) error {
			say("run %v replayed=%v", ctx.Value(traceKey{}), m.Replayed)
			if held.CompareAndSwap(false, true) {
				return errors.New("no")
			}
			return effect(exec, m)
		})
		publish(t, b, msg("q", "1", "k", "x"))
		eventually(t, "processed", func() bool { return r.Stats().Processed == 1 })
		publish(t, b, msg("q", "1", "k", "x"))
		eventually(t, "duplicate", func() bool { return r.Stats().Duplicates == 1 })
		require.NoError(t, r.stop())
		require.Equal(t, []string{
			"outer in 1/1", "inner in 1/1", "run inner replayed=false", "inner out no", "outer out ignored: the run has decided",
			"outer in 1/2", "inner in 1/2", "run inner replayed=true", "inner out <nil>", "outer out ignored: the run has decided",
			"outer in 1/1", "inner in 1/1", "inner out <nil>", "outer out ignored: the run has decided",
		}, log)
		require.Equal(t, 1, db.query(t, `SELECT count(*) FROM effects`))
	})
}

func TestInterceptorThatStopsARunIsAFailedRun(t *testing.T) {
	t.Parallel()
	onAll(t, func(t *testing.T, db database) {
		b := memory.New(memory.Config{})
		cfg := quick()
		cfg.Tries = 1
		cfg.Interceptors = []consumer.Interceptor{func(ctx context.Context, m *consumer.Message, next func(context.Context) error) error {
			switch {
			case m.ID == "panic" && !m.Replayed:
				panic("boom")
			case m.ID == "silent" && m.Attempt < 3:
				return nil
			case m.ID == "never":
				return consumer.Permanent(errors.New("not allowed"))
			}
			return next(ctx)
		}}
		r := db.start(t, b.Source("q"), cfg, func(_ context.Context, exec execFunc, m *consumer.Message) error { return effect(exec, m) })
		publish(t, b, msg("q", "panic", "a", "x"), msg("q", "silent", "b", "x"), msg("q", "never", "c", "x"))
		eventually(t, "all", func() bool { s := r.Stats(); return s.Processed == 2 && s.Dead == 1 })
		require.NoError(t, r.stop())
		require.Equal(t, 1, db.query(t, `SELECT count(*) FROM effects WHERE id = 'silent' AND n = 3`))
		require.Equal(t, 1, db.query(t, `SELECT count(*) FROM held_messages WHERE message_id = 'never' AND last_error = 'not allowed'`))
		require.EqualValues(t, 4, r.Stats().Failures)
	})
}

func TestPauseStopsTheIntake(t *testing.T) {
	t.Parallel()
	onAll(t, func(t *testing.T, db database) {
		b := memory.New(memory.Config{})
		cfg := quick()
		r := db.start(t, b.Source("q"), cfg, func(_ context.Context, exec execFunc, m *consumer.Message) error { return effect(exec, m) })
		publish(t, b, msg("q", "1", "", "x"))
		eventually(t, "first", func() bool { return r.Stats().Processed == 1 })
		r.Pause()
		r.Pause()
		publish(t, b, msg("q", "2", "", "x"))
		require.Never(t, func() bool { return r.Stats().Received > 1 }, 300*time.Millisecond, 10*time.Millisecond)
		r.Resume()
		r.Resume()
		eventually(t, "second", func() bool { return r.Stats().Processed == 2 })
	})
}

func TestHooksAreCalled(t *testing.T) {
	t.Parallel()
	db := sqlite(t)
	b := memory.New(memory.Config{})
	var mu sync.Mutex
	got := map[string]int{}
	count := func(what string, m *consumer.Message) {
		mu.Lock()
		defer mu.Unlock()
		got[what+" "+m.ID]++
	}
	cfg := quick()
	cfg.Tries = 2
	cfg.Hooks = consumer.Hooks{
		AfterCommit: func(_ context.Context, m *consumer.Message) { count("commit", m) },
		Duplicate:   func(m *consumer.Message) { count("duplicate", m) },
		Failed:      func(m *consumer.Message, _ error) { count("failed", m) },
		Held:        func(m *consumer.Message, reason string, _ error) { count("held "+reason, m) },
	}
	r := db.start(t, b.Source("q"), cfg, func(_ context.Context, exec execFunc, m *consumer.Message) error {
		if m.ID == "bad" && m.Attempt < 3 {
			return errors.New("no")
		}
		return effect(exec, m)
	})
	publish(t, b, msg("q", "1", "", "x"), msg("q", "1", "", "x"), msg("q", "bad", "", "x"))
	eventually(t, "all", func() bool { s := r.Stats(); return s.Processed == 2 && s.Duplicates == 1 })
	require.NoError(t, r.stop())
	require.Equal(t, map[string]int{"commit 1": 1, "duplicate 1": 1, "failed bad": 2, "held retry bad": 1, "commit bad": 1}, got)
}

func TestChainWrapsInsideTheTransaction(t *testing.T) {
	t.Parallel()
	var log []string
	wrap := func(name string) func(consumer.Handler[int]) consumer.Handler[int] {
		return func(h consumer.Handler[int]) consumer.Handler[int] {
			return func(ctx context.Context, tx int, m *consumer.Message) error {
				log = append(log, fmt.Sprint(name, tx))
				return h(ctx, tx+1, m)
			}
		}
	}
	h := consumer.Chain(func(_ context.Context, tx int, _ *consumer.Message) error {
		log = append(log, fmt.Sprint("h", tx))
		return nil
	}, wrap("a"), wrap("b"))
	require.NoError(t, h(t.Context(), 1, nil))
	require.Equal(t, []string{"a1", "b2", "h3"}, log)
}

// Shutdown ends Run from elsewhere, waits for it, and may be called again.
func TestShutdownWaitsForRun(t *testing.T) {
	t.Parallel()
	db := sqlite(t)
	b := memory.New(memory.Config{})
	inside, leave := make(chan struct{}), make(chan struct{})
	r := db.start(t, b.Source("q"), quick(), func(_ context.Context, exec execFunc, m *consumer.Message) error {
		close(inside)
		<-leave
		return effect(exec, m)
	})
	publish(t, b, msg("q", "1", "", "x"))
	<-inside
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, r.Shutdown(ctx), context.DeadlineExceeded)
	close(leave)
	require.NoError(t, r.Shutdown(t.Context()))
	require.NoError(t, r.Shutdown(t.Context()))
	require.Error(t, r.Ready())
	require.EqualValues(t, 1, r.Stats().Processed)
	require.ErrorContains(t, r.Run(t.Context()), "runs once")
}

// ByLane keeps a lane's messages one at a time and in order, whatever their keys;
// Unordered lets them all run at once.
func TestOrderOfLanesAndNone(t *testing.T) {
	t.Parallel()
	for _, order := range []consumer.Order{consumer.ByLane, consumer.Unordered} {
		t.Run(fmt.Sprint(order), func(t *testing.T) {
			t.Parallel()
			db := postgres(t)
			b := memory.New(memory.Config{})
			b.Topic("t", memory.TopicConfig{Partitions: 2})
			var now, most atomic.Int64
			cfg := quick()
			cfg.Order, cfg.Concurrency, cfg.Tries = order, 8, 1
			var failed atomic.Bool
			r := db.start(t, b.Source("t", memory.Group("g")), cfg, func(_ context.Context, exec execFunc, m *consumer.Message) error {
				if n := now.Add(1); n > most.Load() {
					most.Store(n)
				}
				defer now.Add(-1)
				if m.ID == "3" && failed.CompareAndSwap(false, true) {
					return errors.New("no")
				}
				if err := exec(`SELECT pg_sleep(0.02)`); err != nil {
					return err
				}
				lane, _, _ := strings.Cut(m.Coordinates, "@")
				return exec(`INSERT INTO effects (seq, id, key, n) VALUES ($1, $2, $3, $4)`, seq.Add(1), m.ID, lane, m.Attempt)
			})
			for i := range 40 {
				publish(t, b, msg("t", fmt.Sprint(i), fmt.Sprint("k", i), "x"))
			}
			eventually(t, "all", func() bool { return r.Stats().Processed == 40 })
			require.NoError(t, r.stop())
			if order == consumer.Unordered {
				require.Greater(t, most.Load(), int64(2))
				return
			}
			require.LessOrEqual(t, most.Load(), int64(2), "one a lane")
			require.Zero(t, db.query(t, `SELECT count(*) FROM effects x JOIN effects y ON x.key = y.key AND CAST(x.id AS integer) < CAST(y.id AS integer) AND x.seq > y.seq`))
		})
	}
}
