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
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/brokers/memory"
	"github.com/twiceproof/twiceproof/consumer"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
)

const (
	poisoned      = "m050"
	poisonedCount = 100
)

// poisonConfig is what a process is told that one of its messages kills.
type poisonConfig struct {
	Path, DSN string   // SQLite's file, or PostgreSQL
	Broker    endpoint // none: a log in memory, filled anew by each process
}

// poisonMain consumes until everything is done or held. The handler of one message ends
// the process.
func poisonMain(ctx context.Context, c poisonConfig) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if c.Path != "" {
		db, err := openSQL(sqliteFile(c.Path), onSQLite)
		if err != nil {
			return err
		}
		defer db.close()
		return poisonRun(ctx, c, db)
	}
	db, err := openPostgres(ctx, c.DSN, 10)
	if err != nil {
		return err
	}
	defer db.close()
	return poisonRun(ctx, c, db)
}

func poisonRun[Tx any](ctx context.Context, c poisonConfig, db *database[Tx]) error {
	var src brokers.Source
	if c.Broker.Kind == "" {
		b := memory.New(memory.Config{})
		b.Topic("t", memory.TopicConfig{Partitions: 2})
		for _, r := range b.Publisher().Publish(ctx, poisonMessages("t")...) {
			if r.Err != nil {
				return r.Err
			}
		}
		src = b.Source("t", memory.Group("g"))
	} else {
		var err error
		if src, err = c.Broker.source(); err != nil {
			return err
		}
	}
	handler := func(ctx context.Context, tx Tx, m *consumer.Message) error {
		if m.ID == poisoned {
			p, err := os.FindProcess(os.Getpid())
			if err == nil {
				err = p.Kill()
			}
			<-ctx.Done()
			return errors.Join(err, ctx.Err())
		}
		pause(ctx, time.Millisecond)
		return db.exec(ctx, tx, `INSERT INTO effects (id, key, n) VALUES ($1, $2, $3)`, m.ID, m.Key, 0)
	}
	r, err := consumer.New(db.store, src, handler, consumer.Config{Name: "poison", Concurrency: 4})
	if err != nil {
		return err
	}
	run, stop := context.WithCancel(ctx)
	defer stop()
	done := make(chan error, 1)
	go func() { done <- r.Run(run) }()
	for {
		n, err := db.count(ctx, `SELECT (SELECT count(*) FROM effects) + (SELECT count(*) FROM held_messages)`)
		if err != nil {
			return err
		}
		if n == poisonedCount {
			break
		}
		if !pause(ctx, 10*time.Millisecond) {
			return fmt.Errorf("%d of %d", n, poisonedCount)
		}
	}
	stop()
	return <-done
}

func sqliteFile(path string) string {
	return "file:" + path + "?_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)&_txlock=immediate"
}

func poisonMessages(topic string) []*brokers.Message {
	ms := make([]*brokers.Message, poisonedCount)
	for i := range ms {
		ms[i] = &brokers.Message{ID: fmt.Sprintf("m%03d", i), Topic: topic, Key: fmt.Sprint("k", i), Payload: []byte("x")}
	}
	return ms
}

// A message whose every run ends the process is held after the limit, by a broker that
// counts deliveries and by one that does not; its neighbours in flight are not blamed,
// and first deliveries are not slowed down.
func TestMessageThatKillsItsProcessIsHeldInTheEnd(t *testing.T) {
	if runtime.GOOS == "windows" {
		devtest.Skip(t, "no signals here")
	}
	t.Run("a log in memory, SQLite", func(t *testing.T) {
		t.Parallel()
		path := filepath.Join(t.TempDir(), "p.db")
		db, err := openSQL(sqliteFile(path), onSQLite)
		require.NoError(t, err)
		t.Cleanup(db.close)
		poison(t, db, poisonConfig{Path: path})
	})
	t.Run("RabbitMQ, PostgreSQL", func(t *testing.T) {
		t.Parallel()
		e := endpoint{Kind: "rabbitmq", URL: devtest.RabbitMQURL(t), Name: devtest.Name("poison")}
		poisonOnPostgres(t, e)
	})
	t.Run("Kafka, PostgreSQL", func(t *testing.T) {
		t.Parallel()
		k := &kafkaLog{}
		k.start(t)
		poisonOnPostgres(t, k.endpoint())
	})
}

func poisonOnPostgres(t *testing.T, e endpoint) {
	dsn := devtest.PostgresSchema(t)
	db, err := openPostgres(t.Context(), dsn, 5)
	require.NoError(t, err)
	t.Cleanup(db.close)
	if e.Kind == "rabbitmq" { // declares the queue
		src, err := e.source()
		require.NoError(t, err)
		_, err = src.Open(t.Context(), brokers.OpenOptions{Consumer: "driver", Room: 1})
		require.NoError(t, errors.Join(err, src.Close(t.Context())))
	}
	pub, err := e.publisher()
	require.NoError(t, err)
	for _, r := range pub.Publish(t.Context(), poisonMessages(e.Name)...) {
		require.NoError(t, r.Err)
	}
	require.NoError(t, pub.Close(t.Context()))
	poison(t, db, poisonConfig{DSN: dsn, Broker: e})
}

func poison[Tx any](t *testing.T, db *database[Tx], c poisonConfig) {
	require.NoError(t, db.setup(t.Context(), `CREATE TABLE effects (id text NOT NULL, key text NOT NULL, n integer NOT NULL)`))
	config, err := json.Marshal(c)
	require.NoError(t, err)
	deaths := 0
	for {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), childEnv+"=poison", childConfigEnv+"="+string(config))
		out, err := cmd.CombinedOutput()
		if err == nil {
			break
		}
		require.Equal(t, "signal: killed", cmd.ProcessState.String(), "%s", out)
		deaths++
		require.Less(t, deaths, 20, "it is run for ever")
	}
	count := func(q string) int {
		n, err := db.count(t.Context(), q)
		require.NoError(t, err)
		return n
	}
	require.Equal(t, 1+3, deaths, "the first delivery is no suspect; then the limit")
	require.Equal(t, 1, count(`SELECT count(*) FROM held_messages WHERE dead AND reason = 'crash-loop' AND message_id = '`+poisoned+`'`))
	require.Equal(t, 1, count(`SELECT count(*) FROM held_messages`), "innocent neighbours")
	require.Equal(t, poisonedCount-1, count(`SELECT count(*) FROM effects`))
	require.Equal(t, poisonedCount-1, count(`SELECT count(DISTINCT id) FROM effects`))
	require.Zero(t, count(`SELECT count(*) FROM inbox_suspects`))
	if c.Broker.Kind != "kafka" { // the last one had nothing to do on some partitions, and did not look
		require.Zero(t, count(`SELECT count(*) FROM inbox_lanes`), "the last one has ended in good order")
	}
}
