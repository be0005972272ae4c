package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/inbox"
)

// A run has its row from its beginning and needs its key at its end; an operator needs
// both. On SQLite a run keeps every other writer away, so there is nothing to test.

func TestAMessageThatRunsIsWaitedFor(t *testing.T) {
	t.Parallel()
	onAllStores(t, func(b *bench) {
		if b.single {
			return // see above
		}
		change := map[string]func(ctx context.Context, c inbox.Choice) error{
			"replay":  func(ctx context.Context, c inbox.Choice) error { return b.op.Replay(ctx, c, me) },
			"discard": func(ctx context.Context, c inbox.Choice) error { return b.op.Discard(ctx, c, me) },
			"edit": func(ctx context.Context, c inbox.Choice) error {
				_, err := b.op.Edit(ctx, c, &brokers.Message{ID: "mended"}, me)
				return err
			},
		}
		waited := false
		for name, do := range change {
			b.hold(held(name, "k"), inbox.ReasonRetry, false, 0)
			heads := b.take()
			require.Len(b, heads, 1)
			c := b.only(inbox.HeldFilter{ID: name})
			end := b.begin(heads[0])
			if !waited {
				waited = true
				ctx, cancel := context.WithTimeout(b.Context(), 2*time.Second)
				err := do(ctx, c)
				cancel()
				assert.ErrorIs(b, err, context.DeadlineExceeded, name)
				assert.ErrorIs(b, err, inbox.ErrRunning, name)
			}
			answer := make(chan error, 1)
			go func() { answer <- do(b.Context(), c) }()
			end()
			require.ErrorIs(b, <-answer, inbox.ErrNotHeld, "%s: the run has ended it", name)
			require.Empty(b, b.list(inbox.HeldFilter{}))
		}
		require.Zero(b, b.count(`SELECT count(*) FROM twiceproof_audit`), "nothing was done, and nothing is said to have been")
	})
}

// A later message of the key runs, as may be where AfterDead is Continue, when an
// earlier one is replayed. Waiting for its row with the key locked would end its run by
// a deadlock, a second after the run's end.
func TestReplayBesideARunLeavesItAlone(t *testing.T) {
	t.Parallel()
	onAllStores(t, func(b *bench) {
		if b.single {
			return // see above
		}
		b.hold(held("1", "k"), inbox.ReasonDead, true, 0)
		b.hold(held("2", "k"), inbox.ReasonRetry, false, 0)
		b.repair(true)
		heads := b.take()
		require.Equal(b, []string{"2"}, takenIDs(heads))
		end := b.begin(heads[0])
		require.NoError(b, b.op.Replay(b.Context(), b.only(inbox.HeldFilter{ID: "1"}), me))
		first := b.take()
		require.Equal(b, []string{"1"}, takenIDs(first))
		endFirst := b.begin(first[0])
		endFirst() // its next runs: it is not waited for
		end()
		require.Empty(b, b.list(inbox.HeldFilter{}))
	})
}

// The same, when the later one was taken and had not begun: it has lost its turn, and
// whoever ends the replayed one must not wait for it either.
func TestTheEndOfAReplayedOneDoesNotWaitForARunBesideIt(t *testing.T) {
	t.Parallel()
	onAllStores(t, func(b *bench) {
		if b.single {
			return // see above
		}
		b.hold(held("1", "k"), inbox.ReasonDead, true, 0)
		b.hold(held("2", "k"), inbox.ReasonRetry, false, 0)
		b.repair(true)
		heads := b.take()
		require.Equal(b, []string{"2"}, takenIDs(heads))
		require.NoError(b, b.op.Replay(b.Context(), b.only(inbox.HeldFilter{ID: "1"}), me))
		end := b.begin(heads[0])
		first := b.take()
		require.Equal(b, []string{"1"}, takenIDs(first))
		ended := make(chan error, 1)
		go func() { ended <- b.run(first[0]) }()
		select {
		case err := <-ended:
			assert.NoError(b, err)
		case <-time.After(20 * time.Second):
			assert.Fail(b, "it waits")
		}
		b.repair(true) // nor does the repair
		end()
		require.Empty(b, b.list(inbox.HeldFilter{}))
	})
}

