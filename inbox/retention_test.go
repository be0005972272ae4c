package inbox_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/inbox"
)

func TestCheckWindow(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		window, horizon time.Duration
		warn, fail      bool
	}{
		{inbox.DefaultWindow, 14 * 24 * time.Hour, false, false},
		{inbox.DefaultWindow, inbox.DefaultWindow, false, false},
		{inbox.DefaultWindow, 30 * 24 * time.Hour, false, true},
		{inbox.DefaultWindow, 0, true, false},
		{inbox.DefaultWindow, brokers.Unlimited, true, false},
		{-1, 30 * 24 * time.Hour, false, false},
		{-1, brokers.Unlimited, false, false},
	} {
		warning, err := inbox.CheckWindow(c.window, c.horizon)
		assert.Equal(t, c.warn, warning != "", "%+v", c)
		assert.Equal(t, c.fail, errors.Is(err, inbox.ErrWindow), "%+v", c)
	}
}

func onAllForRetention(t *testing.T, f func(b *bench, s retainer, do func(q string))) {
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		db := sqliteDB(t)
		b := benchOf[*sql.Tx](t, inbox.SQLite(db), inbox.SQLite(db).Operator())
		b.count = func(q string) (n int) { require.NoError(t, db.QueryRow(q).Scan(&n)); return n }
		f(b, inbox.SQLite(db), func(q string) { _, err := db.Exec(q); require.NoError(t, err) })
	})
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		pool := pgPool(t)
		b := benchOf[pgx.Tx](t, inbox.Postgres(pool), inbox.Postgres(pool).Operator())
		b.count = func(q string) (n int) { require.NoError(t, pool.QueryRow(t.Context(), q).Scan(&n)); return n }
		f(b, inbox.Postgres(pool), func(q string) { _, err := pool.Exec(t.Context(), q); require.NoError(t, err) })
	})
	t.Run("postgresdb", func(t *testing.T) {
		t.Parallel()
		pool := pgPool(t)
		db := stdlib.OpenDBFromPool(pool)
		t.Cleanup(func() { db.Close() })
		b := benchOf[*sql.Tx](t, inbox.PostgresDB(db), inbox.PostgresDB(db).Operator())
		b.count = func(q string) (n int) { require.NoError(t, db.QueryRow(q).Scan(&n)); return n }
		f(b, inbox.PostgresDB(db), func(q string) { _, err := db.Exec(q); require.NoError(t, err) })
	})
}

// retainer is what the stores have in common for the cleanup.
type retainer interface {
	Retain(ctx context.Context, r inbox.RetainRequest) (inbox.RetainResult, error)
	CaughtUp(ctx context.Context, consumer string) error
}

const window = time.Hour

func old(b *bench, do func(string)) {
	if isSQLite(b) {
		do(fmt.Sprintf(`UPDATE processed_messages SET processed_at = processed_at - %d WHERE message_id LIKE 'old%%'`, 2*window.Microseconds()))
		return
	}
	do(`UPDATE processed_messages SET processed_at = processed_at - interval '2 hours' WHERE message_id LIKE 'old%'`)
}

func isSQLite(b *bench) bool {
	return strings.HasSuffix(b.Name(), "/sqlite")
}

