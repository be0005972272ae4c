package kafka

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
)

// worker handles what a Source hands over, each message for a random while and many at
// once, until ctx ends, as a runner does: what is Draining is not started, what has
// started is settled.
type worker struct {
	src   brokers.Source
	slow  time.Duration
	ended chan struct{}

	mu   *sync.Mutex
	seen map[string]int // settlements that were accepted, by message
	lost *int
}

func (w *worker) run(ctx context.Context, t *testing.T) {
	defer close(w.ended)
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		ds, err := w.src.Receive(ctx, 64)
		if err != nil {
			if ctx.Err() == nil && !errors.Is(err, brokers.ErrClosed) {
				t.Errorf("receive: %v", err)
			}
			return
		}
		for _, d := range ds {
			wg.Go(func() {
				select {
				case <-d.Draining:
					_ = w.src.Settle(context.Background(), brokers.Settlement{Delivery: d, Verb: brokers.Release})
					return
				default:
				}
				sleep(context.Background(), rand.N(w.slow))
				ctx, cancel := context.WithTimeout(context.Background(), patience)
				defer cancel()
				err := w.src.Settle(ctx, brokers.Settlement{Delivery: d, Verb: brokers.Done})[0]
				w.mu.Lock()
				defer w.mu.Unlock()
				switch {
				case err == nil:
					w.seen[d.ID]++
				case errors.Is(err, brokers.ErrOwnershipLost), errors.Is(err, brokers.ErrClosed):
					*w.lost++
				default:
					t.Logf("settle %s: %v", d.ID, err)
				}
			})
		}
	}
}

