package memory_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/brokers/memory"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
)

// events collects what an Observer hears.
type events struct {
	mu  sync.Mutex
	all []brokers.Event
}

func (e *events) observe(ev brokers.Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.all = append(e.all, ev)
}

func (e *events) of(k brokers.EventKind) (some []brokers.Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, ev := range e.all {
		if ev.Kind == k {
			some = append(some, ev)
		}
	}
	return some
}

func count(b *memory.Broker, op string) (n int) {
	for _, e := range b.History() {
		if e.Op == op {
			n++
		}
	}
	return n
}

// A drain of three session timeouts survives on the commits that keep it alive.
func TestLongDrainKeepsItsMembership(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := memory.New(memory.Config{Seed: 1})
		b.Topic("t", memory.TopicConfig{SessionTimeout: 6 * time.Second, HeartbeatEvery: time.Second})
		a := open(t, b, "t", 10, memory.DrainFor(30*time.Second))
		publish(t, b, "t", 3)
		ds := receive(t, a, 3)
		open(t, b, "t", 10)
		<-ds[0].Draining
		publish(t, b, "t", 1)
		nothing(t, a, time.Second) // it starts nothing more
		t0 := time.Now()
		<-time.After(18 * time.Second)
		for _, d := range ds {
			assert.NoError(t, cause(d))
			assert.NoError(t, settle(a, d, brokers.Done))
		}
		assert.EqualValues(t, 3, b.Committed("t", "default", 0))
		<-ds[0].Context.Done()
		assert.Less(t, time.Since(t0), 19*time.Second, "with nothing in hand the drain is over")
		assert.Zero(t, count(b, "evict"))
		require.NoError(t, b.Check())
	})
}

// Nothing keeps a member beyond the rebalance timeout: the others go on without it,
// and it learns of that when it next commits.
func TestDrainBeyondTheRebalanceTimeoutIsEvicted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := memory.New(memory.Config{Seed: 1})
		b.Topic("t", memory.TopicConfig{SessionTimeout: 6 * time.Second, HeartbeatEvery: time.Second, RebalanceTimeout: 15 * time.Second})
		a := open(t, b, "t", 10, memory.DrainFor(time.Minute))
		publish(t, b, "t", 1)
		old := receive(t, a, 1)[0]
		c := open(t, b, "t", 10)
		t0 := time.Now()
		again := receive(t, c, 1)[0]
		assert.InDelta(t, 15, time.Since(t0).Seconds(), 1)
		assert.Equal(t, old.ID, again.ID)
		<-old.Context.Done()
		assert.ErrorIs(t, cause(old), brokers.ErrOwnershipLost)
		assert.ErrorIs(t, settle(a, old, brokers.Done), brokers.ErrOwnershipLost)
		assert.EqualValues(t, 0, b.Committed("t", "default", 0))
		<-again.Draining // a is back
		require.NoError(t, settle(c, again, brokers.Done))
		assert.EqualValues(t, 1, b.Committed("t", "default", 0))
		assert.Equal(t, 1, count(b, "evict"))
		require.NoError(t, b.Check())
	})
}

// A member that was evicted does not know it: its next commit is refused, moves
// nothing, and it fences itself. segmentio/kafka-go#1308 moved the offset back.
func TestEvictedMemberCannotMoveTheOffset(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := memory.New(memory.Config{})
		b.Topic("t", memory.TopicConfig{})
		a, c := b.Source("t"), b.Source("t")
		var heard events
		_, err := a.Open(t.Context(), brokers.OpenOptions{Observer: heard.observe})
		require.NoError(t, err)
		defer a.Close(context.Background())
		publish(t, b, "t", 5)
		old := receive(t, a, 5)
		b.EvictMember(a)
		_, err = c.Open(t.Context(), brokers.OpenOptions{})
		require.NoError(t, err)
		defer c.Close(context.Background())
		mine := receive(t, c, 5)
		for _, d := range mine {
			require.NoError(t, settle(c, d, brokers.Done))
		}
		require.EqualValues(t, 5, b.Committed("t", "default", 0))
		assert.NoError(t, cause(old[0]), "it does not know yet")
		assert.ErrorIs(t, settle(a, old[0], brokers.Done), brokers.ErrOwnershipLost)
		assert.ErrorIs(t, cause(old[0]), brokers.ErrOwnershipLost)
		assert.ErrorIs(t, settle(a, old[1], brokers.Done), brokers.ErrOwnershipLost)
		assert.EqualValues(t, 5, b.Committed("t", "default", 0))
		assert.Len(t, heard.of(brokers.EventSettleLost), 1)
	})
}