// The same, and the later one fails: it has lost its turn to the replayed one.
func TestARunThatFailsBesideAReplayedOneWaitsForIt(t *testing.T) {
	t.Parallel()
	onAllStores(t, func(b *bench) {
		b.hold(held("1", "k"), inbox.ReasonDead, true, 0)
		b.hold(held("2", "k"), inbox.ReasonRetry, false, 0)
		b.repair(true)
		heads := b.take()
		require.Equal(b, []string{"2"}, takenIDs(heads))
		require.NoError(b, b.op.Replay(b.Context(), b.only(inbox.HeldFilter{ID: "1"}), me))
		b.fail(heads[0], 4, false, true)
		first := b.take()
		require.Equal(b, []string{"1"}, takenIDs(first))
		b.repair(true)
		require.Empty(b, b.take())
		require.NoError(b, b.run(first[0]))
		require.Equal(b, []string{"2"}, takenIDs(b.take()))
	})
}

// A replayed message has died again after as many runs as the first time: to the list
// that was frozen before, it has changed.
func TestAListIsReplayedOnceEvenIfItsMessagesDieAgain(t *testing.T) {
	t.Parallel()
	onAllStores(t, func(b *bench) {
		b.hold(held("1", "k"), inbox.ReasonDead, true, 0) // after 3 attempts
		c := b.only(inbox.HeldFilter{})
		require.NoError(b, b.op.Replay(b.Context(), c, me))
		for n := 1; n <= 3; n++ {
			heads := b.take()
			require.Len(b, heads, 1)
			b.fail(heads[0], n, n == 3, false)
		}
		h, err := b.op.Get(b.Context(), c.Seq)
		require.NoError(b, err)
		require.True(b, h.Dead)
		require.Equal(b, 3, h.Attempts)
		require.Equal(b, 3, h.Starts)
		require.ErrorIs(b, b.op.Replay(b.Context(), c, me), inbox.ErrChanged)
		require.NoError(b, b.op.Replay(b.Context(), b.only(inbox.HeldFilter{}), me), "a new list is another matter")
	})
}

// Where AfterDead is Continue, the next of a key is due at once, also behind a dead one.
func TestHeadsUnderContinueNeedNoRepair(t *testing.T) {
	t.Parallel()
	onAllStores(t, func(b *bench) {
		b.hold(held("1", "k"), inbox.ReasonDead, true, 0)
		b.hold(held("2", "k"), inbox.ReasonDead, true, 0)
		for _, id := range []string{"3", "4"} {
			b.hold(held(id, "k"), inbox.ReasonRetry, false, 0)
		}
		require.Empty(b, b.take(), "under Block nothing is due")
		b.repair(true)
		require.NoError(b, b.op.Discard(b.Context(), b.only(inbox.HeldFilter{ID: "3"}), me))
		require.Equal(b, 1, b.count(`SELECT count(*) FROM held_messages WHERE due_at IS NOT NULL AND message_id = '4'`))
		require.NoError(b, b.op.Replay(b.Context(), b.only(inbox.HeldFilter{ID: "2"}), me))
		heads := b.take()
		require.Equal(b, []string{"2"}, takenIDs(heads), "it comes before 4, and 1 does not block it")
		require.NoError(b, b.run(heads[0])) // under Block, which nobody changes while messages are held
		b.repair(true)
		require.Equal(b, []string{"4"}, takenIDs(b.take()))
	})
}

