package memory

import (
	"context"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
)

// The coordinator checks member and generation, not ownership, as Apache Kafka's
// does: what keeps a Source from moving a foreign offset is its own fence.
func TestCoordinatorAcceptsCommitsOfForeignPartitions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := New(Config{})
		b.Topic("t", TopicConfig{Partitions: 2})
		a, c := b.Source("t").(*topicSource), b.Source("t").(*topicSource)
		for _, s := range []*topicSource{a, c} {
			_, err := s.Open(t.Context(), brokers.OpenOptions{})
			require.NoError(t, err)
			defer s.Close(context.Background())
		}
		<-time.After(10 * time.Second)
		b.mu.Lock()
		defer b.mu.Unlock()
		require.Equal(t, 0, a.lanes[0].p.n)
		assert.NoError(t, a.g.commit(time.Now(), a.m, a.generation, []offset{{part: 1, next: 0}}))
		assert.ErrorIs(t, a.g.commit(time.Now(), a.m, a.generation-1, []offset{{part: 0, next: 0}}), errGeneration)
		a.m.gone = true
		assert.ErrorIs(t, a.g.commit(time.Now(), a.m, a.generation, nil), errUnknownMember)
		a.m.gone = false
	})
}

func TestLineKeepsItsOrder(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(1, 2))
	var l line
	var model, out []*item
	pos := int64(0)
	for range 20_000 {
		switch n := r.IntN(10); {
		case n < 4:
			it := &item{pos: pos}
			pos++
			l.insert(it)
			model = append(model, it)
		case n < 6 && len(out) > 0:
			i := r.IntN(len(out))
			l.insert(out[i])
			model = append(model, out[i])
			slices.SortFunc(model, func(a, b *item) int { return int(a.pos - b.pos) })
			out = slices.Delete(out, i, i+1)
		case n < 7 && len(model) > 0:
			i := r.IntN(len(model))
			l.remove(model[i])
			model = slices.Delete(model, i, i+1)
		case len(model) > 0:
			i := min(r.IntN(8), len(model)-1)
			it := l.take(i)
			require.Same(t, model[i], it)
			model = slices.Delete(model, i, i+1)
			out = append(out, it)
		}
		require.Equal(t, len(model), l.len())
	}
	for i := range model {
		require.Same(t, model[i], l.at(i))
	}
}

func TestScheduleKeepsItsOrder(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(3, 4))
	q := newQueue(New(Config{}), "q", QueueConfig{})
	var all []*item
	base := time.Now()
	for i := range 5000 {
		switch n := r.IntN(10); {
		case n < 5:
			it := &item{pos: int64(i), at: base.Add(time.Duration(r.IntN(1000)))}
			q.hidden.push(it)
			all = append(all, it)
		case n < 7 && len(all) > 0:
			it := all[r.IntN(len(all))]
			it.at = base.Add(time.Duration(r.IntN(1000)))
			q.hidden.fix(it.hidden - 1)
		case len(all) > 0:
			i := r.IntN(len(all))
			q.hidden.remove(all[i].hidden)
			require.Zero(t, all[i].hidden)
			all = slices.Delete(all, i, i+1)
		}
		require.Equal(t, len(all), q.hidden.len())
		if len(all) > 0 {
			first := slices.MinFunc(all, func(a, b *item) int {
				if c := a.at.Compare(b.at); c != 0 {
					return c
				}
				return int(a.pos - b.pos)
			})
			require.Same(t, first, q.hidden.a[0])
		}
	}
}

// Check finds what it promises to find.
func TestCheckSeesLosses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := New(Config{Seed: 1})
		pub := b.Publisher()
		b.Topic("t", TopicConfig{})
		b.Channel("r", ChannelConfig{})
		for _, name := range []string{"q", "r", "t"} {
			pub.Publish(t.Context(), &brokers.Message{ID: "x", Topic: name})
		}
		require.NoError(t, b.Check())
		b.dests["q"].(*queue).ready.take(0)
		b.dests["r"].(*channel).ready.take(0)
		b.dests["t"].(*topic).group("g").committed[0] = 7
		err := b.Check()
		assert.ErrorContains(t, err, "q: 1 messages came in")
		assert.ErrorContains(t, err, "r: 1 messages came in")
		assert.ErrorContains(t, err, "beyond the end")
	})
}

func TestCheckSeesCommitsPastUnfinishedMessages(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := New(Config{Seed: 1})
		b.Topic("t", TopicConfig{})
		s := b.Source("t").(*topicSource)
		_, err := s.Open(t.Context(), brokers.OpenOptions{})
		require.NoError(t, err)
		defer s.Close(context.Background())
		b.Publisher().Publish(t.Context(), &brokers.Message{ID: "x", Topic: "t"})
		_, err = s.Receive(t.Context(), 1)
		require.NoError(t, err)
		b.mu.Lock()
		require.NoError(t, s.g.commit(time.Now(), s.m, s.generation, []offset{{0, 1}}))
		require.NoError(t, s.g.commit(time.Now(), s.m, s.generation, []offset{{0, 0}}))
		b.mu.Unlock()
		err = b.Check()
		assert.ErrorContains(t, err, "0 is not finished")
		assert.ErrorContains(t, err, "commits 0 after 1")
	})
}