func TestLostOffsetsReplay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := memory.New(memory.Config{Seed: 1})
		b.Topic("t", memory.TopicConfig{})
		src := open(t, b, "t", 10)
		publish(t, b, "t", 3)
		for _, d := range receive(t, src, 3) {
			require.NoError(t, settle(src, d, brokers.Done))
		}
		b.LoseOffsets("t", "default")
		b.Rebalance("t", "default")
		again := receive(t, src, 3)
		assert.Equal(t, []string{"m0", "m1", "m2"}, ids(again))
		assert.Equal(t, "t/0@0", again[0].Coordinates)
		require.NoError(t, b.Check())
	})
}

func TestTruncatedLogIsAGap(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := memory.New(memory.Config{Seed: 1})
		b.Topic("t", memory.TopicConfig{})
		var heard events
		src := openWith(t, b, "t", brokers.OpenOptions{Observer: heard.observe})
		fails := open(t, b, "t", 10, memory.Group("strict"), memory.FailOnGap())
		publish(t, b, "t", 10)
		for _, d := range receive(t, src, 3) {
			require.NoError(t, settle(src, d, brokers.Done))
		}
		b.Truncate("t", 0, 7)
		assert.Equal(t, []string{"m7", "m8", "m9"}, ids(receive(t, src, 3)))
		gaps := heard.of(brokers.EventGap)
		require.Len(t, gaps, 1)
		assert.EqualValues(t, 3, gaps[0].From)
		assert.EqualValues(t, 7, gaps[0].To)

		_, err := fails.Receive(t.Context(), 1)
		assert.Equal(t, brokers.Fatal, brokers.ClassOf(err), "%v", err)
		assert.ErrorContains(t, err, "offsets 0 to 7")
		require.NoError(t, b.Check())
	})
}

// The end of the log is lost below the committed offset: without an answer to that
// a consumer waits in silence for ever (segmentio/kafka-go#891).
func TestCommittedBeyondTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := memory.New(memory.Config{Seed: 1})
		b.Topic("t", memory.TopicConfig{})
		var heard events
		src := openWith(t, b, "t", brokers.OpenOptions{Observer: heard.observe})
		publish(t, b, "t", 5)
		for _, d := range receive(t, src, 5) {
			require.NoError(t, settle(src, d, brokers.Done))
		}
		b.LoseTail("t", 0, 2)
		again := receive(t, src, 2) // from the oldest: inboxes absorb the replay
		assert.Equal(t, []string{"m0", "m1"}, ids(again))
		gaps := heard.of(brokers.EventGap)
		require.Len(t, gaps, 1)
		assert.EqualValues(t, 5, gaps[0].From)
		for _, d := range again {
			require.NoError(t, settle(src, d, brokers.Done))
		}
		assert.EqualValues(t, 2, b.Committed("t", "default", 0))
		require.NoError(t, b.Check())
	})
}

func TestHolesCommitThemselves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := memory.New(memory.Config{Seed: 1})
		b.Topic("t", memory.TopicConfig{HeartbeatEvery: time.Second})
		src := open(t, b, "t", 10)
		publish(t, b, "t", 2)
		b.Gap("t", 0, 5)
		publish(t, b, "t", 1)
		ds := receive(t, src, 3)
		assert.Equal(t, "t/0@7", ds[2].Coordinates)
		for _, d := range ds {
			require.NoError(t, settle(src, d, brokers.Done))
		}
		b.Gap("t", 0, 3) // a transaction marker at the end
		nothing(t, src, 3*time.Second)
		assert.EqualValues(t, 11, b.Committed("t", "default", 0))
		st, err := src.Status(t.Context())
		require.NoError(t, err)
		assert.Zero(t, st.Lag())
		require.NoError(t, b.Check())
	})
}

