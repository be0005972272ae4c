package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/brokers/memory"
	"github.com/twiceproof/twiceproof/consumer"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
)

// Particular/ServiceControl#4817, PostHog/posthog#95200: while the database is away no
// message may use up attempts.
func TestDatabaseOutageCountsForNoMessage(t *testing.T) {
	t.Parallel()
	onAll(t, func(t *testing.T, db database) {
		b := memory.New(memory.Config{})
		b.Topic("t", memory.TopicConfig{Partitions: 2})
		cfg := quick()
		cfg.MaxAttempts, cfg.Tries = 2, 1
		r := db.start(t, b.Source("t", memory.Group("g")), cfg, func(_ context.Context, exec execFunc, m *consumer.Message) error {
			if m.ID == "3" && m.Attempt == 1 {
				db.cut.down.Store(true) // the hold of this failure meets the outage
				return errors.New("no")
			}
			return effect(exec, m)
		})
		const n = 50
		for i := range n {
			publish(t, b, msg("t", fmt.Sprint(i), fmt.Sprint("k", i%5), "x"))
		}
		eventually(t, "probed", func() bool { return db.cut.calls.Load() >= 3 })
		require.ErrorContains(t, r.Healthy(), "connection refused")
		require.Error(t, r.Ready())
		db.cut.down.Store(false)
		eventually(t, "all", func() bool { return r.Stats().Processed == n })
		require.NoError(t, r.Healthy())
		require.NoError(t, r.stop())
		require.Zero(t, r.Stats().Dead)
		require.EqualValues(t, 1, r.Stats().Failures, "the one real failure")
		require.Equal(t, n, db.query(t, `SELECT count(*) FROM effects`))
		require.Equal(t, 0, db.query(t, `SELECT count(*) FROM effects x JOIN effects y ON x.key = y.key AND CAST(x.id AS integer) < CAST(y.id AS integer) AND x.seq > y.seq`))
	})
}

func TestRealPostgresStopsAndComesBack(t *testing.T) {
	t.Parallel()
	server := devtest.OwnPostgres(t)
	pool := newPoolFromURL(t, server.URL())
	db := onPool(t, pool, pool)
	b := memory.New(memory.Config{})
	b.Topic("t", memory.TopicConfig{Partitions: 1})
	cfg := quick()
	cfg.MaxAttempts, cfg.Concurrency = 1, 4
	var stop atomic.Bool
	stopped := make(chan struct{})
	r := db.start(t, b.Source("t", memory.Group("g")), cfg, func(_ context.Context, exec execFunc, m *consumer.Message) error {
		if m.ID == "10" && stop.CompareAndSwap(false, true) {
			defer close(stopped)
			if err := server.Stop(true); err != nil {
				return err
			}
		}
		return effect(exec, m)
	})
	for i := range 100 {
		publish(t, b, msg("t", fmt.Sprint(i), fmt.Sprint("k", i%10), "x"))
	}
	<-stopped
	eventually(t, "unhealthy", func() bool { return r.Healthy() != nil })
	require.NoError(t, server.Start(context.WithoutCancel(t.Context())))
	require.Eventually(t, func() bool { s := r.Stats(); return s.Processed+s.Duplicates >= 100 }, 60*time.Second, 20*time.Millisecond,
		"a commit whose answer the stop took counts as a duplicate when it is claimed again")
	require.NoError(t, r.stop())
	require.Equal(t, 100, db.query(t, `SELECT count(DISTINCT id) FROM effects`))
	require.Equal(t, 100, db.query(t, `SELECT count(*) FROM effects`))
	require.Zero(t, r.Stats().Failures+r.Stats().Dead)
}

// limited is a source whose broker lets a delivery be held for so long only.
type limited struct {
	brokers.Source
	hold time.Duration
}

func (s limited) Open(ctx context.Context, o brokers.OpenOptions) (brokers.Capabilities, error) {
	c, err := s.Source.Open(ctx, o)
	c.MaxHold = s.hold
	return c, err
}

