package rabbitmq

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
)

func want(from, to int) (ids []string) {
	for i := from; i < to; i++ {
		ids = append(ids, id(i))
	}
	return ids
}

// While nobody receives, because the consumer's database is out, say, what is held for
// too long goes back once, and not again and again: each time counts against the
// delivery limit.
func TestWhatNobodyReceivesGoesBackOnce(t *testing.T) {
	t.Parallel()
	for name, sac := range map[string]bool{"competing consumers": false, "single active consumer": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			const hold = 300 * time.Millisecond
			s, _, _ := r.source(20, func(c *SourceConfig) { c.Topology, c.MaxHold, c.SingleActiveConsumer = Declare, hold, sac })
			r.put(0, 10)
			inHand := receive(t, s, 5) // and five that wait for the next Receive
			begun := time.Now()
			r.ready(r.queue, 10)
			<-time.After(time.Until(begun.Add(6 * hold)))
			r.ready(r.queue, 10)
			require.ErrorIs(t, s.Settle(t.Context(), settlements(brokers.Done, inHand[0])...)[0], brokers.ErrOwnershipLost)
			again := receive(t, s, 10)
			assert.ElementsMatch(t, ids(again), want(0, 10))
			for _, d := range again {
				assert.LessOrEqual(t, d.Attempt, 2, d.ID)
			}
			settle(t, s, brokers.Done, again...)
			r.ready(r.queue, 0)
		})
	}
}

// A runner that has to give something back, and does not receive, gets nothing of it
// until it does. What it has kept in hand stays its own.
func TestReleaseWhileNobodyReceivesRests(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.declare(nil)
	s, _, _ := r.source(20)
	r.put(0, 10)
	ds := receive(t, s, 10)
	settle(t, s, brokers.Release, ds[2:]...)
	r.ready(r.queue, 8)
	r.put(10, 15)
	r.ready(r.queue, 13)
	settle(t, s, brokers.Done, ds[:2]...)
	again := receive(t, s, 13)
	assert.ElementsMatch(t, ids(again), want(2, 15))
	settle(t, s, brokers.Done, again...)
	r.ready(r.queue, 0)
}
