package outbox_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
	"github.com/twiceproof/twiceproof/migrations"
	"github.com/twiceproof/twiceproof/outbox"
)

// acceptAll is a broker that takes everything after a delay, and counts.
type acceptAll struct {
	delay time.Duration
	n     atomic.Int64
	full  int64
	done  chan struct{}
}

func (p *acceptAll) Publish(_ context.Context, ms ...*brokers.Message) []brokers.Result {
	if p.delay > 0 {
		time.Sleep(p.delay) // the broker's round trip, not a wait of the test
	}
	rs := make([]brokers.Result, len(ms))
	for i := range rs {
		rs[i].Outcome = brokers.Accepted
	}
	if p.n.Add(int64(len(ms))) >= p.full && p.done != nil {
		close(p.done)
		p.done = nil
	}
	return rs
}

func (p *acceptAll) Limits() brokers.PublishLimits   { return brokers.PublishLimits{} }
func (p *acceptAll) Close(ctx context.Context) error { return nil }

// BenchmarkDrain drains a backlog by one relay, and by the loop that people write by
// hand: 100 rows FOR UPDATE SKIP LOCKED, publish, delete, commit. Same table, pool,
// durability and publisher. (The loop keeps no order per key, and holds its
// transaction open while it publishes.)
//
//	go run ./cmd/devenv -only postgres -- go test ./outbox -run '^$' -bench Drain -benchtime 100000x
func BenchmarkDrain(b *testing.B) {
	for _, delay := range []time.Duration{0, time.Millisecond} {
		for _, d := range []struct {
			name  string
			drain func(b *testing.B, pool *pgxpool.Pool, pub *acceptAll)
		}{{"relay", drainByRelay}, {"loop", drainByLoop}} {
			b.Run(fmt.Sprintf("%s/publish=%s", d.name, delay), func(b *testing.B) {
				pool := devtest.PostgresPool(b, 4)
				_, err := migrations.Up(b.Context(), migrations.Pool(pool))
				require.NoError(b, err)
				fill(b, pool, b.N)
				pub := &acceptAll{delay: delay, full: int64(b.N), done: make(chan struct{})}
				b.ResetTimer()
				d.drain(b, pool, pub)
				b.StopTimer()
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N), "ns/msg")
				b.ReportMetric(0, "ns/op")
				var left int
				require.NoError(b, pool.QueryRow(b.Context(), `SELECT count(*) FROM outbox_messages`).Scan(&left))
				require.Zero(b, left)
			})
		}
	}
}

// fill writes n messages of 256 bytes on 1,000 keys, through Enqueue.
func fill(b testing.TB, pool *pgxpool.Pool, n int) {
	w := outbox.Postgres(pool)
	payload := make([]byte, 256)
	for at := 0; at < n; {
		ms := make([]*brokers.Message, 0, 5000)
		for ; at < n && len(ms) < cap(ms); at++ {
			ms = append(ms, &brokers.Message{Topic: "orders", Type: "order.placed", Key: fmt.Sprint("customer-", at%1000), Payload: payload})
		}
		require.NoError(b, outbox.InTx(b.Context(), w, func(ctx context.Context, tx pgx.Tx) error { return w.Enqueue(ctx, tx, ms...) }))
	}
	_, err := pool.Exec(b.Context(), `VACUUM ANALYZE outbox_messages`)
	require.NoError(b, err)
	_, err = pool.Exec(b.Context(), `CHECKPOINT`)
	require.NoError(b, err)
}

func drainByRelay(b *testing.B, pool *pgxpool.Pool, pub *acceptAll) {
	r, err := outbox.NewRelay(outbox.Postgres(pool), pub, outbox.RelayConfig{})
	require.NoError(b, err)
	require.NoError(b, r.Flush(b.Context()))
}

func drainByLoop(b *testing.B, pool *pgxpool.Pool, pub *acceptAll) {
	for {
		n := 0
		err := pgx.BeginFunc(b.Context(), pool, func(tx pgx.Tx) error {
			rows, err := tx.Query(b.Context(), `SELECT seq, message_id, topic, message_key, type, payload
				FROM outbox_messages WHERE published_at IS NULL ORDER BY seq LIMIT 100 FOR UPDATE SKIP LOCKED`)
			if err != nil {
				return err
			}
			var seqs []int64
			var ms []*brokers.Message
			for rows.Next() {
				var seq int64
				var m brokers.Message
				var topic, key, typ []byte
				if err := rows.Scan(&seq, &m.ID, &topic, &key, &typ, &m.Payload); err != nil {
					return err
				}
				m.Topic, m.Key, m.Type = string(topic), string(key), string(typ)
				seqs, ms = append(seqs, seq), append(ms, &m)
			}
			if err := rows.Err(); err != nil || len(ms) == 0 {
				return err
			}
			n = len(ms)
			for _, r := range pub.Publish(b.Context(), ms...) {
				if r.Err != nil {
					return r.Err
				}
			}
			_, err = tx.Exec(b.Context(), `DELETE FROM outbox_messages WHERE seq = ANY($1)`, seqs)
			return err
		})
		require.NoError(b, err)
		if n == 0 {
			return
		}
	}
}