// Where dead ones block, a message replayed behind one waits for it.
func TestReplayBehindADeadOneWaitsUnderBlock(t *testing.T) {
	t.Parallel()
	onAllStores(t, func(b *bench) {
		b.hold(held("1", "k"), inbox.ReasonDead, true, 0)
		b.hold(held("2", "k"), inbox.ReasonDead, true, 0)
		second := b.only(inbox.HeldFilter{ID: "2"})
		require.NoError(b, b.op.Replay(b.Context(), second, me))
		require.Empty(b, b.take())
		due, _, err := b.op.Unfinished(b.Context(), []int64{second.Seq})
		require.NoError(b, err)
		require.Empty(b, due, "it is not under way, and a pace must not wait for it")
		require.NoError(b, b.op.Discard(b.Context(), b.only(inbox.HeldFilter{ID: "1"}), me))
		require.Equal(b, []string{"2"}, takenIDs(b.take()))
	})
}

// The copy of a conflict has its place among the held ones of its key, and what arrives
// waits behind it.
func TestTheCopyOfAConflictKeepsTheOrder(t *testing.T) {
	t.Parallel()
	onAllStores(t, func(b *bench) {
		require.Equal(b, inbox.Claimed, b.claim(held("1", "k")))
		other := held("1", "k")
		other.Payload = []byte("other content")
		b.hold(other, inbox.ReasonConflict, true, 0)
		b.hold(held("2", "k"), inbox.ReasonRetry, false, 0)
		_, err := b.op.Edit(b.Context(), b.only(inbox.HeldFilter{Reason: inbox.ReasonConflict}), &brokers.Message{ID: "1-b"}, me)
		require.NoError(b, err)
		require.Equal(b, inbox.Behind, b.claim(held("3", "k")))
		for _, id := range []string{"1-b", "2", "3"} {
			heads := b.take()
			require.Equal(b, []string{id}, takenIDs(heads))
			require.NoError(b, b.run(heads[0]))
		}
		require.Equal(b, inbox.Duplicate, b.claim(&brokers.Message{ID: "1-b", Topic: "orders", Type: "order.placed"}), "its claim has its own fingerprint")
		require.Equal(b, inbox.Conflict, b.claim(held("1-b", "k")))
	})
}

// Consumers run a key's messages one after the other while an operator discards every
// other one and replays the rest: no run ends in a deadlock, and the order stays.
func TestOperatorsDisturbNoRun(t *testing.T) {
	t.Parallel()
	onAllStores(t, func(b *bench) {
		const n, keys = 120, 3
		for i := range n {
			b.hold(held(fmt.Sprintf("m%03d", i), fmt.Sprint("k", i%keys)), inbox.ReasonRetry, false, 0)
		}
		chosen := b.choose(inbox.HeldFilter{})
		var wg sync.WaitGroup
		var mu sync.Mutex
		ran, changed := 0, 0
		begun := make(chan struct{}) // SQLite's lock is not fair: consumers could be through before
		for range 2 {
			wg.Go(func() {
				<-begun
				for len(b.list(inbox.HeldFilter{Max: 1})) > 0 {
					for _, h := range b.take() {
						switch err := b.run(h); {
						case err == nil:
							mu.Lock()
							ran++
							mu.Unlock()
						case !errors.Is(err, inbox.ErrHeadLost): // an operator was faster
							assert.NoError(b, err)
						}
					}
				}
			})
			wg.Go(func() {
				for i, c := range slices.Backward(chosen) {
					act := b.op.Replay
					if i%2 == 0 {
						act = b.op.Discard
					}
					switch err := act(b.Context(), c, me); {
					case err == nil:
						mu.Lock()
						if changed++; changed == 1 {
							close(begun)
						}
						mu.Unlock()
					case !errors.Is(err, inbox.ErrNotHeld) && !errors.Is(err, inbox.ErrChanged):
						assert.NoError(b, err)
					}
				}
			})
		}
		wg.Wait()
		require.Positive(b, changed)
		require.Positive(b, ran)
		require.Zero(b, b.count(`SELECT count(*) FROM processed_messages e JOIN processed_messages l ON e.state = 0 AND l.state = 0
			AND e.message_id < l.message_id AND e.processed_at > l.processed_at
			AND CAST(substr(e.message_id, 2) AS INTEGER) % 3 = CAST(substr(l.message_id, 2) AS INTEGER) % 3`), "messages of one key out of order")
	})
}
