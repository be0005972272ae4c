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

// answer is what a claim that had to wait came back with.
type answer[Tx any] struct {
	a   inbox.Attempt[Tx]
	v   inbox.Verdict
	err error
}

// claimWaiting starts a claim that must wait for what holds its message now.
func (e *env[Tx]) claimWaiting(it *inbox.Item, timeout time.Duration) <-chan answer[Tx] {
	e.Helper()
	u := e.unit(it)
	u.ClaimTimeout = timeout
	c := make(chan answer[Tx], 1)
	go func() {
		a, vs, err := e.Other.Begin(context.Background(), u)
		r := answer[Tx]{a: a, err: err}
		if err == nil {
			r.v = vs[0]
		}
		c <- r
	}()
	select {
	case r := <-c:
		e.Fatalf("the claim did not wait: %v %v", r.v, r.err)
	case <-time.After(300 * time.Millisecond):
	}
	return c
}

func (e *env[Tx]) verdictOf(c <-chan answer[Tx]) inbox.Verdict {
	e.Helper()
	r := <-c
	require.NoError(e, r.err)
	if r.a != nil {
		require.NoError(e, r.a.Rollback(context.Background()))
	}
	return r.v
}

func raceCases[Tx any]() []testCase[Tx] {
	return []testCase[Tx]{
		// ITISFoundation/osparc-simcore#9270: a duplicate that skips instead of waiting is
		// lost when the first one rolls back.
		{"race/the first commits: duplicate", nil, func(e *env[Tx]) {
			a := e.open(e.item("1", ""))
			e.effect(a, "1")
			c := e.claimWaiting(e.item("1", ""), 5*time.Second)
			e.commit(a)
			require.Equal(e, inbox.Duplicate, e.verdictOf(c))
		}},
		{"race/the first rolls back: claimed", nil, func(e *env[Tx]) {
			a := e.open(e.item("1", ""))
			c := e.claimWaiting(e.item("1", ""), 5*time.Second)
			require.NoError(e, a.Rollback(context.Background()))
			require.Equal(e, inbox.Claimed, e.verdictOf(c))
		}},
		{"race/the first has other content: conflict", nil, func(e *env[Tx]) {
			a := e.open(e.item("1", ""))
			c := e.claimWaiting(e.item("1", "", "other"), 5*time.Second)
			e.commit(a)
			require.Equal(e, inbox.Conflict, e.verdictOf(c))
		}},
		{"race/the first takes longer than the claim timeout: nothing is decided", nil, func(e *env[Tx]) {
			a := e.open(e.item("1", ""))
			r := <-e.claimWaiting(e.item("1", ""), 600*time.Millisecond)
			require.ErrorIs(e, r.err, inbox.ErrClaimTimeout)
			require.Nil(e, r.a)
			e.commit(a)
			require.Equal(e, inbox.Duplicate, e.verdict(e.item("1", "")))
		}},
		{"race/a hold of the same id commits: held", nil, func(e *env[Tx]) {
			c := e.duringHold(e.item("1", ""), nil, e.item("1", ""))
			require.Equal(e, inbox.Held, e.verdictOf(c))
			require.Equal(e, 1, e.heldRows())
		}},
		{"race/a hold of the same id rolls back: claimed", nil, func(e *env[Tx]) {
			c := e.duringHold(e.item("1", ""), errors.New("no"), e.item("1", ""))
			require.Equal(e, inbox.Claimed, e.verdictOf(c))
			require.Zero(e, e.heldRows())
		}},
		{"race/a hold of a message whose claim runs waits and finds it done", nil, func(e *env[Tx]) {
			a := e.open(e.item("1", ""))
			c := make(chan answer[Tx], 1)
			go func() {
				vs, err := e.Other.Record(context.Background(), e.unit(), retryOf[Tx](e.item("1", "")))
				r := answer[Tx]{err: err}
				if err == nil {
					r.v = vs[0]
				}
				c <- r
			}()
			e.effect(a, "1")
			e.commit(a)
			require.Equal(e, inbox.Duplicate, e.verdictOf(c))
			require.Zero(e, e.heldRows())
		}},
		{"race/a hold that waits longer than the claim timeout holds nothing", needsConcurrency[Tx], func(e *env[Tx]) {
			a := e.open(e.item("1", ""))
			u := e.unit()
			u.ClaimTimeout = 200 * time.Millisecond
			_, err := e.Other.Record(context.Background(), u, retryOf[Tx](e.item("1", "")))
			require.ErrorIs(e, err, inbox.ErrClaimTimeout)
			e.commit(a)
			require.Zero(e, e.heldRows())
		}},
		// stellarBank, elizaOS/eliza#31768: SELECT, then INSERT lets two through.
		{"race/fifty claims of one id at once have one effect", nil, func(e *env[Tx]) {
			var wg sync.WaitGroup
			var claimed, duplicates atomic.Int32
			start := make(chan struct{})
			for range 50 {
				wg.Go(func() {
					<-start
					var v inbox.Verdict
					err := patiently(func() (err error) {
						v, err = inbox.Once(context.Background(), e.Store, e.consumer, "1", func(ctx context.Context, tx Tx) error {
							return e.Exec(ctx, tx, `INSERT INTO effects (id) VALUES ($1)`, "1")
						})
						return err
					})
					assert.NoError(e, err)
					switch v {
					case inbox.Claimed:
						claimed.Add(1)
					case inbox.Duplicate:
						duplicates.Add(1)
					}
				})
			}
			close(start)
			wg.Wait()
			require.EqualValues(e, 1, claimed.Load())
			require.EqualValues(e, 49, duplicates.Load())
			require.Equal(e, 1, e.effects())
		}},
		{"race/hold and claim of one id at one instant: one of them", nil, func(e *env[Tx]) {
			const rounds = 100
			for i := range rounds {
				it := e.item(fmt.Sprint(i), "k")
				it.OrderKey = nil
				var wg sync.WaitGroup
				start := make(chan struct{})
				wg.Go(func() {
					<-start
					var a inbox.Attempt[Tx]
					var vs []inbox.Verdict
					err := patiently(func() (err error) {
						a, vs, err = e.Store.Begin(context.Background(), e.unit(it))
						return err
					})
					if assert.NoError(e, err) && vs[0] == inbox.Claimed {
						assert.NoError(e, e.Exec(context.Background(), a.Tx(), `INSERT INTO effects (id) VALUES ($1)`, it.ID))
						r, err := a.Commit(context.Background())
						assert.NoError(e, err)
						assert.Equal(e, inbox.CommitYes, r)
					}
				})
				wg.Go(func() {
					<-start
					assert.NoError(e, patiently(func() error {
						_, err := e.Other.Record(context.Background(), e.unit(), retryOf[Tx](it))
						return err
					}))
				})
				close(start)
				wg.Wait()
			}
			require.Equal(e, rounds, e.effects()+e.heldRows())
			require.Zero(e, e.count(`SELECT count(*) FROM held_messages h JOIN effects x ON x.id = h.message_id`))
		}},
		{"race/the next of a key while the head is being deleted: behind", needsConcurrency[Tx], func(e *env[Tx]) {
			e.hold(e.item("1", "k"))
			a := e.retry(e.head())
			require.Equal(e, inbox.Behind, e.verdict(e.item("2", "k")))
			e.commit(a)
			h := e.head()
			require.Equal(e, "2", h.Item.ID, "it has become the head")
			require.Equal(e, inbox.Held, e.verdict(e.item("2", "k")))
		}},
		{"race/a delivery of a message whose retry runs: held at once", needsConcurrency[Tx], func(e *env[Tx]) {
			e.hold(e.item("1", "k"))
			a := e.retry(e.head())
			require.Equal(e, inbox.Held, e.verdict(e.item("1", "k")))
			e.commit(a)
			require.Equal(e, inbox.Duplicate, e.verdict(e.item("1", "k")))
		}},
		{"race/many holds of one key at once leave one head", nil, func(e *env[Tx]) {
			var wg sync.WaitGroup
			for i := range 20 {
				s := e.Store
				if i%2 == 1 {
					s = e.Other
				}
				wg.Go(func() {
					assert.NoError(e, patiently(func() error {
						_, err := s.Record(context.Background(), e.unit(), retryOf[Tx](e.item(fmt.Sprint(i), "k")))
						return err
					}))
				})
			}
			wg.Wait()
			require.Equal(e, 20, e.heldRows())
			require.Equal(e, 1, e.count(`SELECT count(*) FROM held_messages WHERE due_at IS NOT NULL`))
			require.Equal(e, 1, e.count(`SELECT count(*) FROM held_messages WHERE due_at IS NOT NULL AND position = (SELECT min(position) FROM held_messages)`))
		}},
	}
}

// duringHold claims it while the hold of held is not yet committed, and ends the
// hold with err.
func (e *env[Tx]) duringHold(held *inbox.Item, end error, it *inbox.Item) <-chan answer[Tx] {
	e.Helper()
	inside, leave := make(chan struct{}), make(chan struct{})
	done := make(chan error, 1)
	o := retryOf[Tx](held)
	o.With = func(context.Context, Tx, int) error {
		close(inside)
		<-leave
		return end
	}
	go func() {
		_, err := e.Store.Record(context.Background(), e.unit(), o)
		done <- err
	}()
	<-inside
	c := e.claimWaiting(it, 5*time.Second)
	close(leave)
	require.ErrorIs(e, <-done, end)
	return c
}
