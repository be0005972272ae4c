package consumer_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers/memory"
	"github.com/twiceproof/twiceproof/consumer"
)

// Suspects run one at a time. A shutdown lets the one that runs finish; those that wait
// for their turn have not begun, and go back.
func TestShutdownGivesBackSuspectsThatWait(t *testing.T) {
	t.Parallel()
	onAll(t, func(t *testing.T, db database) {
		b := memory.New(memory.Config{})
		cfg := quick()
		cfg.Name, cfg.Concurrency, cfg.DrainTimeout = t.Name(), 4, 10*time.Millisecond
		var runs atomic.Int64
		r := db.start(t, b.Source("q"), cfg, func(ctx context.Context, _ execFunc, _ *consumer.Message) error {
			runs.Add(1)
			<-ctx.Done()
			return ctx.Err()
		})
		for i := range 4 {
			publish(t, b, msg("q", fmt.Sprint(i), "", "x"))
		}
		eventually(t, "it runs", func() bool { return runs.Load() > 0 && r.Stats().Received == 4 })
		require.NoError(t, r.stop())

		// All of them were delivered before: each may have ended a process.
		runs.Store(0)
		open := make(chan struct{})
		unblock := sync.OnceFunc(func() { close(open) })
		defer unblock()
		cfg.DrainTimeout = 20 * time.Second
		r = db.start(t, b.Source("q"), cfg, func(_ context.Context, exec execFunc, m *consumer.Message) error {
			runs.Add(1)
			<-open
			return effect(exec, m)
		})
		eventually(t, "one runs, the others wait", func() bool { return runs.Load() == 1 && r.Stats().Received == 4 })
		stopped := make(chan error, 1)
		go func() { stopped <- r.stop() }()
		eventually(t, "the others go back at once", func() bool { return r.Stats().Released == 3 })
		unblock()
		require.NoError(t, <-stopped)
		require.EqualValues(t, 1, runs.Load())
		require.Equal(t, 1, db.query(t, `SELECT count(*) FROM effects`))
		require.Equal(t, 3, b.Len("q"))
		require.Zero(t, db.query(t, `SELECT count(*) FROM inbox_suspects`))
	})
}
