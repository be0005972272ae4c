package inbox_test

import (
	"context"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/inbox"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
	"github.com/twiceproof/twiceproof/migrations"
)

// fillHeld holds n messages by SQL, on keys keys; 0 keys means no key.
func fillHeld(t testing.TB, pool *pgxpool.Pool, n, keys int) {
	_, err := inbox.Once(t.Context(), inbox.Postgres(pool), "c", "first", func(context.Context, pgx.Tx) error { return nil })
	require.NoError(t, err)
	for _, q := range []string{
		`INSERT INTO processed_messages (consumer_id, message_id, state) SELECT 1, i::text, 1 FROM generate_series(1, $1::int) i WHERE $2::int >= 0`,
		`INSERT INTO held_messages (consumer_id, reason, message_id, order_key, topic, type, content_type, payload, attempts, starts, due_at)
			SELECT 1, 'behind', i::text, CASE WHEN $2::int > 0 THEN convert_to('k' || (i % $2::int), 'UTF8') END, '', '', '', 'x', 1, 1,
			CASE WHEN $2::int = 0 OR i <= $2::int THEN now() END FROM generate_series(1, $1::int) i`,
	} {
		_, err := pool.Exec(t.Context(), q, n, keys)
		require.NoError(t, err)
	}
	_, err = pool.Exec(t.Context(), `ANALYZE`)
	require.NoError(t, err)
}

// drainHeld retries with some workers, as runners do, until nothing is held.
func drainHeld(t testing.TB, pool *pgxpool.Pool, workers int) time.Duration {
	s := inbox.Postgres(pool)
	ctx := context.Background()
	u := inbox.Unit{Consumer: "c"}
	start := time.Now()
	heads := make(chan *inbox.Head, workers)
	var wg sync.WaitGroup
	idle := make(chan struct{}, workers)
	for range workers {
		idle <- struct{}{}
		wg.Go(func() {
			for h := range heads {
				a, err := s.BeginRetry(ctx, h, u)
				if assert.NoError(t, err) {
					r, err := a.Commit(ctx)
					assert.NoError(t, err)
					assert.Equal(t, inbox.CommitYes, r)
				}
				idle <- struct{}{}
			}
		})
	}
	for empty := 0; empty < 3; {
		<-idle
		free := 1 + len(idle)
		hs, err := s.TakeHeads(ctx, inbox.HeadQuery{Consumer: "c", Max: free, Lease: time.Minute})
		require.NoError(t, err)
		for i, h := range hs {
			if i > 0 {
				<-idle
			}
			heads <- h
		}
		if len(hs) == 0 {
			idle <- struct{}{}
			var n int
			require.NoError(t, pool.QueryRow(ctx, `SELECT count(*) FROM held_messages`).Scan(&n))
			if n == 0 {
				empty++
			}
		}
	}
	close(heads)
	wg.Wait()
	return time.Since(start)
}

// Held messages of few keys must drain about as fast as messages without keys: the
// next of a key is found without looking at all that wait behind it. The figure is a
// ratio within one run; a search that grows with the backlog misses it by far.
func TestFewKeysDrainAboutAsFastAsNone(t *testing.T) {
	n, limit := 4000, 4.0 // a loaded machine; without an index it is far beyond
	if s := os.Getenv("TWICEPROOF_DRAIN_ROWS"); s != "" {
		var err error
		n, err = strconv.Atoi(s)
		require.NoError(t, err)
		limit = 2
	}
	drain := func(keys int) time.Duration {
		pool := devtest.PostgresPool(t, 10)
		_, err := migrations.Up(t.Context(), migrations.Pool(pool))
		require.NoError(t, err)
		fillHeld(t, pool, n, keys)
		d := drainHeld(t, pool, 8)
		var left int
		require.NoError(t, pool.QueryRow(t.Context(), `SELECT count(*) FROM processed_messages WHERE state <> 0`).Scan(&left))
		require.Zero(t, left)
		return d
	}
	free, keyed := drain(0), drain(20)
	t.Logf("%d rows: without keys %.0f/s, on 20 keys %.0f/s, ratio %.2f", n, float64(n)/free.Seconds(), float64(n)/keyed.Seconds(), free.Seconds()/keyed.Seconds())
	require.Less(t, keyed.Seconds(), limit*free.Seconds(), "the rate with keys is too low")
}
