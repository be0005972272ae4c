package consumer_test

import (
	"context"
	"database/sql"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/brokers/memory"
	"github.com/twiceproof/twiceproof/consumer"
	"github.com/twiceproof/twiceproof/inbox"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
	"github.com/twiceproof/twiceproof/migrations"
)

// refused runs a consumer that must not start, and checks that it says what to do and
// has not consumed anything.
func refused[Tx any](t *testing.T, s inbox.Store[Tx], cfg consumer.Config, want ...string) {
	t.Helper()
	b := memory.New(memory.Config{})
	publish(t, b, msg("q", "1", "k", "x"))
	cfg.Name = t.Name()
	r, err := consumer.New(s, b.Source("q"), func(context.Context, Tx, *consumer.Message) error { return nil }, cfg)
	if err == nil {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		err = r.Run(ctx)
		require.Zero(t, r.Stats().Received)
		require.NoError(t, ctx.Err(), "it must not hang")
	}
	require.Error(t, err)
	for _, w := range want {
		require.ErrorContains(t, err, w)
	}
	require.Equal(t, 1, b.Len("q"))
}

func TestDatabaseMistakesAreSaidBeforeAnythingIsConsumed(t *testing.T) {
	t.Parallel()
	pool := devtest.PostgresPool(t, 4)
	with := func(t *testing.T, change func(*pgxpool.Config)) *pgxpool.Pool {
		cfg := pool.Config()
		change(cfg)
		return newPool(t, cfg)
	}
	t.Run("no server", func(t *testing.T) {
		p := with(t, func(c *pgxpool.Config) { c.ConnConfig.Port = 1 })
		refused[pgx.Tx](t, inbox.Postgres(p), consumer.Config{}, "does not answer", "check host and port", "127.0.0.1")
		db := stdlib.OpenDBFromPool(p)
		defer db.Close()
		refused[*sql.Tx](t, inbox.PostgresDB(db), consumer.Config{}, "does not answer")
	})
	t.Run("wrong user", func(t *testing.T) {
		p := with(t, func(c *pgxpool.Config) { c.ConnConfig.User = "nobody_of_that_name" })
		refused[pgx.Tx](t, inbox.Postgres(p), consumer.Config{}, "check user and password", "nobody_of_that_name")
	})
	t.Run("wrong database", func(t *testing.T) {
		p := with(t, func(c *pgxpool.Config) { c.ConnConfig.Database = "no_such_db" })
		refused[pgx.Tx](t, inbox.Postgres(p), consumer.Config{}, "does not exist", "no_such_db")
	})
	t.Run("missing tables", func(t *testing.T) {
		refused[pgx.Tx](t, inbox.Postgres(pool), consumer.Config{}, "twiceproof migrate up")
		db, err := sql.Open("sqlite", "file:"+filepath.Join(t.TempDir(), "t.db"))
		require.NoError(t, err)
		defer db.Close()
		refused[*sql.Tx](t, inbox.SQLite(db), consumer.Config{}, "twiceproof migrate up")
	})
	t.Run("missing schema", func(t *testing.T) {
		refused[pgx.Tx](t, inbox.Postgres(pool, inbox.Schema("nowhere")), consumer.Config{}, "twiceproof migrate up")
	})
	t.Run("read only", func(t *testing.T) {
		p := with(t, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["default_transaction_read_only"] = "on" })
		_, err := migrations.Up(t.Context(), migrations.Pool(pool))
		require.NoError(t, err)
		refused[pgx.Tx](t, inbox.Postgres(p), consumer.Config{}, "read-only", "primary")
	})
	t.Run("no permission", func(t *testing.T) {
		role := devtest.Name("role")
		role = strings.ReplaceAll(role, "-", "_")
		_, err := pool.Exec(t.Context(), `CREATE ROLE "`+role+`" LOGIN`)
		require.NoError(t, err)
		t.Cleanup(func() {
			_, err := pool.Exec(context.Background(), `REVOKE ALL ON SCHEMA `+pgx.Identifier{schemaOf(t, pool)}.Sanitize()+` FROM "`+role+`"; DROP ROLE "`+role+`"`)
			require.NoError(t, err)
		})
		_, err = pool.Exec(t.Context(), `GRANT USAGE ON SCHEMA `+pgx.Identifier{schemaOf(t, pool)}.Sanitize()+` TO "`+role+`"`)
		require.NoError(t, err)
		p := with(t, func(c *pgxpool.Config) { c.ConnConfig.User = role })
		refused[pgx.Tx](t, inbox.Postgres(p), consumer.Config{}, "grant SELECT, INSERT")
	})
	t.Run("pool too small", func(t *testing.T) {
		refused[pgx.Tx](t, inbox.Postgres(pool), consumer.Config{Concurrency: 3}, "pool of 5 connections", "it has 4", "pool_max_conns")
		db := stdlib.OpenDBFromPool(pool)
		defer db.Close()
		refused[*sql.Tx](t, inbox.PostgresDB(db), consumer.Config{Concurrency: 17}, "SetMaxOpenConns(19)")
	})
}

