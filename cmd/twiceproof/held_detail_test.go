package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/inbox"
	"github.com/twiceproof/twiceproof/internal/sqldb"
)

// holdMore holds another dead message in a place.
func holdMore(t *testing.T, at []string, m *brokers.Message, reason string) {
	t.Helper()
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
	it, _ := inbox.NewItem(m, "orders/0@x", nil)
	_, err = s.Record(t.Context(), inbox.Unit{Consumer: "billing", Items: []*inbox.Item{it}}, inbox.Outcome[*sql.Tx]{Item: it, Reason: reason, Dead: true,
		Failure: inbox.Failure{Class: "permanent", Text: "\x1b[31mred\x07"}})
	require.NoError(t, err)
}

// Every byte of a message can be had back from what is printed for machines, and none
// of them reaches a terminal as a control sequence.
func TestShowKeepsBytesAndSparesTheTerminal(t *testing.T) {
	for name, at := range places(t) {
		t.Run(name, func(t *testing.T) {
			run := heldPlace(t, at)
			odd := &brokers.Message{ID: "odd", Topic: "t\xfe", Key: "k\x1b\xfd", Type: "y\xfc", ContentType: "c\xfb\x1b",
				Headers: brokers.Headers{{Key: "h\xfa", Value: []byte("\x1b\xf9")}, {Key: "none"}, {Key: "empty", Value: []byte{}}}, Payload: []byte("a\r\nb\x00\xf8")}
			holdMore(t, at, odd, inbox.ReasonDead)
			h := heldList(t, run, "--id", "odd")[0]
			j := h.Message
			require.Equal(t, []string{odd.Topic, odd.Key, odd.Type, odd.ContentType},
				[]string{string(j.TopicBase64), string(j.KeyBase64), string(j.TypeBase64), string(j.ContentTypeBase64)})
			require.Equal(t, "h\xfa", string(j.Headers[0].KeyBase64))
			require.Equal(t, "\x1b\xf9", string(j.Headers[0].ValueBase64))
			require.Nil(t, j.Headers[1].Value)
			require.Empty(t, *j.Headers[2].Value)
			require.Equal(t, odd.Payload, j.PayloadBase64)
			no := strconv.FormatInt(h.Seq, 10)
			out, err := run("held", "show", no, "--payload")
			require.NoError(t, err)
			require.Equal(t, string(odd.Payload), out)
			for _, args := range [][]string{{"held", "list"}, {"held", "list", "--groups"}, {"held", "show", no}, {"status"}} {
				out, err := run(args...)
				require.NoError(t, err)
				require.NotContains(t, out, "\x1b", "%v", args)
				require.NotContains(t, out, "\x07", "%v", args)
			}
		})
	}
}

func TestEditChangesHeadersAndKeepsTheRest(t *testing.T) {
	for name, at := range places(t) {
		t.Run(name, func(t *testing.T) {
			run := heldPlace(t, at)
			no := strconv.FormatInt(heldList(t, run, "--id", "1")[0].Seq, 10)
			_, err := run("held", "edit", no, "--new-id", "1-b", "--set-header", "tenant=7=7", "--drop-header", "trace", "--yes")
			require.NoError(t, err)
			m := heldList(t, run, "--id", "1-b")[0].Message
			require.Len(t, m.Headers, 1)
			require.Equal(t, "tenant", m.Headers[0].Key)
			require.Equal(t, "7=7", *m.Headers[0].Value)
			require.JSONEq(t, `{"cents": 1}`, *m.Payload)
			require.Equal(t, "order.placed", m.Type)
		})
	}
}

// Of a choice some cannot be run as they are: the others are, and the exit code says so.
func TestReplayOfAllButSomeIsExitCode6(t *testing.T) {
	for name, at := range places(t) {
		t.Run(name, func(t *testing.T) {
			run := heldPlace(t, at)
			holdMore(t, at, &brokers.Message{Topic: "orders"}, inbox.ReasonNoID)
			out, err := run("held", "replay", "--dead", "--yes", "--json", "--rate", "0")
			require.ErrorIs(t, err, errPartly)
			require.Equal(t, exitPartly, exitCode(t.Context(), err))
			var c changed
			require.NoError(t, json.Unmarshal([]byte(out), &c))
			require.Equal(t, 5, c.Chosen)
			require.Equal(t, 4, c.Done)
			require.Equal(t, 1, c.Refused)
			require.Contains(t, strings.Join(c.Errors, " "), "edit it")
		})
	}
}

func TestExitCodesOfHeldCommands(t *testing.T) {
	for name, at := range places(t) {
		t.Run(name, func(t *testing.T) {
			heldPlace(t, at)
			ended, cancel := context.WithCancel(t.Context())
			cancel()
			for _, c := range []struct {
				ctx  context.Context
				want int
				args []string
			}{
				{t.Context(), 0, []string{"held", "list", "--consumer", "nobody"}},
				{t.Context(), exitUsage, []string{"held", "replay"}},
				{t.Context(), exitNothing, []string{"held", "show", "12345"}},
				{t.Context(), exitNothing, []string{"held", "replay", "--consumer", "nobody", "--yes"}},
				{t.Context(), exitNothing, []string{"outbox", "show", "12345"}},
				{ended, exitInterrupted, []string{"held", "replay", "--dead", "--yes"}},
			} {
				require.Equal(t, c.want, run(c.ctx, append(c.args, at...)), "%v", c.args)
			}
		})
	}
	require.Equal(t, exitTables, run(t.Context(), []string{"outbox", "list", "--sqlite", emptyFile(t)}))
}