// Four members come and go every half second or so, under load.
func TestThePositionNeverMovesBack(t *testing.T) {
	t.Parallel()
	const partitions, n = 4, 12000
	r := newRig(t, partitions)
	for p := range partitions {
		r.put(p, p*n/partitions, (p+1)*n/partitions)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()

	var watch sync.WaitGroup
	watching, stopWatch := context.WithCancel(ctx)
	watch.Go(func() {
		var at [partitions]int64
		for watching.Err() == nil {
			for p := range partitions {
				got, err := r.tryCommitted(p)
				if err != nil || got <= 0 && at[p] == 0 {
					continue // the group is not there yet
				}
				if got < at[p] {
					t.Errorf("partition %d: the committed offset moved from %d back to %d", p, at[p], got)
				}
				at[p] = max(at[p], got)
			}
			sleep(watching, 20*time.Millisecond)
		}
	})

	mu, seen, lost := &sync.Mutex{}, map[string]int{}, 0
	left := func() int { mu.Lock(); defer mu.Unlock(); return n - len(seen) }
	var members sync.WaitGroup
	joins := 0
	for round := 0; left() > 0 && ctx.Err() == nil; round++ {
		s := r.make()
		_, err := s.Open(ctx, brokers.OpenOptions{Consumer: "churn", Room: 64})
		require.NoError(t, err)
		joins++
		members.Go(func() {
			life, end := context.WithTimeout(ctx, time.Second+rand.N(time.Second))
			defer end()
			w := &worker{src: s, slow: 40 * time.Millisecond, ended: make(chan struct{}), mu: mu, seen: seen, lost: &lost}
			go w.run(life, t)
			<-w.ended
			closeWithin(t, s.Close)
		})
		sleep(ctx, 300*time.Millisecond)
	}
	members.Wait()
	stopWatch()
	watch.Wait()
	assert.Zero(t, left(), "messages without an accepted settlement")
	for p := range partitions {
		assert.EqualValues(t, n/partitions, r.committed(p), "partition %d", p)
	}
	t.Logf("%d joins, %d settlements that came too late", joins, lost)
	assert.Greater(t, joins, 4, "nobody came and went")
}

// The fault of kafka-go's Reader: a member that lost its partition commits late.
func TestALateSettlementMovesNothing(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	r.put(0, 0, 10)
	a, ev := r.source(10, func(c *SourceConfig) { c.DrainFor = 300 * time.Millisecond })
	held := receive(t, a, 10)
	done(t, a, held[0])
	r.commits(0, 1)
	r.evict(a)
	select {
	case <-held[5].Context.Done():
	case <-time.After(patience):
		t.Fatal("the context of a lost delivery did not end")
	}
	require.ErrorIs(t, context.Cause(held[5].Context), brokers.ErrOwnershipLost)

	b, _ := r.source(10)
	var got []*brokers.Delivery
	closeWithin(t, a.Close) // or it may be the one that has the partition again
	got = receive(t, b, 9)
	require.Equal(t, idsFrom(1, 10), ids(got))
	done(t, b, got[:6]...)
	r.commits(0, 7)
	for _, err := range a.Settle(t.Context(), settlements(brokers.Done, held[1:]...)...) {
		require.Error(t, err)
		require.True(t, errors.Is(err, brokers.ErrOwnershipLost) || errors.Is(err, brokers.ErrClosed), "%v", err)
	}
	require.EqualValues(t, 7, r.committed(0))
	ev.wait(t, brokers.EventSettleLost, 1)
}

// A message that is handled for longer than the session lasts keeps its partition
// while the others wait for it.
func TestADrainLongerThanASessionKeepsTheMembership(t *testing.T) {
	t.Parallel()
	r := newRig(t, 2)
	r.put(0, 0, 5)
	r.put(1, 5, 10)
	long := func(c *SourceConfig) {
		c.SessionTimeout, c.HeartbeatInterval, c.RebalanceTimeout, c.DrainFor = time.Second, 200*time.Millisecond, 20*time.Second, 10*time.Second
	}
	a, ev := r.source(10, long)
	held := receive(t, a, 10)
	before := r.members()

	opened := make(chan *Source)
	go func() {
		b := r.make(long)
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		_, err := b.Open(ctx, brokers.OpenOptions{Consumer: "b", Room: 10})
		assert.NoError(t, err)
		opened <- b
	}()
	select {
	case <-held[0].Draining:
	case <-time.After(patience):
		t.Fatal("the lane is not draining")
	}
	sleep(t.Context(), 3*time.Second) // three sessions long
	for _, d := range held {
		require.NoError(t, context.Cause(d.Context), "ownership ended within DrainFor")
	}
	done(t, a, held...)
	b := <-opened
	t.Cleanup(func() { closeWithin(t, b.Close) })
	r.commits(0, 5)
	r.commits(1, 5)
	require.Subset(t, r.members(), before, "the member was evicted")
	require.Empty(t, ev.of(brokers.EventSettleLost))
}

// While Draining what has not started is given back, and nothing is lost by it.
func TestReleaseIsForDrainingAlone(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	r.put(0, 0, 6)
	a, _ := r.source(6)
	held := receive(t, a, 6)
	require.ErrorIs(t, a.Settle(t.Context(), settlements(brokers.Release, held[0])...)[0], brokers.ErrUnsupported)
	opened := make(chan *Source)
	go func() {
		b := r.make()
		_, err := b.Open(context.Background(), brokers.OpenOptions{Consumer: "b", Room: 10})
		assert.NoError(t, err)
		opened <- b
	}()
	select {
	case <-held[0].Draining:
	case <-time.After(patience):
		t.Fatal("the lane is not draining")
	}
	done(t, a, held[0], held[1])
	for _, err := range a.Settle(t.Context(), settlements(brokers.Release, held[2:]...)...) {
		require.NoError(t, err)
	}
	began := time.Now()
	b := <-opened
	assert.Less(t, time.Since(began), 3*time.Second, "the drain did not end with the last settlement")
	closeWithin(t, a.Close)
	got := receive(t, b, 4)
	require.Equal(t, idsFrom(2, 6), ids(got))
	done(t, b, got...)
	r.commits(0, 6)
	closeWithin(t, b.Close)
}

// One message that does not finish holds back its partition, at the span, and no other.
func TestAStuckMessageStopsItsPartitionAtTheSpan(t *testing.T) {
	t.Parallel()
	r := newRig(t, 2)
	r.put(0, 0, 200)
	r.put(1, 200, 400)
	s, _ := r.source(1000, func(c *SourceConfig) { c.MaxLaneSpan = 50 })
	var stuck *brokers.Delivery
	seen := map[string]int{}
	var other int
	for other < 200 || seen[r.topic+"/0"] < 50 {
		for _, d := range receive(t, s, 1) {
			seen[d.Lane.Name]++
			if d.Lane.Name == r.topic+"/0" && stuck == nil {
				stuck = d
				continue
			}
			done(t, s, d)
			if d.Lane.Name == r.topic+"/1" {
				other++
			}
		}
	}
	require.Equal(t, map[string]int{r.topic + "/0": 50, r.topic + "/1": 200}, seen)
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Second) // more than a session
	defer cancel()
	_, err := s.Receive(ctx, 10)
	require.ErrorIs(t, err, context.DeadlineExceeded, "handed over beyond the span")
	require.NoError(t, context.Cause(stuck.Context), "the membership ended meanwhile")
	require.EqualValues(t, 0, r.committed(0))
	done(t, s, stuck)
	r.commits(0, 50)
	for i := 50; i < 200; i += 50 {
		done(t, s, receive(t, s, 50)...)
	}
	r.commits(0, 200)
}

