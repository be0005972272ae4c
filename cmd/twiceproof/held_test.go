package main

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/base64"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/inbox"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
	"github.com/twiceproof/twiceproof/internal/sqldb"
)

// heldPlace is a migrated database with held messages: "1" to "3" of key k dead, the
// last of them binary, and "free" dead without a key.
func heldPlace(t *testing.T, at []string) func(args ...string) (string, error) {
	t.Helper()
	run := func(args ...string) (string, error) { return command(t, append(args, at...)...) }
	_, err := run("migrate", "up")
	require.NoError(t, err)
	f := databaseFlags{}
	if at[0] == "--sqlite" {
		f.sqlite = at[1]
	} else {
		f.url, f.schema = at[1], at[3]
	}
	db, d, err := f.open(t.Context())
	require.NoError(t, err)
	defer db.Close()
	s := inbox.SQLite(db)
	if d == sqldb.Postgres {
		s = inbox.PostgresDB(db, inbox.Schema(f.schema))
	}
	for _, m := range []*brokers.Message{
		{ID: "1", Key: "k", Topic: "orders", Type: "order.placed", Payload: []byte(`{"cents": 1}`), Headers: brokers.Headers{{Key: "trace", Value: []byte("abc")}}},
		{ID: "2", Key: "k", Topic: "orders", Payload: []byte("\x1b[2Jevil\xff")},
		{ID: "3", Key: "k", Topic: "orders"},
		{ID: "free", Topic: "orders", Payload: []byte("{}")},
	} {
		it, err := inbox.NewItem(m, "orders/0@"+m.ID, inbox.OrderKey(m.Key))
		require.NoError(t, err)
		_, err = s.Record(t.Context(), inbox.Unit{Consumer: "billing", Items: []*inbox.Item{it}}, inbox.Outcome[*sql.Tx]{Item: it, Reason: inbox.ReasonDead, Dead: true,
			Attempts: 10, Failure: inbox.Failure{Class: "handler", Text: "no currency\nin the order", Stack: "main.go:17"}})
		require.NoError(t, err)
	}
	return run
}

func heldList(t *testing.T, run func(args ...string) (string, error), args ...string) []heldJSON {
	t.Helper()
	out, err := run(append([]string{"held", "list", "--json"}, args...)...)
	require.NoError(t, err)
	var hs []heldJSON
	require.NoError(t, json.Unmarshal([]byte(out), &hs))
	return hs
}

func TestHeldCommands(t *testing.T) {
	for name, at := range places(t) {
		t.Run(name, func(t *testing.T) {
			run := heldPlace(t, at)
			hs := heldList(t, run, "--consumer", "billing", "--dead", "--class", "handler", "--reason", "dead", "--newer-than", "1h")
			require.Len(t, hs, 4)
			no := func(i int) string { return strconv.FormatInt(hs[i].Seq, 10) }
			require.Len(t, heldList(t, run, "--key", "k"), 3)
			require.Len(t, heldList(t, run, "--key", ""), 1)
			require.Len(t, heldList(t, run, "--id", "2"), 1)
			require.Len(t, heldList(t, run, "--after", no(1)), 2)
			require.Empty(t, heldList(t, run, "--waiting"))

			out, err := run("held", "list", "--limit", "2")
			require.NoError(t, err)
			require.Contains(t, out, "no currency")
			require.Contains(t, out, "--after "+no(1))
			out, err = run("held", "list", "--groups")
			require.NoError(t, err)
			require.Contains(t, out, "mend the cause")
			require.Regexp(t, `(?m)^4 `, out)

			out, err = run("held", "show", no(0))
			require.NoError(t, err)
			for _, want := range []string{"order.placed", `{"cents": 1}`, "in the order", "main.go:17", "orders/0@1", "header trace"} {
				require.Contains(t, out, want)
			}
			out, err = run("held", "show", no(1))
			require.NoError(t, err)
			require.NotContains(t, out, "\x1b", "what a message holds steers no terminal")
			require.Contains(t, out, base64.StdEncoding.EncodeToString([]byte("\x1b[2Jevil\xff")))
			out, err = run("held", "show", no(2))
			require.NoError(t, err)
			require.Contains(t, out, "tombstone")

			out, err = run("held", "export", "--dead")
			require.NoError(t, err)
			lines := strings.Split(strings.TrimSpace(out), "\n")
			require.Len(t, lines, 4)
			var second heldJSON
			require.NoError(t, json.Unmarshal([]byte(lines[1]), &second))
			require.Equal(t, []byte("\x1b[2Jevil\xff"), second.Message.PayloadBase64)

			out, err = run("held", "replay", "--consumer", "billing", "--dry-run")
			require.NoError(t, err)
			require.Contains(t, out, "4 would be chosen")
			require.Len(t, heldList(t, run, "--dead"), 4)
			_, err = run("held", "replay", no(0))
			require.ErrorContains(t, err, "--yes")

			body := filepath.Join(t.TempDir(), "body.json")
			require.NoError(t, os.WriteFile(body, []byte(`{"cents": 1, "currency": "EUR"}`), 0o600))
			_, err = run("held", "edit", no(0), "--new-id", "1", "--payload-file", body, "--yes")
			require.ErrorIs(t, err, inbox.ErrIDTaken)
			out, err = run("held", "edit", no(0), "--new-id", "1-mended", "--payload-file", body, "--comment", "no currency", "--yes", "--json")
			require.NoError(t, err)
			require.JSONEq(t, `{"action":"edit","dry_run":false,"chosen":1,"done":1,"gone":0,"refused":0,"running":0,"left":0}`, out)
			edited := heldList(t, run, "--id", "1-mended")[0]
			require.Equal(t, "1", edited.EditedFrom)
			require.False(t, edited.Dead)

			out, err = run("held", "replay", no(1), no(2), "--yes", "--json", "--rate", "0")
			require.NoError(t, err)
			require.JSONEq(t, `{"action":"replay","dry_run":false,"chosen":2,"done":2,"gone":0,"refused":0,"running":0,"left":0}`, out)
			require.True(t, heldList(t, run, "--id", "2")[0].Waiting)
			_, err = run("held", "discard", no(3), "--yes")
			require.ErrorContains(t, err, "--comment")
			out, err = run("held", "discard", no(3), "--comment", "a test", "--yes")
			require.NoError(t, err)
			require.Contains(t, out, "1 done")
			require.Empty(t, heldList(t, run, "--dead"))
		})
	}
}

