package chaos

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
)

// crashPoint is a place where the process dies, and what the database holds of the
// victim just after: the proof that it died there and nowhere else.
type crashPoint struct {
	name          string
	fails         int  // runs of the victim that fail
	relayed       bool // the messages come out of the outbox
	effects, held int
	broker        bool // what the broker still has depends on it
}

func crashPoints() []crashPoint {
	return []crashPoint{
		{name: "before the claim", broker: true},
		{name: "after the claim"},
		{name: "after the handler"},
		{name: "before the commit"},
		{name: "after the commit", effects: 1, broker: true},
		{name: "before the settle", effects: 1, broker: true},
		{name: "after the settle", effects: 1, broker: true},
		{name: "before the rollback", fails: 1},
		{name: "between rollback and hold", fails: 1},
		{name: "after the hold", fails: 1, held: 1},
		{name: "before the settle", fails: 1, held: 1, broker: true},
		{name: "retry: start marked", fails: 1, held: 1},
		{name: "retry: transaction begun", fails: 1, held: 1},
		{name: "retry: after the handler", fails: 1, held: 1},
		{name: "retry: before the commit", fails: 1, held: 1},
		{name: "retry: after the commit", fails: 1, effects: 1, broker: true},
		{name: "retry: before the failure is kept", fails: 2, held: 1},
		{name: "retry: after the failure is kept", fails: 2, held: 1},
		{name: "relay: before the publish", relayed: true, broker: true},
		{name: "relay: after the publish, before the mark", relayed: true, broker: true},
	}
}

// A process that is killed at any point leaves the message where somebody finds it
// again, and its effect is there once (Particular/NServiceBus#5842,
// MassTransit/MassTransit#2597 and many others lose or double it at one of these).
func TestKilledAtAnyPointEveryMessageHasOneEffect(t *testing.T) {
	t.Parallel()
	if runtime.GOOS == "windows" {
		devtest.Skip(t, "processes cannot end themselves by SIGKILL here")
	}
	for _, kind := range []string{onSQLite, onPostgres, onPostgresDB, "rabbitmq", "sqs"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			switch kind { // skipped once, not once for each point
			case "rabbitmq":
				devtest.RabbitMQURL(t)
			case "sqs":
				devtest.SQSEndpoint(t)
			}
			if kind != onSQLite {
				devtest.PostgresURL(t)
			}
			for _, p := range crashPoints() {
				if kind == "sqs" && !p.broker { // each waits for a visibility to end
					continue
				}
				name := strings.NewReplacer(" ", "_", ",", "", ":", "").Replace(p.name)
				t.Run(fmt.Sprintf("%s_failing_%d", name, p.fails), func(t *testing.T) {
					t.Parallel()
					testCrash(t, kind, p)
				})
			}
		})
	}
}

func testCrash(t *testing.T, kind string, p crashPoint) {
	c := crashConfig{Database: kind, Topic: "t", Fails: p.fails, Point: p.name, Marker: filepath.Join(t.TempDir(), "died"), Messages: 3}
	var q crashQueue
	switch kind {
	case onSQLite:
		c.DSN = "file:" + filepath.Join(t.TempDir(), "t.db") + "?_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)&_txlock=immediate"
	case "rabbitmq", "sqs":
		q = newCrashQueue(t, kind)
		c.Database, c.Broker = onPostgres, q.endpoint()
		c.Topic = c.Broker.Name
		fallthrough
	default:
		c.DSN = devtest.PostgresSchema(t)
	}
	db, err := openTables(t.Context(), c.Database, c.DSN)
	require.NoError(t, err)
	defer db.shut()
	require.NoError(t, db.prepare(t.Context(), crashEffects))
	ms := []*brokers.Message{
		{ID: victim, Topic: c.Topic, Key: "a", Payload: []byte("1")},
		{ID: "next", Topic: c.Topic, Key: "a", Payload: []byte("2")},
		{ID: "other", Topic: c.Topic, Key: "b", Payload: []byte("3")},
	}
	switch {
	case p.relayed:
		require.NoError(t, db.enqueue(t.Context(), ms...))
	case q != nil:
		publishCrash(t, c.Broker, ms)
	default:
		c.Kept = ms
	}

	out, err := runCrashChild(t, c)
	var exit *exec.ExitError
	require.ErrorAs(t, err, &exit, "the child must not reach its end: %s", out)
	require.Equal(t, "signal: killed", exit.ProcessState.String(), "%s", out)
	marker, err := os.ReadFile(c.Marker)
	require.NoError(t, err)
	require.Equal(t, p.name, string(marker))
	count := func(sql string) int {
		t.Helper()
		n, err := db.number(t.Context(), sql)
		require.NoError(t, err)
		return n
	}
	if p.relayed { // whether the consumer beside it was faster does not matter
		require.Equal(t, 3, count(`SELECT count(*) FROM outbox_messages`), "in the outbox when it died")
	} else {
		require.Equal(t, p.effects, count(`SELECT count(*) FROM effects WHERE id = 'victim'`), "effects when it died")
		require.Equal(t, p.effects+p.held, count(`SELECT count(*) FROM processed_messages WHERE message_id = 'victim'`), "claims when it died")
		require.Equal(t, p.held, count(`SELECT count(*) FROM held_messages WHERE message_id = 'victim'`), "held when it died")
	}

	// The broker delivers again whatever was not settled. A memory broker is gone, so
	// the next one delivers everything again: also what was.
	c.Point = ""
	if q == nil {
		c.Kept = ms
		c.Deliveries = len(ms)
	} else {
		c.Deliveries = q.awaitReturn(t)
	}
	out, err = runCrashChild(t, c)
	require.NoError(t, err, "%s", out)
	for _, m := range ms {
		assert.Equal(t, 1, count(fmt.Sprintf(`SELECT count(*) FROM effects WHERE id = '%s'`, m.ID)), m.ID)
		assert.Equal(t, 1, count(fmt.Sprintf(`SELECT count(*) FROM processed_messages WHERE message_id = '%s' AND state = 0`, m.ID)), m.ID)
	}
	assert.Equal(t, 3, count(`SELECT count(*) FROM processed_messages`))
	assert.Zero(t, count(`SELECT count(*) FROM held_messages`))
	assert.Zero(t, count(`SELECT count(*) FROM outbox_messages`))
	assert.Zero(t, count(`SELECT count(*) FROM effects v, effects n WHERE v.id = 'victim' AND n.id = 'next' AND v.seq > n.seq`), "order of the key")
	if q != nil {
		assert.Zero(t, q.left(t))
	}
}

// runCrashChild runs the test binary as the child and returns what it printed.
func runCrashChild(t *testing.T, c crashConfig) (string, error) {
	t.Helper()
	config, err := json.Marshal(c)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeoutCause(t.Context(), time.Minute, errors.New("the child hangs"))
	defer cancel()
	cmd := exec.CommandContext(ctx, os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"=crash", childConfigEnv+"="+string(config))
	out, err := cmd.CombinedOutput()
	require.NoError(t, context.Cause(ctx), "%s", out)
	return string(out), err
}