func schemaOf(t *testing.T, pool *pgxpool.Pool) (name string) {
	require.NoError(t, pool.QueryRow(context.Background(), `SELECT current_schema()`).Scan(&name))
	return name
}

func TestSourceMistakesAreSaidBeforeAnythingIsConsumed(t *testing.T) {
	t.Parallel()
	db := sqlite(t)
	strict := memory.New(memory.Config{Strict: true})
	strict.Queue("q", memory.QueueConfig{})
	run := func(src brokers.Source, cfg consumer.Config) error {
		cfg.Name = t.Name()
		r, err := consumer.New(db.store.(inbox.Store[*sql.Tx]), src, func(context.Context, *sql.Tx, *consumer.Message) error { return nil }, cfg)
		require.NoError(t, err)
		return r.Run(t.Context())
	}
	err := run(strict.Source("nowhere"), consumer.Config{})
	require.ErrorContains(t, err, "nowhere")
	require.Equal(t, brokers.Fatal, brokers.ClassOf(err))

	err = run(strict.Source("q"), consumer.Config{RequireOrder: true})
	require.ErrorContains(t, err, "RequireOrder is set, but this source keeps no order")
	require.ErrorContains(t, err, "single active consumer")

	_, err = consumer.New[*sql.Tx](nil, strict.Source("q"), nil, consumer.Config{})
	require.ErrorContains(t, err, "required")
}

// openingSource never gets through to its broker.
type openingSource struct{ brokers.Source }

func (openingSource) Open(ctx context.Context, _ brokers.OpenOptions) (brokers.Capabilities, error) {
	<-ctx.Done()
	return brokers.Capabilities{}, ctx.Err()
}
func (openingSource) Close(context.Context) error { return nil }

// A stop while starting is a stop like any other; a deadline is worth an error.
func TestStoppingWhileStartingIsNoError(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		end  func(context.Context) (context.Context, context.CancelFunc)
		want error
	}{
		{func(ctx context.Context) (context.Context, context.CancelFunc) {
			ctx, cancel := context.WithCancel(ctx)
			time.AfterFunc(10*time.Millisecond, cancel)
			return ctx, cancel
		}, nil},
		{func(ctx context.Context) (context.Context, context.CancelFunc) {
			return context.WithTimeout(ctx, 10*time.Millisecond)
		}, context.DeadlineExceeded},
	} {
		db, err := sql.Open("sqlite", "file:"+filepath.Join(t.TempDir(), "t.db")+"?_txlock=immediate&_pragma=synchronous(FULL)")
		require.NoError(t, err)
		db.SetMaxOpenConns(1)
		t.Cleanup(func() { db.Close() })
		_, err = migrations.Up(t.Context(), migrations.SQLDB(db, migrations.SQLite))
		require.NoError(t, err)
		r, err := consumer.New(inbox.SQLite(db), openingSource{}, func(context.Context, *sql.Tx, *consumer.Message) error { return nil }, consumer.Config{Name: "starting"})
		require.NoError(t, err)
		ctx, cancel := c.end(t.Context())
		require.ErrorIs(t, r.Run(ctx), c.want)
		cancel()
	}
}
