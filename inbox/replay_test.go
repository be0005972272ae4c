package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/inbox"
)

// deadOnes holds n dead messages without a key, and as many of one key.
func (b *bench) deadOnes(n int) []inbox.Choice {
	b.Helper()
	for i := range n {
		b.hold(held(fmt.Sprintf("free%02d", i), ""), inbox.ReasonDead, true, 0)
		b.hold(held(fmt.Sprintf("keyed%02d", i), "k"), inbox.ReasonDead, true, 0)
	}
	return b.choose(inbox.HeldFilter{})
}

func TestReplayAllKeepsItsPace(t *testing.T) {
	t.Parallel()
	onAllStores(t, func(b *bench) {
		const n, inFlight = 8, 3
		chosen := b.deadOnes(n)
		seen := map[int64]int{}
		answer := make(chan error, 1)
		begin := time.Now()
		go func() {
			tried, err := b.op.ReplayAll(b.Context(), chosen, me, inbox.Pace{Rate: 50, InFlight: inFlight, Each: func(c inbox.Choice, err error) {
				seen[c.Seq]++
				if err != nil {
					b.Errorf("%d: %v", c.Seq, err)
				}
			}})
			if tried != len(chosen) {
				err = errors.Join(err, fmt.Errorf("%d tried", tried))
			}
			answer <- err
		}()
		most := 0
		for done := 0; done < 2*n; {
			most = max(most, b.count(`SELECT count(*) FROM held_messages WHERE due_at IS NOT NULL`))
			for _, h := range b.take() {
				require.NoError(b, b.run(h))
				done++
			}
		}
		require.NoError(b, <-answer)
		require.LessOrEqual(b, most, inFlight)
		require.GreaterOrEqual(b, time.Since(begin), (2*n-1)*time.Second/50)
		require.Len(b, seen, 2*n)
		require.Empty(b, b.list(inbox.HeldFilter{}))
	})
}

// A key whose first is dead and not chosen keeps what is replayed behind it waiting:
// that must not use up the flight.
func TestReplayAllDoesNotWaitForWhatCannotRun(t *testing.T) {
	t.Parallel()
	onAllStores(t, func(b *bench) {
		for i := range 5 {
			b.hold(held(fmt.Sprint("m", i), "k"), inbox.ReasonDead, true, 0)
		}
		chosen := b.choose(inbox.HeldFilter{})[1:]
		tried, err := b.op.ReplayAll(b.Context(), chosen, me, inbox.Pace{InFlight: 1})
		require.NoError(b, err)
		require.Equal(b, 4, tried)
		require.Empty(b, b.take())
	})
}

// Interrupted while nobody runs what it has replayed, and given again: each once.
func TestReplayAllIsInterruptedBetweenMessages(t *testing.T) {
	t.Parallel()
	onAllStores(t, func(b *bench) {
		b.hold(&brokers.Message{Topic: "orders", Payload: []byte("nameless")}, inbox.ReasonNoID, true, 0)
		chosen := b.deadOnes(4)
		ctx, cancel := context.WithCancel(b.Context())
		var outcomes []error
		each := func(_ inbox.Choice, err error) { outcomes = append(outcomes, err) }
		go func() {
			for b.count(`SELECT count(*) FROM held_messages WHERE NOT dead`) < 2 {
			}
			cancel()
		}()
		tried, err := b.op.ReplayAll(ctx, chosen, me, inbox.Pace{InFlight: 2, Each: each})
		require.ErrorIs(b, err, context.Canceled)
		require.Equal(b, 3, tried, "one that cannot be replayed, and two")
		require.Len(b, outcomes, 3)
		require.ErrorIs(b, outcomes[0], inbox.ErrNotReplayable)
		require.Equal(b, 2, b.count(`SELECT count(*) FROM held_messages WHERE NOT dead`))
		require.Equal(b, 2, b.count(`SELECT count(*) FROM twiceproof_audit`))

		outcomes = nil
		tried, err = b.op.ReplayAll(b.Context(), chosen, me, inbox.Pace{Each: each})
		require.NoError(b, err)
		require.Equal(b, len(chosen), tried)
		require.ErrorIs(b, outcomes[1], inbox.ErrChanged)
		require.ErrorIs(b, outcomes[2], inbox.ErrChanged)
		for _, err := range outcomes[3:] {
			require.NoError(b, err)
		}
		require.Equal(b, len(chosen)-1, b.count(`SELECT count(*) FROM twiceproof_audit`), "nothing twice")
	})
}