func TestStuckMessageStopsItsLaneAtTheSpan(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := memory.New(memory.Config{Seed: 1})
		b.Topic("t", memory.TopicConfig{})
		src := open(t, b, "t", 1000, memory.MaxLaneSpan(100))
		publish(t, b, "t", 300)
		stuck := receive(t, src, 1)[0]
		for range 99 {
			require.NoError(t, settle(src, receive(t, src, 1)[0], brokers.Done))
		}
		nothing(t, src, time.Minute)
		assert.Zero(t, b.Committed("t", "default", 0))
		require.NoError(t, settle(src, stuck, brokers.Done))
		assert.EqualValues(t, 100, b.Committed("t", "default", 0))
		assert.Equal(t, "m100", receive(t, src, 1)[0].ID)
		require.NoError(t, b.Check())
	})
}

func TestGroupsReadApart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := memory.New(memory.Config{})
		b.Topic("t", memory.TopicConfig{})
		publish(t, b, "t", 2)
		first := open(t, b, "t", 10, memory.Group("first"))
		second := open(t, b, "t", 10, memory.Group("second"))
		late := open(t, b, "t", 10, memory.Group("late"), memory.StartAtEnd())
		assert.Len(t, receive(t, first, 2), 2)
		assert.Len(t, receive(t, second, 2), 2)
		nothing(t, late, time.Second)
		publish(t, b, "t", 1)
		assert.Equal(t, "t/0@2", receive(t, late, 1)[0].Coordinates)
	})
}

func TestRebalanceTo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := memory.New(memory.Config{})
		b.Topic("t", memory.TopicConfig{Partitions: 3})
		a, c := open(t, b, "t", 10), open(t, b, "t", 10)
		<-time.After(10 * time.Second)
		b.Rebalance("t", "default", []int{2}, []int{0, 1})
		<-time.After(10 * time.Second)
		for src, want := range map[brokers.Source][]string{a: {"t/2"}, c: {"t/0", "t/1"}} {
			st, err := src.Status(t.Context())
			require.NoError(t, err)
			var got []string
			for _, l := range st.Lanes {
				got = append(got, l.Name)
			}
			assert.Equal(t, want, got)
		}
	})
}

// A hundred groups, ten thousand messages each, in less than five seconds of real
// time: no polling, whatever the clock does.
func TestMillionDeliveries(t *testing.T) {
	if testing.Short() {
		devtest.Skip(t, "a million deliveries are not short")
	}
	synctest.Test(t, func(t *testing.T) {
		b := memory.New(memory.Config{})
		b.Topic("t", memory.TopicConfig{Partitions: 4})
		const subs, n = 100, 10_000
		ms := make([]*brokers.Message, n)
		for i := range ms {
			ms[i] = &brokers.Message{ID: fmt.Sprint(i), Topic: "t", Key: fmt.Sprint(i % 97)}
		}
		var wg sync.WaitGroup
		for i := range subs {
			src := open(t, b, "t", 0, memory.Group(fmt.Sprint(i)))
			wg.Go(func() {
				ss := make([]brokers.Settlement, 0, 64)
				for got := 0; got < n; got += len(ss) {
					ds, err := src.Receive(t.Context(), 64)
					if !assert.NoError(t, err) {
						return
					}
					ss = ss[:0]
					for _, d := range ds {
						ss = append(ss, brokers.Settlement{Delivery: d, Verb: brokers.Done})
					}
					src.Settle(t.Context(), ss...)
				}
			})
		}
		accept(t, b, ms...)
		wg.Wait()
		<-time.After(10 * time.Minute) // 20,000 heartbeats, and nothing else wakes
		for i := range subs {
			for p := range 4 {
				assert.NotZero(t, b.Committed("t", fmt.Sprint(i), p))
			}
		}
		require.NoError(t, b.Check())
	})
}
