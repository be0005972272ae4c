package inboxtest

import (
	"context"
	"fmt"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/inbox"
)

func headCases[Tx any]() []testCase[Tx] {
	return []testCase[Tx]{
		{"retry/each due message is taken by one, and only the first of a key", nil, func(e *env[Tx]) {
			for _, k := range []string{"a", "b", ""} {
				e.hold(e.item("1"+k, k))
				e.hold(e.item("2"+k, k))
			}
			first := e.heads(e.Store, 3, time.Minute)
			second := e.heads(e.Other, 10, time.Minute)
			require.Len(e, first, 3)
			require.Len(e, second, 1)
			seen := map[string]bool{}
			for _, h := range append(first, second...) {
				seen[h.Item.ID] = true
				require.Equal(e, 2, h.Starts, "the attempt before it was held counts as a start")
				require.Equal(e, 1, h.Attempts)
			}
			require.Equal(e, map[string]bool{"1a": true, "1b": true, "1": true, "2": true}, seen)
			require.Empty(e, e.heads(e.Store, 10, time.Minute))
		}},
		{"retry/a success removes the row, marks the claim and makes the next due", nil, func(e *env[Tx]) {
			e.hold(e.item("1", "k"))
			e.hold(e.item("2", "k"))
			require.NoError(e, e.Do(`CREATE TABLE before AS SELECT * FROM processed_messages`))
			a := e.retry(e.head())
			e.effect(a, "1")
			e.commit(a)
			require.Equal(e, 1, e.effects())
			require.Equal(e, 1, e.count(`SELECT count(*) FROM processed_messages p JOIN before b ON b.message_id = p.message_id WHERE p.message_id = '1' AND p.state = 0 AND p.processed_at > b.processed_at`), "its window starts now")
			require.Equal(e, "2", e.head().Item.ID)
		}},
		{"retry/a failure undoes the work and keeps its outcome", nil, func(e *env[Tx]) {
			e.hold(e.item("1", "k"))
			h := e.head()
			a := e.retry(h)
			e.effect(a, "1")
			o := retryOf[Tx](h.Item)
			o.Attempts, o.Delay, o.Failure = 2, time.Hour, inbox.Failure{Class: "panic", Text: "again"}
			require.NoError(e, a.Fail(context.Background(), o))
			require.Zero(e, e.effects())
			require.Equal(e, 1, e.count(`SELECT count(*) FROM held_messages WHERE attempts = 2 AND starts = 2 AND NOT dead AND first_error = 'no' AND last_error = 'again' AND last_error_class = 'panic' AND tx_mark IS NULL`))
			require.Empty(e, e.heads(e.Store, 10, time.Minute), "not before its delay")
		}},
		{"retry/dead under Block stops its key, under Continue the next goes on", nil, func(e *env[Tx]) {
			for _, c := range []bool{false, true} {
				k := fmt.Sprint(c)
				e.hold(e.item("1"+k, k))
				e.hold(e.item("2"+k, k))
				h := e.head()
				u := e.unit()
				u.ContinueAfterDead = c
				a, err := e.Store.BeginRetry(context.Background(), h, u)
				require.NoError(e, err)
				require.NoError(e, a.Fail(context.Background(), deadOf[Tx](h.Item)))
				hs := e.heads(e.Store, 10, time.Minute)
				if c {
					require.Len(e, hs, 1)
					require.Equal(e, "2"+k, hs[0].Item.ID)
				} else {
					require.Empty(e, hs)
				}
			}
		}},
		{"retry/a discard settles it with the reason", nil, func(e *env[Tx]) {
			e.hold(e.item("1", "k"))
			e.hold(e.item("2", "k"))
			h := e.head()
			a := e.retry(h)
			e.effect(a, "1")
			require.NoError(e, a.Fail(context.Background(), inbox.Outcome[Tx]{Item: h.Item, Discard: true, Failure: inbox.Failure{Text: "why"}}))
			require.Zero(e, e.effects())
			require.Equal(e, 1, e.count(`SELECT count(*) FROM processed_messages WHERE message_id = '1' AND state = 2 AND reason = 'why'`))
			require.Equal(e, "2", e.head().Item.ID)
		}},
		{"retry/a lease that ran out is fenced", nil, func(e *env[Tx]) {
			e.hold(e.item("1", "k"))
			old := e.heads(e.Store, 1, time.Microsecond)[0]
			e.eventually("due again after the lease", func() bool { return e.count(`SELECT count(*) FROM held_messages WHERE starts = 2`) == 1 })
			var h *inbox.Head
			e.eventually("taken by another", func() bool {
				hs := e.heads(e.Other, 1, time.Minute)
				if len(hs) == 1 {
					h = hs[0]
				}
				return h != nil
			})
			require.Equal(e, old.Starts+1, h.Starts)
			_, err := e.Store.BeginRetry(context.Background(), old, e.unit())
			require.ErrorIs(e, err, inbox.ErrHeadLost)
			require.NoError(e, e.Store.ReturnHead(context.Background(), old, 0), "it takes nobody else's start back")
			require.Equal(e, 1, e.count(`SELECT count(*) FROM held_messages WHERE starts = 3`))
			a := e.retry(h)
			e.commit(a)
		}},
		{"retry/a start that counts for nothing is taken back", nil, func(e *env[Tx]) {
			e.hold(e.item("1", "k"))
			h := e.head()
			require.NoError(e, e.Store.ReturnHead(context.Background(), h, 0))
			again := e.head()
			require.Equal(e, h.Starts, again.Starts)
			require.Equal(e, h.Attempts, again.Attempts)
		}},
		{"retry/a run that counts as no attempt leaves no start", nil, func(e *env[Tx]) {
			e.hold(e.item("1", "k"))
			h := e.head()
			a := e.retry(h)
			o := retryOf[Tx](h.Item)
			o.Attempts = h.Attempts
			require.NoError(e, a.Fail(context.Background(), o))
			require.Equal(e, 1, e.count(`SELECT count(*) FROM held_messages WHERE starts = attempts`))
		}},
		// MassTransit/MassTransit#2076: a count that is written after the handler never sees
		// the run that killed the process.
		{"retry/a run that dies has been counted before it began", nil, func(e *env[Tx]) {
			e.hold(e.item("1", "k"))
			h := e.head()
			a := e.retry(h)
			e.effect(a, "1")
			require.NoError(e, a.Rollback(context.Background())) // as the end of the process does
			require.Zero(e, e.effects())
			require.Equal(e, 1, e.count(`SELECT count(*) FROM held_messages WHERE starts = 2 AND attempts = 1`))
		}},
		{"retry/a handler that ended its transaction is found out by its mark", nil, func(e *env[Tx]) {
			e.hold(e.item("1", "k"))
			e.hold(e.item("2", "k"))
			h := e.heads(e.Store, 1, time.Microsecond)[0]
			a := e.retry(h)
			e.effect(a, "1")
			require.NoError(e, e.End(context.Background(), a.Tx(), true))
			r, err := a.Commit(context.Background())
			require.Equal(e, inbox.CommitEnded, r)
			require.ErrorIs(e, err, inbox.ErrTxEnded)
			var again *inbox.Head
			e.eventually("due again", func() bool {
				if hs := e.heads(e.Other, 1, time.Minute); len(hs) == 1 {
					again = hs[0]
				}
				return again != nil
			})
			_, err = e.Store.BeginRetry(context.Background(), again, e.unit())
			require.ErrorIs(e, err, inbox.ErrTxEnded)
			require.Equal(e, 1, e.effects())
			require.Equal(e, 1, e.count(`SELECT count(*) FROM processed_messages WHERE message_id = '1' AND state = 0`), "settled as done, not run again")
			require.Equal(e, "2", e.head().Item.ID)
		}},
		{"retry/a handler that rolled its transaction back fails like any other", nil, func(e *env[Tx]) {
			e.hold(e.item("1", "k"))
			h := e.head()
			a := e.retry(h)
			e.effect(a, "1")
			require.NoError(e, e.End(context.Background(), a.Tx(), false))
			o := retryOf[Tx](h.Item)
			o.Attempts = 2
			require.NoError(e, a.Fail(context.Background(), o))
			require.Zero(e, e.effects())
			require.Equal(e, 1, e.count(`SELECT count(*) FROM held_messages WHERE attempts = 2 AND tx_mark IS NULL`))
		}},
		{"retry/a waiting first of a key is repaired", nil, func(e *env[Tx]) {
			for i := range 3 {
				e.hold(e.item(fmt.Sprint("a", i), "a"))
				e.hold(e.item(fmt.Sprint("b", i), "b"))
			}
			e.hold(e.item("free", ""))
			e.record(deadOf[Tx](e.item("c0", "c")), inbox.Recorded)
			e.hold(e.item("c1", "c"))
			require.NoError(e, e.Do(`UPDATE held_messages SET due_at = NULL`))
			n, err := e.Store.RepairHeads(context.Background(), e.consumer, false)
			require.NoError(e, err)
			require.Equal(e, 3, n, "a0, b0 and free; c is blocked by a dead one")
			n, err = e.Store.RepairHeads(context.Background(), e.consumer, true)
			require.NoError(e, err)
			require.Equal(e, 1, n, "c1, now that AfterDead is Continue")
			require.Equal(e, 4, e.count(`SELECT count(*) FROM held_messages WHERE due_at IS NOT NULL AND message_id IN ('a0', 'b0', 'free', 'c1')`))
			n, err = e.Store.RepairHeads(context.Background(), e.consumer, true)
			require.NoError(e, err)
			require.Zero(e, n)
		}},
	}
}
