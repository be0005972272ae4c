package consumer_test

import (
	"context"
	"database/sql"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers/memory"
	"github.com/twiceproof/twiceproof/consumer"
	"github.com/twiceproof/twiceproof/inbox"
	"github.com/twiceproof/twiceproof/migrations"
)

// runBubble runs a whole consumer, with Concurrency 8 and an SQLite database, against
// a broker that breaks things, in virtual time, and returns the broker's history.
func runBubble(t *testing.T, seed uint64, declare func(b *memory.Broker)) (history string, effects int) {
	path := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		// In memory and private to this connection: real files take real time.
		db, err := sql.Open("sqlite", "file:"+path+"/t.db?_pragma=busy_timeout(5000)&_pragma=journal_mode(MEMORY)&_pragma=synchronous(OFF)&_txlock=immediate")
		require.NoError(t, err)
		defer db.Close()
		db.SetMaxOpenConns(1)
		_, err = migrations.Up(t.Context(), migrations.SQLDB(db, migrations.SQLite))
		require.NoError(t, err)
		_, err = db.Exec(`CREATE TABLE effects (id TEXT)`)
		require.NoError(t, err)

		b := memory.New(memory.Config{Seed: seed, Chaos: memory.Chaos{Seed: seed, Duplicate: 0.5, LoseAck: 0.1, FailAck: 0.05, Delay: 0.2, Disconnect: 0.01}})
		declare(b)
		const n = 200
		for i := range n {
			publish(t, b, msg("in", fmt.Sprint("m", i), fmt.Sprint("k", i%20), "x"))
		}
		r, err := consumer.New(inbox.SQLite(db), b.Source("in", memory.Group("g")), func(ctx context.Context, tx *sql.Tx, m *consumer.Message) error {
			_, err := tx.ExecContext(ctx, `INSERT INTO effects VALUES (?)`, m.ID)
			return err
		}, consumer.Config{Name: t.Name(), Concurrency: 8})
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- r.Run(ctx) }()
		time.Sleep(2 * time.Minute) // virtual: everything is settled long before
		cancel()
		require.NoError(t, <-done)
		require.NoError(t, b.Check())
		var distinct int
		require.NoError(t, db.QueryRow(`SELECT count(*), count(DISTINCT id) FROM effects`).Scan(&effects, &distinct))
		require.Equal(t, n, distinct)
		require.Equal(t, effects, distinct, "one effect each")
		require.Positive(t, r.Stats().Duplicates)
		history = fmt.Sprint(b.History())
	})
	return history, effects
}

// One seed is one history, byte for byte, whatever the order of goroutines: what a
// consumer does against it can be run again.
func TestSameSeedIsTheSameHistory(t *testing.T) {
	for name, declare := range map[string]func(b *memory.Broker){
		"queue": func(b *memory.Broker) { b.Queue("in", memory.QueueConfig{Visibility: 2 * time.Second}) },
		"channel": func(b *memory.Broker) {
			b.Channel("in", memory.ChannelConfig{Quorum: true, ConsumerTimeout: 10 * time.Second})
		},
		"topic": func(b *memory.Broker) { b.Topic("in", memory.TopicConfig{Partitions: 4}) },
	} {
		t.Run(name, func(t *testing.T) {
			first, _ := runBubble(t, 7, declare)
			require.Greater(t, strings.Count(first, "\n")+strings.Count(first, " "), 400)
			for range 4 {
				again, _ := runBubble(t, 7, declare)
				if again != first {
					i := 0
					for i < min(len(first), len(again)) && first[i] == again[i] {
						i++
					}
					t.Fatalf("histories differ at byte %d:\n%s\n---\n%s", i, first[max(0, i-300):min(len(first), i+300)], again[max(0, i-300):min(len(again), i+300)])
				}
			}
			other, _ := runBubble(t, 8, declare)
			require.NotEqual(t, first, other)
		})
	}
}
