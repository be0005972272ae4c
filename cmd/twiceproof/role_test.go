package main

import (
	"database/sql"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
	"github.com/twiceproof/twiceproof/outbox"
)

// The rights that docs/operations.md asks for are enough, for every command.
func TestRoleForPeopleOnCall(t *testing.T) {
	devtest.PostgresURL(t)
	at := places(t)["postgres"]
	owner := heldPlace(t, at)
	db, err := sql.Open("pgx", at[1])
	require.NoError(t, err)
	defer db.Close()
	w := outbox.PostgresDB(db, outbox.Schema(at[3]))
	tx, err := db.BeginTx(t.Context(), nil)
	require.NoError(t, err)
	require.NoError(t, w.Enqueue(t.Context(), tx, &brokers.Message{ID: "o1", Topic: "t"}, &brokers.Message{ID: "o2", Topic: "t"}))
	require.NoError(t, tx.Commit())
	role, schema := devtest.Name("oncall"), at[3]
	exec := func(q string) {
		_, err := db.Exec(strings.NewReplacer("{s}", schema, "{r}", role).Replace(q))
		require.NoError(t, err)
	}
	exec(`UPDATE {s}.outbox_messages SET parked = true`)
	exec(`CREATE ROLE {r} LOGIN`)
	t.Cleanup(func() {
		d, err := sql.Open("pgx", at[1])
		require.NoError(t, err)
		defer d.Close()
		for _, q := range []string{`DROP OWNED BY ` + role, `DROP ROLE ` + role} {
			_, err = d.Exec(q)
			require.NoError(t, err)
		}
	})
	for _, q := range []string{`USAGE ON SCHEMA {s}`, `SELECT ON ALL TABLES IN SCHEMA {s}`, `INSERT, UPDATE, DELETE ON {s}.held_messages`,
		`INSERT, UPDATE ON {s}.processed_messages`, `UPDATE, DELETE ON {s}.outbox_messages`, `INSERT ON {s}.twiceproof_audit`} {
		exec(`GRANT ` + q + ` TO {r}`)
	}
	reader := strings.Replace(at[1], "://", "://"+role+"@", 1)
	reader = strings.Replace(reader, role+"@postgres@", role+"@", 1)
	hs := heldList(t, owner)
	no := func(i int) string { return strconv.FormatInt(hs[i].Seq, 10) }
	body := filepath.Join(t.TempDir(), "body")
	require.NoError(t, os.WriteFile(body, []byte("{}"), 0o600))
	for _, args := range [][]string{
		{"status"}, {"migrate", "check"}, {"held", "list", "--groups"}, {"held", "show", no(0)}, {"held", "export"},
		{"held", "replay", no(0), "--yes"}, {"held", "edit", no(1), "--new-id", "mended", "--payload-file", body, "--yes"},
		{"held", "discard", no(2), "--comment", "x", "--yes"}, {"outbox", "list"},
		{"outbox", "retry", "--id", "o1", "--yes"}, {"outbox", "discard", "--id", "o2", "--comment", "x", "--yes"},
	} {
		_, err := command(t, append(args, "--database-url", reader, "--schema", schema)...)
		require.NoError(t, err, "%v", args)
	}
	var n int
	require.NoError(t, db.QueryRow(`SELECT count(*) FROM `+schema+`.twiceproof_audit`).Scan(&n))
	require.Equal(t, 5, n)
}
