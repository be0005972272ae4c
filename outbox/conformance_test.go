package outbox_test

import (
	"context"
	"database/sql"
	"net/url"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite"

	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
	"github.com/twiceproof/twiceproof/internal/tcpproxy"
	"github.com/twiceproof/twiceproof/migrations"
	"github.com/twiceproof/twiceproof/outbox"
	"github.com/twiceproof/twiceproof/outbox/outboxtest"
)

func TestConformance(t *testing.T) {
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		outboxtest.Run(t, outboxtest.Config[pgx.Tx]{New: newPostgres, Expected: "testdata/conformance-postgres.txt"})
	})
	t.Run("postgresdb", func(t *testing.T) {
		t.Parallel()
		outboxtest.Run(t, outboxtest.Config[*sql.Tx]{New: newPostgresDB, Expected: "testdata/conformance-postgresdb.txt"})
	})
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		outboxtest.Run(t, outboxtest.Config[*sql.Tx]{New: newSQLite, Bubble: synctest.Test, Expected: "testdata/conformance-sqlite.txt"})
	})
}

func newPostgres(t *testing.T) outboxtest.Fixture[pgx.Tx] {
	dsn := devtest.PostgresSchema(t)
	pool := devtest.Pool(t, dsn, 8)
	_, err := migrations.Up(t.Context(), migrations.Pool(pool))
	require.NoError(t, err)
	return outboxtest.Fixture[pgx.Tx]{
		Open: func(opts ...outbox.Option) outboxtest.Outbox[pgx.Tx] { return outbox.Postgres(pool, opts...) },
		Exec: func(ctx context.Context, sql string) error { _, err := pool.Exec(ctx, sql); return err },
		Int: func(ctx context.Context, sql string) (n int, err error) {
			return n, pool.QueryRow(ctx, sql).Scan(&n)
		},
		IntTx: func(ctx context.Context, tx pgx.Tx, sql string) (n int, err error) {
			return n, tx.QueryRow(ctx, sql).Scan(&n)
		},
		Concurrent: true,
		Proxied: func() (outboxtest.Outbox[pgx.Tx], outboxtest.Proxy) {
			proxied, p := proxyFor(t, dsn)
			return outbox.Postgres(devtest.Pool(t, proxied, 2)), p
		},
	}
}

func newPostgresDB(t *testing.T) outboxtest.Fixture[*sql.Tx] {
	dsn := devtest.PostgresSchema(t)
	pool := devtest.Pool(t, dsn, 1)
	_, err := migrations.Up(t.Context(), migrations.Pool(pool))
	require.NoError(t, err)
	db := openDB(t, "pgx", dsn, 8)
	f := sqlFixture(db, outbox.PostgresDB)
	f.Concurrent = true
	f.Proxied = func() (outboxtest.Outbox[*sql.Tx], outboxtest.Proxy) {
		proxied, p := proxyFor(t, dsn)
		return outbox.PostgresDB(openDB(t, "pgx", proxied, 2)), p
	}
	return f
}

func newSQLite(t *testing.T) outboxtest.Fixture[*sql.Tx] {
	return sqlFixture(sqliteDB(t), outbox.SQLite)
}

func sqliteDB(t testing.TB) *sql.DB {
	db := openDB(t, "sqlite", "file:"+filepath.Join(t.TempDir(), "t.db")+"?_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)&_pragma=synchronous(NORMAL)&_txlock=immediate", 1)
	_, err := migrations.Up(t.Context(), migrations.SQLDB(db, migrations.SQLite))
	require.NoError(t, err)
	return db
}

func openDB(t testing.TB, driver, dsn string, conns int) *sql.DB {
	db, err := sql.Open(driver, dsn)
	require.NoError(t, err)
	db.SetMaxOpenConns(conns)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	return db
}

func sqlFixture(db *sql.DB, open func(*sql.DB, ...outbox.Option) *outbox.SQLOutbox) outboxtest.Fixture[*sql.Tx] {
	return outboxtest.Fixture[*sql.Tx]{
		Open: func(opts ...outbox.Option) outboxtest.Outbox[*sql.Tx] { return open(db, opts...) },
		Exec: func(ctx context.Context, sql string) error { _, err := db.ExecContext(ctx, sql); return err },
		Int: func(ctx context.Context, sql string) (n int, err error) {
			return n, db.QueryRowContext(ctx, sql).Scan(&n)
		},
		IntTx: func(ctx context.Context, tx *sql.Tx, sql string) (n int, err error) {
			return n, tx.QueryRowContext(ctx, sql).Scan(&n)
		},
	}
}

// proxyFor puts a proxy in front of the server of dsn.
func proxyFor(t *testing.T, dsn string) (string, *tcpproxy.Proxy) {
	cfg, err := pgxpool.ParseConfig(dsn)
	require.NoError(t, err)
	if strings.HasPrefix(cfg.ConnConfig.Host, "/") {
		devtest.Missing(t, "postgres", "DATABASE_URL has no TCP address to put a proxy in front of")
	}
	u, err := url.Parse(dsn)
	require.NoError(t, err)
	p, err := tcpproxy.New(u.Host)
	require.NoError(t, err)
	t.Cleanup(p.Close)
	u.Host = p.Addr()
	return u.String(), p
}
