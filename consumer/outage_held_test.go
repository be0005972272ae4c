package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers/memory"
	"github.com/twiceproof/twiceproof/consumer"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
)

// A database that goes away while a held message runs, again and again, is no crash
// of the process: the start is taken back once the database is there, and the
// message is never dead for it. Before, each such run waited for its lease to end
// and counted as one that had died.
func TestDatabaseStopsInRetriesAreNoCrashLoop(t *testing.T) {
	t.Parallel()
	for _, when := range []string{"the handler is content", "the handler fails"} {
		t.Run(when, func(t *testing.T) {
			t.Parallel()
			server := devtest.OwnPostgres(t)
			pool := newPoolFromURL(t, server.URL())
			db := onPool(t, pool, pool)
			b := memory.New(memory.Config{})
			cfg := quick()
			cfg.Concurrency, cfg.Tries, cfg.CrashLimit = 2, 1, 2
			cfg.HandlerTimeout = time.Minute // and so is the lease
			const stops = 5
			var runs atomic.Int64
			stopped := make(chan int64)
			up := make(chan struct{}, 1) // the server has started, as the test sees it
			up <- struct{}{}
			r := db.start(t, b.Source("q"), cfg, func(_ context.Context, exec execFunc, m *consumer.Message) error {
				if !m.Replayed {
					return errors.New("held first")
				}
				err := effect(exec, m)
				if n := runs.Add(1); n <= stops {
					<-up
					if e := server.Stop(true); e != nil {
						return e
					}
					stopped <- n
					if when == "the handler fails" {
						return errors.New("downstream is away as well")
					}
					return nil
				}
				return err
			})
			publish(t, b, msg("q", "m", "k", "x"))
			for range stops {
				select {
				case <-stopped:
				case <-time.After(30 * time.Second):
					require.Fail(t, "the held message is not run again", "%+v, %d runs", r.Stats(), runs.Load())
				}
				eventually(t, "the outage is noticed", func() bool { return r.Healthy() != nil })
				require.NoError(t, server.Start(context.WithoutCancel(t.Context())))
				up <- struct{}{}
			}
			require.Eventually(t, func() bool { s := r.Stats(); return s.Processed == 1 || s.Dead > 0 }, 30*time.Second, 10*time.Millisecond)
			require.NoError(t, r.stop())
			require.Equal(t, 1, db.query(t, `SELECT count(*) FROM effects`), fmt.Sprintf("%+v", r.Stats()))
			require.Zero(t, db.query(t, `SELECT count(*) FROM held_messages`))
		})
	}
}
