package inbox_test

import (
	"context"
	"database/sql"
	"path/filepath"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite"

	"github.com/twiceproof/twiceproof/inbox"
	"github.com/twiceproof/twiceproof/inbox/inboxtest"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
	"github.com/twiceproof/twiceproof/internal/pgproxy"
	"github.com/twiceproof/twiceproof/internal/sqldb"
	"github.com/twiceproof/twiceproof/migrations"
)

const effectsTable = `CREATE TABLE effects (id TEXT UNIQUE, key TEXT, n BIGINT)`

func TestConformanceSQLite(t *testing.T) {
	t.Parallel()
	inboxtest.Run(t, inboxtest.Config[*sql.Tx]{Expected: "testdata/conformance-sqlite.txt", New: func(t *testing.T) inboxtest.Fixture[*sql.Tx] {
		db := sqliteDB(t)
		_, err := db.Exec(effectsTable)
		require.NoError(t, err)
		f := sqlFixture(db, sqldb.SQLite)
		f.Store, f.Other, f.SingleWriter = inbox.SQLite(db), inbox.SQLite(db), true
		return f
	}})
}

func sqliteDB(t *testing.T) *sql.DB {
	db, err := sql.Open("sqlite", "file:"+filepath.Join(t.TempDir(), "t.db")+"?_pragma=busy_timeout(2000)&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)&_txlock=immediate")
	require.NoError(t, err)
	t.Cleanup(func() { db.Close() })
	_, err = migrations.Up(t.Context(), migrations.SQLDB(db, migrations.SQLite))
	require.NoError(t, err)
	return db
}

func sqlFixture(db *sql.DB, d sqldb.Dialect) inboxtest.Fixture[*sql.Tx] {
	return inboxtest.Fixture[*sql.Tx]{
		Exec: func(ctx context.Context, tx *sql.Tx, q string, args ...any) error {
			_, err := tx.ExecContext(ctx, q, args...)
			return err
		},
		Do: func(q string, args ...any) error {
			_, err := db.Exec(q, args...)
			return err
		},
		Count: func(q string) (n int, err error) { return n, db.QueryRow(q).Scan(&n) },
		End: func(_ context.Context, tx *sql.Tx, commit bool) error {
			if commit {
				return tx.Commit()
			}
			return tx.Rollback()
		},
	}
}

func loser(p *pgproxy.Proxy) func(bool) {
	return func(reachesServer bool) {
		if reachesServer {
			p.Arm(pgproxy.LoseAnswer)
		} else {
			p.Arm(pgproxy.LoseCommit)
		}
	}
}

func pgPool(t *testing.T) *pgxpool.Pool {
	// Less durable than the inbox needs: it has to raise it.
	cfg := devtest.PostgresPool(t, 8).Config()
	cfg.ConnConfig.RuntimeParams["synchronous_commit"] = "off"
	pool := newPool(t, cfg)
	_, err := migrations.Up(t.Context(), migrations.Pool(pool))
	require.NoError(t, err)
	_, err = pool.Exec(t.Context(), effectsTable)
	require.NoError(t, err)
	return pool
}

func TestConformancePostgres(t *testing.T) {
	t.Parallel()
	inboxtest.Run(t, inboxtest.Config[pgx.Tx]{Expected: "testdata/conformance-postgres.txt", New: func(t *testing.T) inboxtest.Fixture[pgx.Tx] {
		pool := pgPool(t)
		proxied, proxy := pgproxy.Between(t, pool)
		return pgxFixture(pool, proxied, proxy)
	}})
}

func TestConformancePostgresDB(t *testing.T) {
	t.Parallel()
	inboxtest.Run(t, inboxtest.Config[*sql.Tx]{Expected: "testdata/conformance-postgresdb.txt", New: func(t *testing.T) inboxtest.Fixture[*sql.Tx] {
		pool := pgPool(t)
		proxied, proxy := pgproxy.Between(t, pool)
		db, other := stdlib.OpenDBFromPool(pool), stdlib.OpenDBFromPool(proxied)
		t.Cleanup(func() { db.Close(); other.Close() })
		f := sqlFixture(db, sqldb.Postgres)
		f.Store, f.Other, f.Aborts, f.LoseCommits = inbox.PostgresDB(other), inbox.PostgresDB(db), true, loser(proxy)
		f.Lose = func(ctx context.Context, tx *sql.Tx) error {
			var pid int
			if err := tx.QueryRowContext(ctx, `SELECT pg_backend_pid()`).Scan(&pid); err != nil {
				return err
			}
			_, err := db.ExecContext(ctx, `SELECT pg_terminate_backend($1)`, pid)
			return err
		}
		return f
	}})
}

func pgxFixture(pool, proxied *pgxpool.Pool, proxy *pgproxy.Proxy) inboxtest.Fixture[pgx.Tx] {
	return inboxtest.Fixture[pgx.Tx]{
		Store: inbox.Postgres(proxied), Other: inbox.Postgres(pool), Aborts: true, Guarded: true, LoseCommits: loser(proxy),
		Exec: func(ctx context.Context, tx pgx.Tx, q string, args ...any) error {
			_, err := tx.Exec(ctx, q, args...)
			return err
		},
		Do: func(q string, args ...any) error {
			_, err := pool.Exec(context.Background(), q, args...)
			return err
		},
		Count: func(q string) (n int, err error) { return n, pool.QueryRow(context.Background(), q).Scan(&n) },
		End: func(ctx context.Context, tx pgx.Tx, commit bool) error {
			q := "ROLLBACK"
			if commit {
				q = "COMMIT"
			}
			_, err := tx.Exec(ctx, q)
			return err
		},
		Lose: func(ctx context.Context, tx pgx.Tx) error {
			var pid int
			if err := tx.QueryRow(ctx, `SELECT pg_backend_pid()`).Scan(&pid); err != nil {
				return err
			}
			_, err := pool.Exec(ctx, `SELECT pg_terminate_backend($1)`, pid)
			return err
		},
	}
}

func newPool(t *testing.T, cfg *pgxpool.Config) *pgxpool.Pool {
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}
