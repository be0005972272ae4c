package main

import (
	"database/sql"
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
)

func findings(t *testing.T, at []string) (map[string]finding, error) {
	t.Helper()
	out, err := command(t, append([]string{"doctor", "--json"}, at...)...)
	var fs []finding
	require.NoError(t, json.Unmarshal([]byte(out), &fs), "%s %v", out, err)
	by := map[string]finding{}
	for _, f := range fs {
		by[f.What] = f
		if f.Level != levelOK {
			require.NotEmpty(t, f.Do, "%+v: it says what to do", f)
		}
	}
	return by, err
}

func TestDoctor(t *testing.T) {
	for name, at := range places(t) {
		t.Run(name, func(t *testing.T) {
			fs, err := findings(t, at)
			require.ErrorIs(t, err, errUnwell)
			require.Equal(t, levelFail, fs["tables"].Level)
			_, err = command(t, append([]string{"migrate", "up"}, at...)...)
			require.NoError(t, err)
			fs, err = findings(t, at)
			require.NoError(t, err)
			for what, f := range fs {
				if what != "connections" && what != "long transactions" && what != "idle in transaction" && what != "synchronous_commit" && what != "inactive replication slots" {
					require.Equal(t, levelOK, f.Level, "%+v", f)
				}
			}
			fill(t, at)
			fs, err = findings(t, at)
			require.NoError(t, err)
			require.Equal(t, levelWarn, fs["held"].Level)
			require.Contains(t, fs["held"].Found, "3, of which 1 dead")
			require.Equal(t, levelOK, fs["outbox"].Level, "it has waited for a moment only")
			out, err := command(t, append([]string{"doctor"}, at...)...)
			require.NoError(t, err)
			require.Contains(t, out, "held list --groups")
		})
	}
}

// What a doctor is for: each of these is wrong.
func TestDoctorFindsWhatIsWrong(t *testing.T) {
	devtest.PostgresURL(t)
	at := places(t)["postgres"]
	_, err := command(t, append([]string{"migrate", "up"}, at...)...)
	require.NoError(t, err)
	fill(t, at)
	db, err := sql.Open("pgx", at[1])
	require.NoError(t, err)
	defer db.Close()
	s := at[3] + "."
	for _, q := range []string{
		`UPDATE ` + s + `outbox_messages SET created_at = now() - interval '1 hour'`,
		`UPDATE ` + s + `held_messages SET due_at = now() - interval '2 hours' WHERE due_at IS NOT NULL`,
		`INSERT INTO ` + s + `inbox_retention (consumer_id, window_us, since) SELECT id, 3600000000, now() - interval '3 days' FROM ` + s + `inbox_consumers`,
		`UPDATE ` + s + `held_messages SET updated_at = now() - interval '1 hour', due_at = NULL, order_key = 'alone', dead = false WHERE reason = 'dead'`,
	} {
		_, err := db.Exec(q)
		require.NoError(t, err, q)
	}
	fs, err := findings(t, at)
	require.ErrorIs(t, err, errUnwell)
	require.Equal(t, levelFail, fs["outbox"].Level)
	require.Equal(t, levelFail, fs["due"].Level)
	require.Equal(t, levelWarn, fs["turns"].Level)
	require.Equal(t, levelWarn, fs["retention of billing"].Level)
}
