package consumer_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/brokers/memory"
	"github.com/twiceproof/twiceproof/consumer"
	"github.com/twiceproof/twiceproof/inbox"
	"github.com/twiceproof/twiceproof/migrations"
)

// profiles of the memory broker, each with its own way to be patient.
var profiles = map[string]func(b *memory.Broker){
	"queue": func(b *memory.Broker) { b.Queue("in", memory.QueueConfig{Visibility: 30 * time.Second}) },
	"fifo":  func(b *memory.Broker) { b.Queue("in", memory.QueueConfig{Visibility: 30 * time.Second, FIFO: true}) },
	"channel": func(b *memory.Broker) {
		b.Channel("in", memory.ChannelConfig{Quorum: true, ConsumerTimeout: 10 * time.Minute})
	},
	"topic": func(b *memory.Broker) { b.Topic("in", memory.TopicConfig{Partitions: 4}) },
}

// away is a source whose broker cannot be reached for a while.
type away struct {
	brokers.Source
	down     *atomic.Bool
	receives *atomic.Int64
}

var errAway = errors.New("connection refused")

func (a away) Receive(ctx context.Context, n int) ([]*brokers.Delivery, error) {
	if a.down.Load() {
		a.receives.Add(1)
		return nil, errAway
	}
	return a.Source.Receive(ctx, n)
}

func (a away) Settle(ctx context.Context, ss ...brokers.Settlement) []error {
	if a.down.Load() {
		errs := make([]error, len(ss))
		for i := range errs {
			errs[i] = errAway
		}
		return errs
	}
	return a.Source.Settle(ctx, ss...)
}

// An hour without the database, and an hour without the broker, in virtual time: no
// message is dead or blamed, what is in hand is bounded, the probes are few, and
// everything has one effect afterwards.
func TestHourLongOutages(t *testing.T) {
	t.Parallel()
	for name, declare := range profiles {
		for _, what := range []string{"database", "broker"} {
			t.Run(what+"/"+name, func(t *testing.T) {
				t.Parallel()
				path := t.TempDir()
				synctest.Test(t, func(t *testing.T) { hourOut(t, path, what, declare) })
			})
		}
	}
}

func hourOut(t *testing.T, path, what string, declare func(b *memory.Broker)) {
	db, err := sql.Open("sqlite", "file:"+path+"/t.db?_pragma=busy_timeout(5000)&_pragma=journal_mode(MEMORY)&_pragma=synchronous(OFF)&_txlock=immediate")
	require.NoError(t, err)
	defer db.Close()
	db.SetMaxOpenConns(1)
	_, err = migrations.Up(t.Context(), migrations.SQLDB(db, migrations.SQLite))
	require.NoError(t, err)
	_, err = db.Exec(`CREATE TABLE effects (id TEXT)`)
	require.NoError(t, err)
	b := memory.New(memory.Config{})
	declare(b)
	send := func(from, to int) {
		for i := from; i < to; i++ {
			publish(t, b, msg("in", fmt.Sprint("m", i), fmt.Sprint("k", i%20), "x"))
		}
	}
	send(0, 300)
	c, down, receives := &cut{}, &atomic.Bool{}, &atomic.Int64{}
	const room = 16
	r, err := consumer.New[*sql.Tx](cutStore[*sql.Tx]{inbox.SQLite(db), c}, away{b.Source("in", memory.Group("g")), down, receives},
		func(ctx context.Context, tx *sql.Tx, m *consumer.Message) error {
			time.Sleep(time.Millisecond) // virtual
			_, err := tx.ExecContext(ctx, `INSERT INTO effects VALUES (?)`, m.ID)
			return err
		}, consumer.Config{Name: t.Name(), Concurrency: 4, Room: room, MaxAttempts: 1})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	time.Sleep(50 * time.Millisecond)
	require.Less(t, r.Stats().Processed, int64(300), "the outage meets work")
	if what == "database" {
		c.down.Store(true)
	} else {
		down.Store(true)
	}
	time.Sleep(time.Minute)
	send(300, 400)
	if what == "database" {
		require.Error(t, r.Healthy())
	}
	before := r.Stats()
	time.Sleep(59 * time.Minute)
	during := r.Stats()
	require.Equal(t, before.Processed, during.Processed)
	require.LessOrEqual(t, during.Received-during.Processed-during.Duplicates-during.Released-during.Lost, int64(room), "in hand")
	require.LessOrEqual(t, c.calls.Load()+receives.Load(), int64(2000), "tries in an hour")
	c.down.Store(false)
	down.Store(false)
	time.Sleep(2 * time.Minute)
	require.NoError(t, r.Healthy())
	cancel()
	require.NoError(t, <-done)
	s := r.Stats()
	require.Zero(t, s.Failures, "attempts counted")
	require.Zero(t, s.Dead+s.Held)
	var effects, distinct, held int
	require.NoError(t, db.QueryRow(`SELECT count(*), count(DISTINCT id), (SELECT count(*) FROM held_messages) FROM effects`).Scan(&effects, &distinct, &held))
	require.Equal(t, 400, effects)
	require.Equal(t, 400, distinct)
	require.Zero(t, held)
	require.NoError(t, b.Check())
}