func TestNewPartitionsAreFound(t *testing.T) {
	t.Parallel()
	r := newRig(t, 2)
	r.put(0, 0, 3)
	a, _ := r.source(10)
	b, _ := r.source(10)
	var mu sync.Mutex
	lanes, seen := map[string]bool{}, map[string]bool{}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	for _, s := range []*Source{a, b} {
		wg.Go(func() {
			for {
				ds, err := s.Receive(ctx, 10)
				if err != nil {
					return
				}
				mu.Lock()
				for _, d := range ds {
					lanes[d.Lane.Name], seen[d.ID] = true, true
				}
				mu.Unlock()
				s.Settle(ctx, settlements(brokers.Done, ds...)...)
			}
		})
	}
	adminOf(t, r.brokers).addPartitions(r.topic, 5)
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		n, err := a.c.partitions(ctx, []string{r.topic})
		assert.NoError(c, err)
		assert.Equal(c, 5, n[r.topic])
	}, patience, 50*time.Millisecond)
	require.Eventually(t, func() bool {
		res, err := r.admin.ListOffsets(ctx, listLast(r.topic, 4))
		return err == nil && res.Topics[r.topic][0].Error == nil
	}, patience, 50*time.Millisecond)
	for p := range 5 {
		r.put(p, 10*p+10, 10*p+13)
	}
	require.Eventually(t, func() bool { mu.Lock(); defer mu.Unlock(); return len(seen) == 3+15 && len(lanes) == 5 }, patience, 20*time.Millisecond)
}

// Latest is decided once: what comes before the first message is handled, rebalance or
// not, is not skipped.
func TestLatestIsCommittedAtOnce(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	r.put(0, 0, 5)
	latest := func(c *SourceConfig) { c.Start = Latest }
	a, _ := r.source(10, latest)
	r.commits(0, 5)
	closeWithin(t, a.Close)
	r.put(0, 5, 8)
	b, _ := r.source(10, latest)
	require.Equal(t, idsFrom(5, 8), ids(receive(t, b, 3)))
}

func TestCloseLeavesTheGroup(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	r.put(0, 0, 5)
	a, _ := r.source(10, func(c *SourceConfig) { c.SessionTimeout, c.RebalanceTimeout = 20*time.Second, 20*time.Second })
	held := receive(t, a, 5)
	done(t, a, held[:2]...)
	closeWithin(t, a.Close)
	for _, d := range held[2:] {
		require.ErrorIs(t, context.Cause(d.Context), brokers.ErrClosed)
	}
	began := time.Now()
	b, _ := r.source(10)
	require.Equal(t, idsFrom(2, 5), ids(receive(t, b, 3)))
	require.Less(t, time.Since(began), 10*time.Second, "the group waited for the session of a member that had left")
}

func TestPausedLanesKeepTheirOwnership(t *testing.T) {
	t.Parallel()
	r := newRig(t, 2)
	r.put(0, 0, 3)
	r.put(1, 3, 6)
	s, _ := r.source(10)
	s.Pause(r.topic + "/0")
	got := receive(t, s, 3)
	require.ElementsMatch(t, idsFrom(3, 6), ids(got))
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	_, err := s.Receive(ctx, 1)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	s.Resume(r.topic + "/0")
	require.ElementsMatch(t, idsFrom(0, 3), ids(receive(t, s, 3)))
}

func TestStatusCountsTheLag(t *testing.T) {
	t.Parallel()
	r := newRig(t, 2)
	r.put(0, 0, 7)
	s, _ := r.source(3)
	done(t, s, receive(t, s, 3)...)
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		st, err := s.Status(t.Context())
		assert.NoError(c, err)
		assert.True(c, st.Connected)
		assert.Len(c, st.Lanes, 2)
		assert.EqualValues(c, 4, st.Lag())
	}, patience, 20*time.Millisecond)
}
