package devtest

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
)

// cleanupTimeout bounds what a test's cleanup waits for.
const cleanupTimeout = 20 * time.Second

// Name returns a name that starts with prefix and that no other test has: for
// queues, topics, groups and schemas. It holds lower-case letters, digits and "_".
func Name(prefix string) string {
	var b [6]byte
	_, _ = rand.Read(b[:]) // never fails
	return prefix + "_" + hex.EncodeToString(b[:])
}

// PostgresSchema makes a fresh schema and returns a URL whose connections have it
// as their search_path. The schema is dropped with everything in it when the test
// ends.
func PostgresSchema(t testing.TB) string {
	t.Helper()
	return schemaIn(t, PostgresURL(t))
}

// Postgres returns a pool of at most 10 connections in a fresh schema. Pool and
// schema go when the test ends.
func Postgres(t testing.TB) *pgxpool.Pool {
	t.Helper()
	return PostgresPool(t, 10)
}

// PostgresPool is [Postgres] with another size and changes to the pool's
// configuration.
func PostgresPool(t testing.TB, maxConns int32, edit ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	return Pool(t, PostgresSchema(t), maxConns, edit...)
}

// Pool returns a pool on url, for example a second one on the schema of a
// [PostgresSchema]. It is closed when the test ends; a connection that the test
// never gave back fails it.
func Pool(t testing.TB, url string, maxConns int32, edit ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(url)
	require.NoError(t, err)
	cfg.MaxConns = maxConns
	for _, e := range edit {
		e(cfg)
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(func() {
		done := make(chan struct{})
		go func() { pool.Close(); close(done) }()
		select {
		case <-done:
		case <-time.After(cleanupTimeout):
			t.Errorf("pool not closed after %s: %d connections were never given back", cleanupTimeout, pool.Stat().AcquiredConns())
		}
	})
	return pool
}

// schemaIn makes a fresh schema on the server of base.
func schemaIn(t testing.TB, base string) string {
	t.Helper()
	name := Name("t")
	exec := func(ctx context.Context, sql string) error {
		c, err := pgx.Connect(ctx, base)
		if err != nil {
			return err
		}
		defer c.Close(ctx) //nolint:errcheck // nothing is in flight
		_, err = c.Exec(ctx, sql)
		return err
	}
	require.NoError(t, exec(t.Context(), "CREATE SCHEMA "+name))
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), cleanupTimeout)
		defer cancel()
		if err := exec(ctx, "DROP SCHEMA IF EXISTS "+name+" CASCADE"); err != nil {
			t.Logf("schema %s was not dropped: %v", name, err)
		}
	})
	return withSearchPath(t, base, name)
}

// withSearchPath adds search_path to a URL or a keyword/value connection string.
func withSearchPath(t testing.TB, base, schema string) string {
	t.Helper()
	if !strings.Contains(base, "://") {
		return base + " search_path=" + schema
	}
	u, err := url.Parse(base)
	require.NoError(t, err)
	q := u.Query()
	q.Set("search_path", schema)
	u.RawQuery = q.Encode()
	return u.String()
}
