package main

import (
	"bytes"
	"encoding/json"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/internal/demo"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
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

func TestMigrateAndStatus(t *testing.T) {
	t.Parallel()
	for name, at := range map[string][]string{
		"sqlite": {"--sqlite", filepath.Join(t.TempDir(), "a.db")},
	} {
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
			require.JSONEq(t, `{"consumers":[],"outbox_waiting":0,"outbox_parked":0,"relays":0}`, out)
		})
	}
}

func TestExitCodes(t *testing.T) {
	t.Setenv("DATABASE_URL", "")
	for _, c := range []struct {
		want int
		args []string
	}{
		{0, []string{"migrate", "print", "--dialect", "sqlite"}},
		{1, []string{"migrate", "check", "--sqlite", filepath.Join(t.TempDir(), "empty.db")}},
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
