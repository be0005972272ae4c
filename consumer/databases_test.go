package consumer_test

import (
	"context"
	"database/sql"
	"errors"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/consumer"
	"github.com/twiceproof/twiceproof/inbox"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
	"github.com/twiceproof/twiceproof/internal/sqldb"
	"github.com/twiceproof/twiceproof/migrations"
)

// database is a store with the effects that handlers write, hiding its Tx type.
type database struct {
	name  string
	query func(t *testing.T, sql string) int
	do    func(t *testing.T, sql string)
	store any  // inbox.Store of its Tx
	cut   *cut // what goes wrong between the runner and the store
	// start runs a consumer whose handler inserts an effect and then calls fn.
	start func(t *testing.T, src brokers.Source, cfg consumer.Config, fn handlerFunc) *running
}

type handlerFunc func(ctx context.Context, exec func(sql string, args ...any) error, m *consumer.Message) error

type running struct {
	*consumer.Runner
	stop func() error
}

const effects = `CREATE TABLE effects (seq BIGINT, id TEXT, key TEXT, n INTEGER)`

// cut makes every call of a store fail while it is down.
type cut struct {
	down  atomic.Bool
	next  atomic.Bool  // down from the next claim on: something has been received then
	calls atomic.Int64 // that failed
	// take, if set, stands between the runner and TakeHeads.
	take func(ctx context.Context, take func(context.Context) ([]*inbox.Head, error)) ([]*inbox.Head, error)
}

var errCut = errors.New("connection refused")

func (c *cut) err() error {
	if c.down.Load() {
		c.calls.Add(1)
		return errCut
	}
	return nil
}

type cutStore[Tx any] struct {
	inbox.Store[Tx]
	*cut
}

func (s cutStore[Tx]) SingleWriter() bool {
	sw, ok := s.Store.(interface{ SingleWriter() bool })
	return ok && sw.SingleWriter()
}

func (s cutStore[Tx]) Begin(ctx context.Context, u inbox.Unit) (inbox.Attempt[Tx], []inbox.Verdict, error) {
	if s.next.CompareAndSwap(true, false) {
		s.down.Store(true)
	}
	if err := s.err(); err != nil {
		return nil, nil, err
	}
	return s.Store.Begin(ctx, u)
}

func (s cutStore[Tx]) Record(ctx context.Context, u inbox.Unit, os ...inbox.Outcome[Tx]) ([]inbox.Verdict, error) {
	if err := s.err(); err != nil {
		return nil, err
	}
	return s.Store.Record(ctx, u, os...)
}

func (s cutStore[Tx]) TakeHeads(ctx context.Context, q inbox.HeadQuery) ([]*inbox.Head, error) {
	if err := s.err(); err != nil {
		return nil, err
	}
	take := func(ctx context.Context) ([]*inbox.Head, error) { return s.Store.TakeHeads(ctx, q) }
	if s.take != nil {
		return s.take(ctx, take)
	}
	return take(ctx)
}

func (s cutStore[Tx]) BeginRetry(ctx context.Context, h *inbox.Head, u inbox.Unit) (inbox.Attempt[Tx], error) {
	if err := s.err(); err != nil {
		return nil, err
	}
	return s.Store.BeginRetry(ctx, h, u)
}

func (s cutStore[Tx]) Check(ctx context.Context) error {
	return errors.Join(s.err(), s.Store.Check(ctx))
}

func launch[Tx any](t *testing.T, store inbox.Store[Tx], c *cut, src brokers.Source, cfg consumer.Config, h consumer.Handler[Tx]) *running {
	s := cutStore[Tx]{store, c}
	if cfg.Name == "" {
		cfg.Name = t.Name()
	}
	r, err := consumer.New[Tx](s, src, h, cfg)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	stop := sync.OnceValue(func() error { cancel(); return <-done })
	t.Cleanup(func() { require.NoError(t, stop()) })
	return &running{r, stop}
}

func sqlite(t *testing.T) database { return onSQLite(t, sqliteHandle(t)) }

func sqliteHandle(t *testing.T) *sql.DB {
	dsn := "file:" + filepath.Join(t.TempDir(), "t.db") + "?_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)&_txlock=immediate"
	db, err := sql.Open("sqlite", dsn)
	require.NoError(t, err)
	db.SetMaxOpenConns(1)
	t.Cleanup(func() { db.Close() })
	_, err = migrations.Up(t.Context(), migrations.SQLDB(db, migrations.SQLite))
	require.NoError(t, err)
	_, err = db.Exec(effects)
	require.NoError(t, err)
	return db
}

