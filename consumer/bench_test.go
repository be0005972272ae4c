package consumer_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/brokers/memory"
	"github.com/twiceproof/twiceproof/consumer"
	"github.com/twiceproof/twiceproof/inbox"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
	"github.com/twiceproof/twiceproof/migrations"
)

const benchWorkers = 8

const benchUpdate = `UPDATE accounts SET n = n + 1 WHERE id = $1`

// BenchmarkPerMessage compares the runner, one transaction per message, with a loop
// written by hand that does the same claim, the same update and the same commit, on
// the same pool with as many workers. Both are fed by the memory log. An op is a
// message.
//
//	go run ./cmd/devenv -only postgres -- go test ./consumer -run '^$' -bench PerMessage -count 5 -benchtime 20000x
func BenchmarkPerMessage(b *testing.B) {
	for _, v := range []struct {
		name string
		run  func(b *testing.B, pool *pgxpool.Pool, src brokers.Source)
	}{{"runner", benchRunner}, {"by-hand", benchByHand}} {
		b.Run(v.name, func(b *testing.B) {
			pool := devtest.PostgresPool(b, benchWorkers+2)
			_, err := migrations.Up(b.Context(), migrations.Pool(pool))
			require.NoError(b, err)
			_, err = pool.Exec(b.Context(), `CREATE TABLE accounts (id text PRIMARY KEY, n int NOT NULL)`)
			require.NoError(b, err)
			_, err = pool.Exec(b.Context(), `INSERT INTO accounts SELECT 'k' || i, 0 FROM generate_series(0, 999) i`)
			require.NoError(b, err)
			br := memory.New(memory.Config{})
			br.Topic("t", memory.TopicConfig{Partitions: benchWorkers})
			ms := make([]*brokers.Message, b.N)
			for i := range ms {
				// The shape of a UUIDv7: what our outbox assigns.
				ms[i] = &brokers.Message{ID: fmt.Sprintf("0198c2a0-%04x-7000-8000-%012x", i>>16, i), Topic: "t", Key: fmt.Sprint("k", i%1000), Payload: []byte(`{"cents":100}`)}
			}
			for _, r := range br.Publisher().Publish(b.Context(), ms...) {
				require.NoError(b, r.Err)
			}
			b.ResetTimer()
			v.run(b, pool, br.Source("t", memory.Group("g")))
			b.StopTimer()
			var n int
			require.NoError(b, pool.QueryRow(context.Background(), `SELECT sum(n) FROM accounts`).Scan(&n))
			require.Equal(b, b.N, n)
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "msg/s")
		})
	}
}

func benchRunner(b *testing.B, pool *pgxpool.Pool, src brokers.Source) {
	var left atomic.Int64
	left.Store(int64(b.N))
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	h := func(ctx context.Context, tx pgx.Tx, m *consumer.Message) error {
		_, err := tx.Exec(ctx, benchUpdate, m.Key)
		return err
	}
	r, err := consumer.New(inbox.Postgres(pool), src, h, consumer.Config{Name: b.Name(), Concurrency: benchWorkers,
		Hooks: consumer.Hooks{AfterCommit: func(context.Context, *consumer.Message) {
			if left.Add(-1) == 0 {
				cancel()
			}
		}}})
	require.NoError(b, err)
	require.NoError(b, r.Run(ctx))
}

// benchByHand is what one writes without a framework: begin, claim, work, commit,
// each a round trip, and an ack after the commit.
func benchByHand(b *testing.B, pool *pgxpool.Pool, src brokers.Source) {
	ctx := b.Context()
	_, err := src.Open(ctx, brokers.OpenOptions{Consumer: "by-hand"})
	require.NoError(b, err)
	defer src.Close(ctx)
	work := make([]chan *brokers.Delivery, benchWorkers)
	var wg sync.WaitGroup
	for w := range work {
		work[w] = make(chan *brokers.Delivery, 64)
		wg.Go(func() {
			for d := range work[w] {
				if err := byHand(ctx, pool, d); err != nil {
					b.Error(err)
					return
				}
				for _, err := range src.Settle(ctx, brokers.Settlement{Delivery: d, Verb: brokers.Done}) {
					if err != nil {
						b.Error(err)
					}
				}
			}
		})
	}
	for n := 0; n < b.N; {
		ds, err := src.Receive(ctx, 64)
		require.NoError(b, err)
		for _, d := range ds {
			var k int
			_, err := fmt.Sscanf(d.Key, "k%d", &k)
			require.NoError(b, err)
			work[k%benchWorkers] <- d // one key, one worker: its order is kept
		}
		n += len(ds)
	}
	for _, c := range work {
		close(c)
	}
	wg.Wait()
}

func byHand(ctx context.Context, pool *pgxpool.Pool, d *brokers.Delivery) error {
	tx, err := pool.Begin(ctx)
	if err != nil {
		return err
	}
	defer tx.Rollback(ctx)
	tag, err := tx.Exec(ctx, `INSERT INTO processed_messages (consumer_id, message_id, fp) VALUES (1, $1, $2) ON CONFLICT DO NOTHING`,
		d.ID, inbox.Fingerprint(&d.Message))
	if err != nil {
		return err
	}
	if tag.RowsAffected() == 0 {
		return nil
	}
	if _, err := tx.Exec(ctx, benchUpdate, d.Key); err != nil {
		return err
	}
	return tx.Commit(ctx)
}
