package devtest

import (
	"os"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestSchemasAreApartAndGoWithTheirTest(t *testing.T) {
	t.Parallel()
	var first string
	t.Run("first", func(t *testing.T) {
		pool, other := Postgres(t), Postgres(t)
		_, err := pool.Exec(t.Context(), "CREATE TABLE mine (n int)")
		require.NoError(t, err)
		require.NoError(t, pool.QueryRow(t.Context(), "SELECT current_schema()").Scan(&first))
		_, err = other.Exec(t.Context(), "SELECT FROM mine")
		require.ErrorContains(t, err, "does not exist")
	})
	if first == "" {
		t.SkipNow()
	}
	var left int
	require.NoError(t, Postgres(t).QueryRow(t.Context(), "SELECT count(*) FROM pg_namespace WHERE nspname = $1", first).Scan(&left))
	assert.Zero(t, left)
}

func TestPoolsOfOneSchemaShareIt(t *testing.T) {
	t.Parallel()
	url := PostgresSchema(t)
	_, err := Pool(t, url, 1).Exec(t.Context(), "CREATE TABLE mine (n int)")
	require.NoError(t, err)
	_, err = Pool(t, url, 1).Exec(t.Context(), "SELECT FROM mine")
	require.NoError(t, err)
}

func TestSearchPathIsAddedToBothForms(t *testing.T) {
	t.Parallel()
	assert.Equal(t, "postgres://u@h/d?search_path=s&sslmode=disable", withSearchPath(t, "postgres://u@h/d?sslmode=disable", "s"))
	assert.Equal(t, "host=h user=u search_path=s", withSearchPath(t, "host=h user=u", "s"))
}

// A missing service skips with a line, and fails where it is required.
func TestMissingServiceSkipsOrFails(t *testing.T) {
	if os.Getenv("DEVTEST_HELPER") != "" {
		RabbitMQURL(t)
		t.Fatal("not reached")
	}
	t.Parallel()
	for _, tc := range []struct {
		require string
		ok      bool
	}{{"", true}, {"postgres", true}, {"postgres, rabbitmq", false}} {
		cmd := exec.Command(os.Args[0], "-test.run=^TestMissingServiceSkipsOrFails$")
		cmd.Env = append(os.Environ(), "DEVTEST_HELPER=1", "AMQP_URL=", EnvRequire+"="+tc.require)
		out, err := cmd.CombinedOutput()
		if tc.ok {
			require.NoError(t, err, "%s", out)
			assert.Contains(t, string(out), "SKIP rabbitmq: TestMissingServiceSkipsOrFails: AMQP_URL is not set")
		} else {
			require.Error(t, err)
			assert.Contains(t, string(out), "rabbitmq is required by TWICEPROOF_REQUIRE")
		}
	}
}