func onSQLite(_ *testing.T, db *sql.DB) database {
	c := &cut{}
	return database{"sqlite", sqlQuery(db), sqlDo(db), inbox.SQLite(db), c, func(t *testing.T, src brokers.Source, cfg consumer.Config, fn handlerFunc) *running {
		return launch[*sql.Tx](t, inbox.SQLite(db), c, src, cfg, sqlHandler(fn))
	}}
}

func sqlQuery(db *sql.DB) func(t *testing.T, q string) int {
	return func(t *testing.T, q string) (n int) {
		require.NoError(t, db.QueryRow(q).Scan(&n))
		return n
	}
}

func sqlDo(db *sql.DB) func(t *testing.T, q string) {
	return func(t *testing.T, q string) {
		_, err := db.Exec(q)
		require.NoError(t, err)
	}
}

func sqlHandler(fn handlerFunc) consumer.Handler[*sql.Tx] {
	return func(ctx context.Context, tx *sql.Tx, m *consumer.Message) error {
		return fn(ctx, func(q string, args ...any) error {
			_, err := tx.ExecContext(ctx, sqldb.SQLite.SQL(q, ""), args...)
			return err
		}, m)
	}
}

func postgres(t *testing.T) database {
	pool := devtest.PostgresPool(t, 20)
	return onPool(t, pool, pool)
}

// onPool is a database whose runners use pool, and whose test uses direct.
func onPool(t *testing.T, direct, pool *pgxpool.Pool) database {
	_, err := migrations.Up(t.Context(), migrations.Pool(direct))
	require.NoError(t, err)
	_, err = direct.Exec(t.Context(), effects)
	require.NoError(t, err)
	query := func(t *testing.T, q string) (n int) {
		require.NoError(t, direct.QueryRow(context.WithoutCancel(t.Context()), q).Scan(&n))
		return n
	}
	do := func(t *testing.T, q string) {
		_, err := direct.Exec(context.WithoutCancel(t.Context()), q)
		require.NoError(t, err)
	}
	c := &cut{}
	return database{"postgres", query, do, inbox.Postgres(pool), c, func(t *testing.T, src brokers.Source, cfg consumer.Config, fn handlerFunc) *running {
		return launch[pgx.Tx](t, inbox.Postgres(pool), c, src, cfg, func(ctx context.Context, tx pgx.Tx, m *consumer.Message) error {
			return fn(ctx, func(q string, args ...any) error {
				_, err := tx.Exec(ctx, q, args...)
				return err
			}, m)
		})
	}}
}

func postgresDB(t *testing.T) database {
	pool := devtest.PostgresPool(t, 20)
	_, err := migrations.Up(t.Context(), migrations.Pool(pool))
	require.NoError(t, err)
	db := stdlib.OpenDBFromPool(pool)
	db.SetMaxOpenConns(18)
	t.Cleanup(func() { db.Close() })
	_, err = db.Exec(effects)
	require.NoError(t, err)
	c := &cut{}
	return database{"postgresdb", sqlQuery(db), sqlDo(db), inbox.PostgresDB(db), c, func(t *testing.T, src brokers.Source, cfg consumer.Config, fn handlerFunc) *running {
		return launch[*sql.Tx](t, inbox.PostgresDB(db), c, src, cfg, func(ctx context.Context, tx *sql.Tx, m *consumer.Message) error {
			return fn(ctx, func(q string, args ...any) error {
				_, err := tx.ExecContext(ctx, q, args...)
				return err
			}, m)
		})
	}}
}

func onAll(t *testing.T, test func(t *testing.T, db database)) {
	t.Run("postgresdb", func(t *testing.T) { t.Parallel(); test(t, postgresDB(t)) })
	t.Run("sqlite", func(t *testing.T) { t.Parallel(); test(t, sqlite(t)) })
	t.Run("postgres", func(t *testing.T) { t.Parallel(); test(t, postgres(t)) })
}

func newPool(t *testing.T, cfg *pgxpool.Config) *pgxpool.Pool {
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

func newPoolFromURL(t *testing.T, url string) *pgxpool.Pool {
	cfg, err := pgxpool.ParseConfig(url)
	require.NoError(t, err)
	cfg.MaxConns = 12
	return newPool(t, cfg)
}
