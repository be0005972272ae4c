package latest_test

import (
	"context"
	"database/sql"
	"errors"
	"math"
	"math/rand/v2"
	"path/filepath"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite"

	"github.com/twiceproof/twiceproof/inbox"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
	"github.com/twiceproof/twiceproof/latest"
	"github.com/twiceproof/twiceproof/migrations"
)

// place is a database and what to do in a transaction of it.
type place struct {
	apply func(entity string, version int64, fail bool) (latest.Verdict, error)
	once  func(id, entity string, version int64) (inbox.Verdict, latest.Verdict)
}

func onAll(t *testing.T, f func(t *testing.T, p place)) {
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		db, err := sql.Open("sqlite", "file:"+filepath.Join(t.TempDir(), "t.db")+"?_txlock=immediate&_pragma=busy_timeout(5000)&_pragma=synchronous(FULL)")
		require.NoError(t, err)
		db.SetMaxOpenConns(1)
		t.Cleanup(func() { db.Close() })
		_, err = migrations.Up(t.Context(), migrations.SQLDB(db, migrations.SQLite))
		require.NoError(t, err)
		f(t, placeOf[*sql.Tx](t, inbox.SQLite(db), latest.SQLite("prices")))
	})
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		pool := devtest.PostgresPool(t, 8)
		_, err := migrations.Up(t.Context(), migrations.Pool(pool))
		require.NoError(t, err)
		f(t, placeOf[pgx.Tx](t, inbox.Postgres(pool), latest.Postgres("prices")))
	})
	t.Run("postgresdb", func(t *testing.T) {
		t.Parallel()
		pool := devtest.PostgresPool(t, 8)
		_, err := migrations.Up(t.Context(), migrations.Pool(pool))
		require.NoError(t, err)
		db := stdlib.OpenDBFromPool(pool)
		t.Cleanup(func() { db.Close() })
		f(t, placeOf[*sql.Tx](t, inbox.PostgresDB(db), latest.PostgresDB("prices")))
	})
}

var errRolledBack = errors.New("roll back")

func placeOf[Tx any](t *testing.T, s inbox.Store[Tx], v *latest.Versions[Tx]) place {
	var mu sync.Mutex
	n := 0
	do := func(id, entity string, version int64, fail bool) (verdict inbox.Verdict, got latest.Verdict, err error) {
		verdict, err = inbox.Once(t.Context(), s, "prices", id, func(ctx context.Context, tx Tx) error {
			var err error
			if got, err = v.Apply(ctx, tx, entity, version); err == nil && fail {
				err = errRolledBack
			}
			return err
		})
		return verdict, got, err
	}
	return place{
		apply: func(entity string, version int64, fail bool) (latest.Verdict, error) {
			mu.Lock()
			n++
			id := string(rune('a'+n%26)) + string(rune('a'+n/26%26)) + string(rune('a'+n/676%26))
			mu.Unlock()
			_, got, err := do(id, entity, version, fail)
			return got, err
		},
		once: func(id, entity string, version int64) (inbox.Verdict, latest.Verdict) {
			v, got, err := do(id, entity, version, false)
			require.NoError(t, err)
			return v, got
		},
	}
}

func TestOnlyNewerVersionsAreApplied(t *testing.T) {
	t.Parallel()
	onAll(t, func(t *testing.T, p place) {
		for _, c := range []struct {
			entity  string
			version int64
			want    latest.Verdict
		}{
			{"17", 1, latest.Newer}, {"17", 1, latest.Same}, {"17", 5, latest.Newer}, {"17", 3, latest.Older}, {"17", 5, latest.Same},
			{"18", 2, latest.Newer}, {"17", 6, latest.Newer}, {"17 ", -1, latest.Newer}, {"17 ", math.MinInt64, latest.Older}, {"x", math.MaxInt64, latest.Newer}, {"x", 0, latest.Older},
		} {
			got, err := p.apply(c.entity, c.version, false)
			require.NoError(t, err)
			require.Equal(t, c.want, got, "%+v", c)
		}
		_, err := p.apply("", 1, false)
		require.ErrorContains(t, err, "entity is empty")
	})
}

func TestARollbackForgetsTheVersion(t *testing.T) {
	t.Parallel()
	onAll(t, func(t *testing.T, p place) {
		got, err := p.apply("17", 4, true)
		require.ErrorIs(t, err, errRolledBack)
		require.Equal(t, latest.Newer, got)
		got, err = p.apply("17", 3, false)
		require.NoError(t, err)
		require.Equal(t, latest.Newer, got)
	})
}

// Beside dedup: a repeated message does not run, a late one runs and changes nothing.
func TestBesideDeduplication(t *testing.T) {
	t.Parallel()
	onAll(t, func(t *testing.T, p place) {
		v, got := p.once("price-2", "17", 2)
		require.Equal(t, inbox.Claimed, v)
		require.Equal(t, latest.Newer, got)
		v, got = p.once("price-2", "17", 2)
		require.Equal(t, inbox.Duplicate, v)
		require.Zero(t, got)
		v, got = p.once("price-1", "17", 1)
		require.Equal(t, inbox.Claimed, v)
		require.Equal(t, latest.Older, got)
	})
}

// Many transactions about one entity at once: the versions that were applied rise.
func TestVersionsRiseWhoeverComesFirst(t *testing.T) {
	t.Parallel()
	onAll(t, func(t *testing.T, p place) {
		const n = 60
		var mu sync.Mutex
		newer := map[int64]int{}
		var wg sync.WaitGroup
		for i := range 6 {
			wg.Go(func() {
				for _, v := range rand.New(rand.NewPCG(uint64(i), 0)).Perm(n) {
					got, err := p.apply("17", int64(v), false)
					if !assert.NoError(t, err) {
						return
					}
					if got == latest.Newer {
						mu.Lock()
						newer[int64(v)]++
						mu.Unlock()
					}
				}
			})
		}
		wg.Wait()
		require.Equal(t, 1, newer[n-1], "the last version is applied, once")
		for v, times := range newer {
			require.Equal(t, 1, times, "version %d", v)
		}
	})
}