func TestCleanupKeepsWhatGuards(t *testing.T) {
	t.Parallel()
	onAllForRetention(t, func(b *bench, s retainer, do func(string)) {
		for _, id := range []string{"old-done", "old-conflict", "new-done"} {
			require.Equal(b, inbox.Claimed, b.claim(held(id, "")))
		}
		b.hold(held("old-held", ""), inbox.ReasonDead, true, 0)
		b.hold(held("old-discarded", ""), inbox.ReasonDead, true, 0)
		require.NoError(b, b.op.Discard(b.Context(), b.only(inbox.HeldFilter{ID: "old-discarded"}), me))
		other := held("old-conflict", "")
		other.Payload = []byte("other content")
		b.hold(other, inbox.ReasonConflict, true, 0)
		old(b, do)

		step := func(owner string) inbox.RetainResult {
			r, err := s.Retain(b.Context(), inbox.RetainRequest{Consumer: opConsumer, Owner: owner, Lease: time.Minute, Window: window})
			require.NoError(b, err)
			return r
		}
		require.Equal(b, inbox.RetainResult{Owner: true}, step("a"), "not before it has caught up, or a window has passed")
		require.Equal(b, inbox.RetainResult{}, step("b"), "one at a time")
		require.NoError(b, s.CaughtUp(b.Context(), opConsumer))
		require.NoError(b, s.CaughtUp(b.Context(), opConsumer))
		deleted, forgets := 0, time.Duration(0)
		for more := true; more; {
			r := step("a")
			require.True(b, r.Owner && r.Allowed)
			deleted += r.Deleted
			more, forgets = r.More, r.Forgets
		}
		require.Equal(b, 2, deleted, "old-done and old-discarded")
		require.InDelta(b, window.Seconds(), forgets.Seconds(), 60)
		require.Equal(b, 3, b.count(`SELECT count(*) FROM processed_messages WHERE message_id IN ('old-held', 'old-conflict', 'new-done')`))
		require.Equal(b, 3, b.count(`SELECT count(*) FROM processed_messages`))
		require.Equal(b, inbox.Held, b.claim(held("old-held", "")), "a held message guards its ID for ever")
		require.Positive(b, step("b").Forgets, "others know what may be forgotten too")

		do(`UPDATE inbox_retention SET until = since`)
		require.True(b, step("b").Owner, "the lease of one that died ends")
	})
}

// A large table is cleaned step by step, while it is used, and a cleaner that dies is
// followed by another one.
func TestCleanupOfManyClaimsBesideNewOnes(t *testing.T) {
	t.Parallel()
	onAllForRetention(t, func(b *bench, s retainer, do func(string)) {
		n := 20_000
		if isSQLite(b) {
			n = 3_000
			do(fmt.Sprintf(`WITH RECURSIVE g(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM g WHERE i < %d)
				INSERT INTO processed_messages (processed_at, consumer_id, message_id, fp) SELECT 0, 1, 'old' || i, x'00' FROM g`, n))
		} else {
			do(fmt.Sprintf(`INSERT INTO processed_messages (processed_at, consumer_id, message_id, fp)
				SELECT now() - interval '2 hours', 1, 'old' || i, '\x00' FROM generate_series(1, %d) i`, n))
		}
		require.Equal(b, inbox.Claimed, b.claim(held("first", ""))) // its consumer is number 1
		require.NoError(b, s.CaughtUp(b.Context(), opConsumer))
		var wg sync.WaitGroup
		stop := make(chan struct{})
		claims := 0
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				v, err := b.tryClaim(held(fmt.Sprint("new", claims), ""))
				switch {
				case errors.Is(err, inbox.ErrClaimTimeout): // SQLite takes turns
				case assert.NoError(b, err) && assert.Equal(b, inbox.Claimed, v):
					claims++
				default:
					return
				}
			}
		})
		steps, deleted := 0, 0
		for more := true; more; steps++ {
			owner := "a"
			if steps > 2 {
				owner = "b" // a has died in the middle
			}
			if steps == 3 {
				do(`UPDATE inbox_retention SET until = since`)
			}
			r, err := s.Retain(b.Context(), inbox.RetainRequest{Consumer: opConsumer, Owner: owner, Lease: time.Minute, Window: window, Batch: 700})
			if errors.Is(err, inbox.ErrClaimTimeout) { // SQLite takes turns
				steps--
				continue
			}
			require.NoError(b, err)
			require.True(b, r.Owner)
			deleted += r.Deleted
			more = r.More
		}
		close(stop)
		wg.Wait()
		require.Greater(b, steps, 4)
		require.Equal(b, n, deleted)
		require.Zero(b, b.count(`SELECT count(*) FROM processed_messages WHERE message_id LIKE 'old%'`))
		require.Equal(b, claims+1, b.count(`SELECT count(*) FROM processed_messages`))
		b.Logf("%d claims beside %d steps", claims, steps)
	})
}
