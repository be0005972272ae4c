package inbox_test

import (
	"context"
	"database/sql"
	"path/filepath"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/inbox"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
	"github.com/twiceproof/twiceproof/migrations"
)

func item(t *testing.T, id, key, body string) *inbox.Item {
	it, err := inbox.NewItem(&brokers.Message{ID: id, Topic: "t", Key: key, Payload: []byte(body)}, "at/"+id, inbox.OrderKey(key))
	require.NoError(t, err)
	return it
}

// checkUnit: of a unit with every kind of message only the claims that are the
// unit's own stay after the commit.
func checkUnit[Tx any](t *testing.T, s inbox.Store[Tx], count func(q string) int) {
	ctx := t.Context()
	done, err := inbox.Once(ctx, s, "c", "done", func(context.Context, Tx) error { return nil })
	require.NoError(t, err)
	require.Equal(t, inbox.Claimed, done)
	vs, err := s.Record(ctx, inbox.Unit{Consumer: "c"}, inbox.Outcome[Tx]{Item: item(t, "head", "k", "x"), Reason: inbox.ReasonRetry, Attempts: 1})
	require.NoError(t, err)
	require.Equal(t, []inbox.Verdict{inbox.Recorded}, vs)

	u := inbox.Unit{Consumer: "c", Items: []*inbox.Item{
		item(t, "later", "k", "x"), item(t, "new", "", "x"), item(t, "done", "", "x"), item(t, "head", "k", "x"),
		item(t, "new", "", "x"), item(t, "new", "", "other"), item(t, "head", "k", "other"),
	}}
	a, vs, err := s.Begin(ctx, u)
	require.NoError(t, err)
	require.Equal(t, []inbox.Verdict{inbox.Behind, inbox.Claimed, inbox.Duplicate, inbox.Held, inbox.Copy, inbox.Conflict, inbox.Conflict}, vs)
	result, err := a.Commit(ctx)
	require.NoError(t, err)
	require.Equal(t, inbox.CommitYes, result)
	require.Equal(t, 0, count(`SELECT count(*) FROM processed_messages WHERE message_id = 'later'`), "behind, and not to be held by Begin: no claim stays")
	require.Equal(t, 1, count(`SELECT count(*) FROM processed_messages WHERE message_id = 'new' AND state = 0`))
	require.Equal(t, 1, count(`SELECT count(*) FROM held_messages`))

	u.HoldBehind = true
	a, vs, err = s.Begin(ctx, inbox.Unit{Consumer: "c", Items: u.Items[:1], HoldBehind: true})
	require.NoError(t, err)
	require.Nil(t, a)
	require.Equal(t, []inbox.Verdict{inbox.Behind}, vs)
	require.Equal(t, 1, count(`SELECT count(*) FROM held_messages WHERE message_id = 'later' AND reason = 'behind' AND due_at IS NULL`))
	require.Equal(t, 1, count(`SELECT count(*) FROM processed_messages WHERE message_id = 'later' AND state = 1`))
}

func TestUnitOfManyOnSQLite(t *testing.T) {
	t.Parallel()
	db, err := sql.Open("sqlite", "file:"+filepath.Join(t.TempDir(), "t.db")+"?_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)&_txlock=immediate")
	require.NoError(t, err)
	db.SetMaxOpenConns(1)
	t.Cleanup(func() { db.Close() })
	_, err = migrations.Up(t.Context(), migrations.SQLDB(db, migrations.SQLite))
	require.NoError(t, err)
	checkUnit[*sql.Tx](t, inbox.SQLite(db), func(q string) (n int) {
		require.NoError(t, db.QueryRow(q).Scan(&n))
		return n
	})
}

func TestUnitOfManyOnPostgres(t *testing.T) {
	t.Parallel()
	pool := devtest.PostgresPool(t, 4)
	_, err := migrations.Up(t.Context(), migrations.Pool(pool))
	require.NoError(t, err)
	checkUnit[pgx.Tx](t, inbox.Postgres(pool), func(q string) (n int) {
		require.NoError(t, pool.QueryRow(t.Context(), q).Scan(&n))
		return n
	})
}