// What the broker would take back by force is given back before, once in an outage,
// and what waits for a worker as well as what waits in one.
func TestLongOutageGivesEverythingBack(t *testing.T) {
	t.Parallel()
	onAll(t, func(t *testing.T, db database) {
		b := memory.New(memory.Config{})
		cfg := quick()
		cfg.Concurrency = 2
		r := db.start(t, limited{b.Source("q"), 400 * time.Millisecond}, cfg, func(_ context.Context, exec execFunc, m *consumer.Message) error {
			if m.ID == "0" && m.Attempt == 1 && db.cut.calls.Load() == 0 {
				db.cut.down.Store(true)
				return errors.New("no")
			}
			return effect(exec, m)
		})
		for i := range 10 {
			publish(t, b, msg("q", fmt.Sprint(i), "k", "x"))
		}
		eventually(t, "given back", func() bool { return r.Stats().Released >= 10 })
		require.Never(t, func() bool { return r.Stats().Released > 20 }, time.Second, 50*time.Millisecond, "once, not at every probe")
		db.cut.down.Store(false)
		eventually(t, "all", func() bool { return r.Stats().Processed == 10 })
		require.NoError(t, r.stop())
		require.Equal(t, 10, db.query(t, `SELECT count(*) FROM effects`))
	})
}

func TestMaxHeldPausesTheIntakeAndRetriesGoOn(t *testing.T) {
	t.Parallel()
	onAll(t, func(t *testing.T, db database) {
		b := memory.New(memory.Config{})
		var down atomic.Bool
		down.Store(true)
		cfg := quick()
		cfg.MaxHeld, cfg.Tries, cfg.MaxAttempts, cfg.Room, cfg.Breaker.Share = 5, 1, 1_000_000, 2, -1
		r := db.start(t, b.Source("q"), cfg, func(_ context.Context, exec execFunc, m *consumer.Message) error {
			if down.Load() {
				return errors.New("downstream is out")
			}
			return effect(exec, m)
		})
		const n = 1000
		for i := range n {
			publish(t, b, msg("q", fmt.Sprint(i), "", "x"))
		}
		eventually(t, "full", func() bool { return r.Healthy() != nil })
		require.ErrorContains(t, r.Healthy(), "MaxHeld")
		held := db.query(t, `SELECT count(*) FROM held_messages`)
		require.Never(t, func() bool { return db.query(t, `SELECT count(*) FROM held_messages`) > held+2 }, 2500*time.Millisecond, 100*time.Millisecond)
		eventually(t, "the rest is on the broker, or in hand", func() bool {
			return n == db.query(t, `SELECT count(*) FROM held_messages`)+b.Len("q")
		})
		down.Store(false)
		require.Eventually(t, func() bool { return r.Stats().Processed == n }, 60*time.Second, 10*time.Millisecond)
		eventually(t, "green again", func() bool { return r.Healthy() == nil })
		require.NoError(t, r.stop())
		require.Equal(t, n, db.query(t, `SELECT count(DISTINCT id) FROM effects`))
	})
}

// What is in hand is bounded in messages and in bytes.
func TestRoomBoundsWhatIsInHand(t *testing.T) {
	t.Parallel()
	for name, cfg := range map[string]consumer.Config{
		"messages": {Room: 7},
		"bytes":    {Room: 1000, RoomBytes: 10_000},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := sqlite(t)
			b := memory.New(memory.Config{})
			release := make(chan struct{})
			inside := make(chan struct{}, 1)
			r := db.start(t, b.Source("q"), cfg, func(_ context.Context, exec execFunc, m *consumer.Message) error {
				select {
				case inside <- struct{}{}:
				default:
				}
				<-release
				return effect(exec, m)
			})
			body := string(make([]byte, 1000))
			for i := range 100 {
				publish(t, b, msg("q", fmt.Sprint(i), "", body))
			}
			<-inside
			require.Never(t, func() bool { return r.Stats().Received > 12 }, 300*time.Millisecond, 10*time.Millisecond)
			require.Positive(t, r.Stats().Received)
			close(release)
			eventually(t, "all", func() bool { return r.Stats().Processed == 100 })
		})
	}
}

func TestMessageLargerThanTheRoomStillPasses(t *testing.T) {
	t.Parallel()
	db := sqlite(t)
	b := memory.New(memory.Config{})
	r := db.start(t, b.Source("q"), consumer.Config{RoomBytes: 1000}, func(_ context.Context, exec execFunc, m *consumer.Message) error { return effect(exec, m) })
	publish(t, b, msg("q", "small", "", "x"), msg("q", "huge", "", string(make([]byte, 1<<20))), msg("q", "small2", "", "x"))
	eventually(t, "all", func() bool { return r.Stats().Processed == 3 })
}
