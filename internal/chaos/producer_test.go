package chaos

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/outbox"
)

// businessTables are what the producer writes: the messages' own truth.
const businessTables = `CREATE TABLE accounts (key text PRIMARY KEY, n integer NOT NULL);
CREATE TABLE orders (id text PRIMARY KEY, key text NOT NULL, n integer NOT NULL)`

// producer enqueues messages, each with a business row in one transaction, a few of
// a key at a time. The key's row is locked first, so that n is the order in which
// the key's messages were enqueued.
type producer struct {
	db      *database[pgx.Tx]
	topic   string
	keys    int
	total   int
	seed    uint64
	next    atomic.Int64 // messages begun
	allowed atomic.Int64 // messages that may be begun
	retries atomic.Int64 // transactions that were run again
}

const producers = 4

// run produces until everything is enqueued.
func (p *producer) run(ctx context.Context) error {
	var wg sync.WaitGroup
	errs := make([]error, producers)
	for i := range producers {
		wg.Go(func() { errs[i] = p.work(ctx, rand.New(rand.NewPCG(p.seed, uint64(i)))) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

func (p *producer) work(ctx context.Context, r *rand.Rand) error {
	for {
		batch := int64(1 + r.IntN(4))
		first := p.next.Add(batch) - batch
		if first >= int64(p.total) {
			return nil
		}
		batch = min(batch, int64(p.total)-first)
		for first >= p.allowed.Load() {
			if !pause(ctx, 5*time.Millisecond) {
				return context.Cause(ctx)
			}
		}
		key := "k" + strconv.Itoa(r.IntN(p.keys))
		for {
			err := p.enqueue(ctx, key, first, batch)
			if err == nil {
				break
			}
			p.retries.Add(1)
			if !pause(ctx, 50*time.Millisecond) {
				return errors.Join(context.Cause(ctx), err)
			}
		}
	}
}

// enqueue is one business transaction. It is run again after any error: also one of
// an unknown commit, and then finds its own rows.
func (p *producer) enqueue(ctx context.Context, key string, first, batch int64) error {
	return outbox.InTx(ctx, p.db.outbox, func(ctx context.Context, tx pgx.Tx) error {
		var n int64
		err := tx.QueryRow(ctx, `INSERT INTO accounts VALUES ($1, $2) ON CONFLICT (key) DO UPDATE SET n = accounts.n + excluded.n RETURNING n`, key, batch).Scan(&n)
		if err != nil {
			return err
		}
		n -= batch
		var ms []*brokers.Message
		for i := range batch {
			id := fmt.Sprintf("m%06d", first+i)
			tag, err := tx.Exec(ctx, `INSERT INTO orders VALUES ($1, $2, $3) ON CONFLICT DO NOTHING`, id, key, n+i)
			if err != nil {
				return err
			}
			if tag.RowsAffected() == 0 {
				_, err := tx.Exec(ctx, `UPDATE accounts SET n = n - $2 WHERE key = $1`, key, batch)
				return err // it had been committed
			}
			ms = append(ms, &brokers.Message{ID: id, Topic: p.topic, Key: key, Type: "order", Payload: []byte(strconv.FormatInt(n+i, 10))})
		}
		return p.db.outbox.Enqueue(ctx, tx, ms...)
	})
}

// pause waits for d, and reports false when ctx ended first.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
