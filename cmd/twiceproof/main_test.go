package main

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/inbox"
	"github.com/twiceproof/twiceproof/internal/demo"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
	"github.com/twiceproof/twiceproof/internal/sqldb"
	"github.com/twiceproof/twiceproof/outbox"
)

func command(t *testing.T, args ...string) (string, error) {
	var out bytes.Buffer
	root := newRootCommand()
	root.SetArgs(args)
	root.SetOut(&out)
	err := root.ExecuteContext(t.Context())
	return out.String(), err
}

func checkDemo(t *testing.T, args ...string) {
	out, err := command(t, append([]string{"demo", "--json", "--messages", "60"}, args...)...)
	require.NoError(t, err)
	var r demo.Result
	require.NoError(t, json.Unmarshal([]byte(out), &r))
	require.Equal(t, 60, r.Messages)
	require.Equal(t, 60, r.Effects)
	require.Zero(t, r.Lost)
	require.Zero(t, r.Doubled)
	require.Equal(t, 60, r.NaiveDoubled)
	require.Equal(t, 6000, r.Balance)
	require.Positive(t, r.Crashes)
	require.GreaterOrEqual(t, r.Deliveries, 120)
}

func TestDemoOnMemoryAndSQLite(t *testing.T) { checkDemo(t) }

func TestDemoOnRabbitMQAndPostgres(t *testing.T) {
	devtest.PostgresURL(t)
	devtest.RabbitMQURL(t)
	checkDemo(t, "--broker", "rabbitmq", "--database", "postgres")
}

// emptyFile is an SQLite database with nothing in it.
func emptyFile(t *testing.T) string {
	name := filepath.Join(t.TempDir(), "empty.db")
	require.NoError(t, os.WriteFile(name, nil, 0o600))
	return name
}

// places are databases that commands can be pointed at.
func places(t *testing.T) map[string][]string {
	at := map[string][]string{"sqlite": {"--sqlite", emptyFile(t)}}
	var url string
	t.Run("postgres is there", func(t *testing.T) { url = devtest.PostgresURL(t) })
	if url != "" {
		schema := devtest.Name("cli")
		db, err := sql.Open("pgx", url)
		require.NoError(t, err)
		t.Cleanup(func() {
			_, err := db.Exec(`DROP SCHEMA IF EXISTS ` + sqldb.QuoteIdent(schema) + ` CASCADE`)
			require.NoError(t, err)
			db.Close()
		})
		_, err = db.Exec(`CREATE SCHEMA ` + sqldb.QuoteIdent(schema))
		require.NoError(t, err)
		at["postgres"] = []string{"--database-url", url, "--schema", schema}
	}
	return at
}

func TestMigrateAndStatus(t *testing.T) {
	for name, at := range places(t) {
		t.Run(name, func(t *testing.T) {
			_, err := command(t, append([]string{"migrate", "check"}, at...)...)
			require.ErrorContains(t, err, "table held_messages")
			out, err := command(t, append([]string{"migrate", "up"}, at...)...)
			require.NoError(t, err)
			require.Contains(t, out, "applied 0001_inbox")
			out, err = command(t, append([]string{"migrate", "up"}, at...)...)
			require.NoError(t, err)
			require.Contains(t, out, "nothing to apply")
			_, err = command(t, append([]string{"migrate", "check"}, at...)...)
			require.NoError(t, err)
			out, err = command(t, append([]string{"status", "--json"}, at...)...)
			require.NoError(t, err)
			require.JSONEq(t, `{"consumers":[],"held_groups":[],"outbox":{"waiting":0,"oldest_seconds":0,"parked":0,"relays":0,"parked_groups":[]}}`, out)

			fill(t, at)
			out, err = command(t, append([]string{"status", "--json"}, at...)...)
			require.NoError(t, err)
			var r statusReport
			require.NoError(t, json.Unmarshal([]byte(out), &r))
			require.Len(t, r.Consumers, 1)
			require.Equal(t, 3, r.Consumers[0].Held)
			require.Equal(t, 1, r.Consumers[0].Dead)
			require.Equal(t, 1, r.Consumers[0].Due)
			require.Positive(t, r.Consumers[0].OldestDue)
			require.Len(t, r.Held, 3)
			require.Equal(t, 1, r.Outbox.Waiting)
			out, err = command(t, append([]string{"status"}, at...)...)
			require.NoError(t, err)
			for _, want := range []string{"billing", "downstream is out", "runs again by itself", "waits for an earlier message of its key", "mend the cause, then replay", "no relay is alive"} {
				require.Contains(t, out, want)
			}
		})
	}
}

// fill holds some messages of a consumer, and leaves one in the outbox.
func fill(t *testing.T, at []string) {
	f := databaseFlags{}
	switch at[0] {
	case "--sqlite":
		f.sqlite = at[1]
	default:
		f.url, f.schema = at[1], at[3]
	}
	db, d, err := f.open(t.Context())
	require.NoError(t, err)
	defer db.Close()
	store, out := inbox.SQLite(db), outbox.SQLite(db)
	if d == sqldb.Postgres {
		store, out = inbox.PostgresDB(db, inbox.Schema(f.schema)), outbox.PostgresDB(db, outbox.Schema(f.schema))
	}
	for _, o := range []inbox.Outcome[*sql.Tx]{
		{Reason: inbox.ReasonRetry, Attempts: 1, Failure: inbox.Failure{Class: "handler", Text: "downstream is out"}},
		{Reason: inbox.ReasonBehind},
		{Reason: inbox.ReasonDead, Dead: true, Attempts: 10, Failure: inbox.Failure{Class: "handler", Text: "no such account\nat 12"}},
	} {
		key := "k"
		if o.Dead {
			key = "other"
		}
		o.Item, err = inbox.NewItem(&brokers.Message{ID: "id-" + o.Reason, Topic: "t", Key: key, Payload: []byte("{}")}, "t/0@1", inbox.OrderKey(key))
		require.NoError(t, err)
		_, err = store.Record(t.Context(), inbox.Unit{Consumer: "billing"}, o)
		require.NoError(t, err)
	}
	require.NoError(t, outbox.InTx(t.Context(), out, func(ctx context.Context, tx *sql.Tx) error {
		return out.Enqueue(ctx, tx, &brokers.Message{Topic: "t"})
	}))
}

func TestExitCodes(t *testing.T) {
	t.Setenv("DATABASE_URL", "")
	for _, c := range []struct {
		want int
		args []string
	}{
		{0, []string{"migrate", "print", "--dialect", "sqlite"}},
		{4, []string{"migrate", "check", "--sqlite", emptyFile(t)}},
		{4, []string{"held", "list", "--sqlite", emptyFile(t)}},
		{1, []string{"held", "list", "--sqlite", filepath.Join(t.TempDir(), "mistyped.db")}},
		{2, []string{"nope"}},
		{2, []string{"status", "extra"}},
		{2, []string{"status", "--nope"}},
		{2, []string{"status"}},
		{2, []string{"migrate", "print", "--dialect", "oracle"}},
		{2, []string{"demo", "--broker", "carrier-pigeon"}},
		{2, []string{"demo", "--database", "paper"}},
	} {
		require.Equal(t, c.want, run(t.Context(), c.args), "%v", c.args)
	}
}

const (
	patience     = 10 * time.Second
	patienceStep = 20 * time.Millisecond
)