func TestHeldCommandsWithBadInput(t *testing.T) {
	for name, at := range places(t) {
		t.Run(name, func(t *testing.T) {
			_, err := command(t, append([]string{"held", "list"}, at...)...)
			require.ErrorContains(t, err, "migrate up")
			run := heldPlace(t, at)
			var usage usageError
			for _, args := range [][]string{
				{"held", "show"}, {"held", "show", "abc"}, {"held", "show", "-1"}, {"held", "replay"}, {"held", "replay", "1", "--rate", "-1"}, {"held", "list", "--limit", "0"},
				{"held", "list", "--dead", "--waiting"}, {"held", "discard", "--dead"}, {"held", "edit", "1"}, {"held", "edit", "1", "--new-id", "x", "--set-header", "novalue"},
				{"held", "edit", "1", "--new-id", "x", "--payload-file", "-"}, {"held", "show", "1", "--json", "--payload"}, {"held", "list", "--older-than", "-1h"}, {"held", "list", "x"}, {"held", "list", "--nonsense"},
				{"outbox", "retry"}, {"outbox", "show", "x"}, {"outbox", "discard", "1"},
			} {
				_, err := run(args...)
				require.True(t, errors.As(err, &usage), "%v: %v", args, err)
			}
			for _, c := range []struct {
				args []string
				want error
			}{
				{[]string{"held", "show", "12345"}, inbox.ErrNotHeld},
				{[]string{"held", "replay", "12345", "--yes"}, inbox.ErrNotHeld},
				{[]string{"held", "replay", "1", "12345", "--yes"}, inbox.ErrNotHeld},
				{[]string{"held", "replay", "--consumer", "nobody", "--yes"}, errNothing},
				{[]string{"held", "discard", "--consumer", "nobody", "--comment", "x", "--yes"}, errNothing},
				{[]string{"outbox", "retry", "--topic", "none", "--yes"}, errNothing},
			} {
				_, err := run(c.args...)
				require.ErrorIs(t, err, c.want, "%v", c.args)
			}
			require.Len(t, heldList(t, run, "--dead"), 4, "nothing was changed")
		})
	}
}

// What an interrupted replay has done is done whole, and the command can be given again.
func TestInterruptedReplayLeavesNothingHalfDone(t *testing.T) {
	at := []string{"--sqlite", filepath.Join(t.TempDir(), "a.db")}
	run := heldPlace(t, at)
	var out bytes.Buffer
	ctx, cancel := context.WithCancel(t.Context())
	root := newRootCommand()
	root.SetArgs(append([]string{"held", "replay", "--consumer", "billing", "--yes", "--json", "--in-flight", "1", "--rate", "0"}, at...))
	root.SetOut(&out)
	done := make(chan error, 1)
	go func() { done <- root.ExecuteContext(ctx) }()
	// One is replayed and nobody runs it, so that it waits.
	require.Eventually(t, func() bool { return len(heldList(t, run, "--waiting")) == 1 }, patience, patienceStep)
	cancel()
	require.ErrorContains(t, <-done, "interrupted")
	require.JSONEq(t, `{"action":"replay","dry_run":false,"chosen":4,"done":1,"gone":0,"refused":0,"running":0,"left":3}`, out.String())
	require.Len(t, heldList(t, run, "--dead"), 3)
	_, err := run("held", "replay", "--dead", "--yes")
	require.NoError(t, err)
	require.Empty(t, heldList(t, run, "--dead"))
}

func TestHeldCommandsWithoutPermission(t *testing.T) {
	devtest.PostgresURL(t)
	at := places(t)["postgres"]
	run := heldPlace(t, at)
	no := strconv.FormatInt(heldList(t, run)[0].Seq, 10)
	db, err := sql.Open("pgx", at[1])
	require.NoError(t, err)
	defer db.Close()
	role := devtest.Name("reader")
	for _, q := range []string{`CREATE ROLE ` + role + ` LOGIN`, `GRANT USAGE ON SCHEMA ` + at[3] + ` TO ` + role, `GRANT SELECT ON ALL TABLES IN SCHEMA ` + at[3] + ` TO ` + role} {
		_, err := db.Exec(q)
		require.NoError(t, err)
	}
	t.Cleanup(func() {
		d, err := sql.Open("pgx", at[1])
		require.NoError(t, err)
		defer d.Close()
		_, err = d.Exec(`DROP OWNED BY ` + role)
		require.NoError(t, err)
		_, err = d.Exec(`DROP ROLE ` + role)
		require.NoError(t, err)
	})
	reader := strings.Replace(at[1], "://", "://"+role+"@", 1)
	reader = strings.Replace(reader, role+"@postgres@", role+"@", 1)
	_, err = command(t, "held", "replay", no, "--yes", "--database-url", reader, "--schema", at[3])
	require.ErrorContains(t, err, "refuses access")
	require.ErrorContains(t, err, "twiceproof_audit")
	require.Equal(t, exitRefused, exitCode(t.Context(), err))
	require.Len(t, heldList(t, run, "--dead"), 4)
}
