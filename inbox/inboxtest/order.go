package inboxtest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/inbox"
)

func orderCases[Tx any]() []testCase[Tx] {
	return []testCase[Tx]{
		{"order/four retriers never invert a key", nil, func(e *env[Tx]) {
			e.fillKeys(10, 20)
			require.Zero(e, e.drain(4))
			require.Zero(e, e.heldRows())
			require.Equal(e, 200, e.effects())
		}},
		// With "the oldest due, SKIP LOCKED" the second message of a key goes to a second
		// worker. Here every row is due, which makes it of the same query: the check above
		// must see it.
		{"order/the check notices retriers that take any due message", needsConcurrency[Tx], func(e *env[Tx]) {
			e.fillKeys(10, 20)
			require.NoError(e, e.Do(`UPDATE held_messages SET due_at = held_at`))
			require.Positive(e, e.drain(4))
		}},
		{"order/failures and deliveries meanwhile change nothing", nil, func(e *env[Tx]) {
			e.fillKeys(5, 10)
			var wg sync.WaitGroup
			wg.Go(func() {
				for i := 10; i < 20; i++ {
					for k := range 5 {
						it := e.item(fmt.Sprintf("%d/%d", k, i), fmt.Sprint("k", k))
						var a inbox.Attempt[Tx]
						var vs []inbox.Verdict
						err := patiently(func() (err error) {
							a, vs, err = e.Other.Begin(context.Background(), e.unit(it))
							return err
						})
						if !assert.NoError(e, err) || vs[0] != inbox.Claimed {
							continue
						}
						assert.NoError(e, e.Exec(context.Background(), a.Tx(), `INSERT INTO effects (id, key, n) VALUES ($1, $2, $3)`, it.ID, it.Message.Key, e.next()))
						_, err = a.Commit(context.Background())
						assert.NoError(e, err)
					}
				}
			})
			inversions := e.drainFailing(4, 7)
			wg.Wait()
			inversions += e.drain(1)
			require.Zero(e, inversions)
			require.Equal(e, 100, e.effects())
			require.Zero(e, e.heldRows())
			require.Zero(e, e.inversions())
		}},
	}
}

// patiently tries again as a runner does, as long as another writer is in the way.
func patiently(f func() error) error {
	for {
		if err := f(); !errors.Is(err, inbox.ErrClaimTimeout) {
			return err
		}
	}
}

var ticks atomic.Int64

func (e *env[Tx]) next() int64 { return ticks.Add(1) }

// fillKeys holds n messages of each key, in order.
func (e *env[Tx]) fillKeys(keys, n int) {
	e.Helper()
	for i := range n {
		for k := range keys {
			e.hold(e.item(fmt.Sprintf("%d/%d", k, i), fmt.Sprint("k", k)))
		}
	}
}

// drain retries with n workers until nothing is held, and returns the number of
// inversions of a key among the first effects.
func (e *env[Tx]) drain(n int) int { e.Helper(); return e.drainFailing(n, 0) }

// drainFailing makes every nth run fail.
func (e *env[Tx]) drainFailing(workers, nth int) int {
	e.Helper()
	var wg sync.WaitGroup
	var runs atomic.Int64
	for w := range workers {
		s := e.Store
		if w%2 == 1 {
			s = e.Other
		}
		wg.Go(func() {
			idle := 0
			for idle < 50 {
				var hs []*inbox.Head
				err := patiently(func() (err error) {
					hs, err = s.TakeHeads(context.Background(), inbox.HeadQuery{Consumer: e.consumer, Max: 3, Lease: time.Minute})
					return err
				})
				if !assert.NoError(e, err) {
					return
				}
				if len(hs) == 0 {
					idle++
					n, err := e.Count(`SELECT count(*) FROM held_messages`)
					if err != nil || n == 0 {
						return
					}
					continue
				}
				idle = 0
				for _, h := range hs {
					e.runHead(s, h, nth > 0 && runs.Add(1)%int64(nth) == 0)
				}
			}
		})
	}
	wg.Wait()
	return e.inversions()
}

func (e *env[Tx]) runHead(s inbox.Store[Tx], h *inbox.Head, fail bool) {
	ctx := context.Background()
	var a inbox.Attempt[Tx]
	err := patiently(func() (err error) {
		a, err = s.BeginRetry(ctx, h, e.unit())
		return err
	})
	if !assert.NoError(e, err) {
		return
	}
	// The number is drawn first, so that two transactions of one key at once show.
	n := e.next()
	assert.NoError(e, e.Exec(ctx, a.Tx(), `INSERT INTO effects (id, key, n) VALUES ($1, $2, $3)`, h.Item.ID, h.Item.Message.Key, n))
	if fail {
		o := retryOf[Tx](h.Item)
		o.Attempts = h.Attempts + 1
		assert.NoError(e, a.Fail(ctx, o))
		return
	}
	r, err := a.Commit(ctx)
	assert.NoError(e, err)
	assert.Equal(e, inbox.CommitYes, r)
}

func (e *env[Tx]) inversions() int {
	e.Helper()
	rank := func(t string) string { return `CAST(substr(` + t + `.id, 3) AS integer)` }
	return e.count(`SELECT count(*) FROM effects x JOIN effects y ON x.key = y.key AND ` + rank("x") + ` < ` + rank("y") + ` AND x.n > y.n`)
}
