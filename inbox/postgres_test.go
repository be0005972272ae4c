package inbox_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/inbox"
	"github.com/twiceproof/twiceproof/inbox/inboxtest"
	"github.com/twiceproof/twiceproof/internal/pgproxy"
)

// jackc/pgx#602, riverqueue/river#205: poolers in transaction mode know neither
// prepared statements nor session settings. The whole suite passes without them.
func TestConformanceWithoutPreparedStatements(t *testing.T) {
	t.Parallel()
	for name, mode := range map[string]pgx.QueryExecMode{"exec": pgx.QueryExecModeExec, "simple": pgx.QueryExecModeSimpleProtocol} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inboxtest.Run(t, inboxtest.Config[pgx.Tx]{Expected: "testdata/conformance-postgres.txt", New: func(t *testing.T) inboxtest.Fixture[pgx.Tx] {
				direct := pgPool(t)
				cfg := direct.Config()
				cfg.ConnConfig.DefaultQueryExecMode = mode
				pool := newPool(t, cfg)
				proxied, proxy := pgproxy.Between(t, pool)
				return pgxFixture(pool, proxied, proxy)
			}})
		})
	}
}

// bytebase/bytebase#20336: a migration while consumers run makes prepared plans stale.
func TestMigrationWhileClaimsArePreparedCostsOneRun(t *testing.T) {
	t.Parallel()
	pool := pgPool(t)
	s := inbox.Postgres(pool)
	_, err := pool.Exec(t.Context(), `DROP VIEW inbox`)
	require.NoError(t, err)
	for id, typ := range map[string]string{"1": "integer", "2": "bigint", "3": "smallint"} {
		_, err := inbox.Once(t.Context(), s, "c", "before "+id, func(context.Context, pgx.Tx) error { return nil })
		require.NoError(t, err)
		_, err = pool.Exec(t.Context(), `ALTER TABLE processed_messages ALTER COLUMN state TYPE `+typ)
		require.NoError(t, err)
		for range 10 { // one for each connection that has the old plan, at most
			_, err = inbox.Once(t.Context(), s, "c", id, func(context.Context, pgx.Tx) error { return nil })
			if err == nil {
				break
			}
		}
		require.NoError(t, err)
	}
}

// pgpartman/pg_partman#284: a table partitioned by time accepts one ID twice.
func TestUniqueKeyWithATimeInItIsRefused(t *testing.T) {
	t.Parallel()
	pool := pgPool(t)
	s := inbox.Postgres(pool)
	require.NoError(t, s.Check(t.Context()))
	_, err := pool.Exec(t.Context(), `ALTER TABLE processed_messages DROP CONSTRAINT processed_messages_pkey, ADD PRIMARY KEY (consumer_id, message_id, processed_at)`)
	require.NoError(t, err)
	require.ErrorContains(t, s.Check(t.Context()), "could be processed twice")
	// A layout by hash keeps the key.
	_, err = pool.Exec(t.Context(), `DROP VIEW inbox; DROP TABLE processed_messages; CREATE TABLE processed_messages (processed_at timestamptz NOT NULL DEFAULT now(),
		consumer_id smallint NOT NULL, state smallint NOT NULL DEFAULT 0, message_id text COLLATE "C" NOT NULL, fp bytea, reason text,
		PRIMARY KEY (consumer_id, message_id)) PARTITION BY HASH (message_id);
		CREATE TABLE processed_messages_0 PARTITION OF processed_messages FOR VALUES WITH (MODULUS 1, REMAINDER 0)`)
	require.NoError(t, err)
	require.NoError(t, s.Check(t.Context()))
	for _, want := range []inbox.Verdict{inbox.Claimed, inbox.Duplicate} {
		v, err := inbox.Once(t.Context(), s, "c", "1", func(context.Context, pgx.Tx) error { return nil })
		require.NoError(t, err)
		require.Equal(t, want, v)
	}
}
