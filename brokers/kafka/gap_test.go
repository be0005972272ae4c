package kafka

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
)

// Retention has passed the group's offset.
func TestMessagesThatAreGoneAreAGap(t *testing.T) {
	t.Parallel()
	t.Run("skip", func(t *testing.T) {
		t.Parallel()
		r := newRig(t, 1)
		r.put(0, 0, 10)
		r.setCommitted(0, 2)
		r.deleteBefore(0, 6)
		s, ev := r.source(10)
		got := receive(t, s, 4)
		require.Equal(t, idsFrom(6, 10), ids(got))
		gaps := ev.of(brokers.EventGap)
		require.Len(t, gaps, 1)
		require.EqualValues(t, 2, gaps[0].From)
		require.EqualValues(t, 6, gaps[0].To)
		r.commits(0, 6)
		done(t, s, got...)
		r.commits(0, 10)
	})
	t.Run("fail", func(t *testing.T) {
		t.Parallel()
		r := newRig(t, 1)
		r.put(0, 0, 10)
		r.setCommitted(0, 2)
		r.deleteBefore(0, 6)
		s, ev := r.source(10, func(c *SourceConfig) { c.OnGap = GapFail })
		_, err := s.Receive(t.Context(), 1)
		require.Equal(t, brokers.Fatal, brokers.ClassOf(err), "%v", err)
		require.ErrorContains(t, err, "from offset 2 to 6")
		require.Len(t, ev.of(brokers.EventGap), 1)
		require.EqualValues(t, 2, r.committed(0), "nothing was committed over the gap")
	})
	t.Run("while consuming", func(t *testing.T) {
		t.Parallel()
		r := newRig(t, 1)
		r.put(0, 0, 10)
		// A record batch each, so that the fetch ahead does not bring everything.
		for i := 10; i < 60; i++ {
			r.write(0, bigRecord(i))
		}
		s, ev := r.source(100, func(c *SourceConfig) { c.FetchBytes, c.MaxLaneSpan = 64<<10, 20 })
		first := receive(t, s, 20)
		r.deleteBefore(0, 55)
		done(t, s, first...)
		rest := map[string]bool{}
		for !rest[id(59)] {
			for _, d := range receive(t, s, 1) {
				rest[d.ID] = true
				done(t, s, d)
			}
		}
		gaps := ev.wait(t, brokers.EventGap, 1)
		require.EqualValues(t, 55, gaps[0].To)
		for i := 20; i < int(gaps[0].From); i++ {
			require.True(t, rest[id(i)], "%d is neither delivered nor in the gap from %d", i, gaps[0].From)
		}
		r.commits(0, 60)
	})
}

// The group's offset lies beyond the end: the topic was made anew.
func TestAnOffsetBeyondTheEndIsAGap(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		policy ResetPolicy
		to     int64
	}{"earliest": {ResetEarliest, 0}, "latest": {ResetLatest, 5}, "fail": {ResetFail, 0}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, 1)
			r.put(0, 0, 5)
			r.setCommitted(0, 100)
			s, ev := r.source(10, func(cfg *SourceConfig) { cfg.OnReset = c.policy })
			gap := ev.wait(t, brokers.EventGap, 1)[0]
			require.EqualValues(t, 100, gap.From)
			require.EqualValues(t, c.to, gap.To)
			if c.policy == ResetFail {
				_, err := s.Receive(t.Context(), 1)
				require.Equal(t, brokers.Fatal, brokers.ClassOf(err), "%v", err)
				require.EqualValues(t, 100, r.committed(0))
				return
			}
			r.commits(0, c.to) // at once
			r.put(0, 5, 7)
			require.Equal(t, idsFrom(int(c.to), 7), ids(receive(t, s, 7-int(c.to))))
		})
	}
}

// A topic that is deleted and made again while it is consumed.
func TestATopicThatIsMadeAnewIsRead(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	r.put(0, 0, 10)
	s, _ := r.source(20)
	done(t, s, receive(t, s, 10)...)
	r.commits(0, 10)
	_, err := r.admin.DeleteTopics(t.Context(), &kafka.DeleteTopicsRequest{Topics: []string{r.topic}})
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		n, err := s.c.partitions(t.Context(), []string{r.topic})
		return err == nil && n[r.topic] == 0
	}, patience, 20*time.Millisecond)
	r.create(r.topic, 1)
	r.put(0, 20, 25)
	require.Equal(t, idsFrom(20, 25), ids(receive(t, s, 5)))
}

func TestAbortedTransactionsAndMarkersAreNotHandedOver(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	var want []string
	at := 0
	producers := make([]*franz, 4)
	for i := range producers {
		producers[i] = adminOf(t, r.brokers, kgo.TransactionalID(devtest.Name("tx")))
	}
	// Transactions that overlap, every other one aborted; markers at the end.
	for round := range 6 {
		for _, p := range producers {
			require.NoError(t, p.cl.BeginTransaction())
			p.produce(r.topic, 0, at, at+3)
			if round%2 == 0 {
				want = append(want, idsFrom(at, at+3)...)
			}
			at += 3
		}
		for _, p := range producers {
			end := kgo.TryAbort
			if round%2 == 0 {
				end = kgo.TryCommit
			}
			require.NoError(t, p.cl.EndTransaction(p.ctx(), end))
		}
	}
	s, _ := r.source(1000)
	got := receive(t, s, len(want))
	require.Equal(t, want, ids(got))
	for _, d := range got {
		done(t, s, d)
	}
	end := r.end(0)
	require.EqualValues(t, 6*4*(3+1), end, "the log has messages and markers")
	r.commits(0, end) // the markers at the end too
	st, err := s.Status(t.Context())
	require.NoError(t, err)
	require.EqualValues(t, 0, st.Lag())

	// An open transaction holds back what comes after it, and its own messages.
	open := producers[0]
	require.NoError(t, open.cl.BeginTransaction())
	open.produce(r.topic, 0, 900, 901)
	r.put(0, 901, 902)
	ctx, cancel := context.WithTimeout(t.Context(), 700*time.Millisecond)
	defer cancel()
	_, err = s.Receive(ctx, 1)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.NoError(t, open.cl.EndTransaction(open.ctx(), kgo.TryCommit))
	require.Equal(t, idsFrom(900, 902), ids(receive(t, s, 2)))
}

func TestReadUncommittedHandsOverEverythingButMarkers(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	p := adminOf(t, r.brokers, kgo.TransactionalID(devtest.Name("tx")))
	p.transaction(r.topic, 0, 0, 3, false)
	p.transaction(r.topic, 0, 3, 6, true)
	s, _ := r.source(10, func(c *SourceConfig) { c.ReadUncommitted = true })
	got := receive(t, s, 6)
	require.Equal(t, idsFrom(0, 6), ids(got))
	done(t, s, got...)
	r.commits(0, 8)
}

// Compaction leaves holes before, in and behind batches; none of them stalls or loops.
func TestCompactedTopics(t *testing.T) {
	t.Parallel()
	for _, codec := range []string{"none", "snappy", "zstd"} {
		t.Run(codec, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, 1, "cleanup.policy", "compact", "segment.ms", "200", "min.cleanable.dirty.ratio", "0.001",
				"max.compaction.lag.ms", "200", "delete.retention.ms", "0", "file.delete.delay.ms", "0")
			comp := map[string]kgo.CompressionCodec{"none": kgo.NoCompression(), "snappy": kgo.SnappyCompression(), "zstd": kgo.ZstdCompression()}[codec]
			p := adminOf(t, r.brokers, kgo.ProducerBatchCompression(comp), kgo.ProducerLinger(50*time.Millisecond))
			// Ten keys over and over, in batches of ten: all but the last of each go.
			put := func(round int) {
				for k := range 10 {
					p.cl.Produce(context.Background(), &kgo.Record{Topic: r.topic, Key: fmt.Append(nil, "k", k), Value: fmt.Append(nil, round),
						Headers: []kgo.RecordHeader{{Key: "message-id", Value: fmt.Appendf(nil, "%d/%d", round, k)}}}, nil)
				}
				require.NoError(t, p.cl.Flush(p.ctx()))
			}
			const rounds = 20
			for i := range rounds {
				put(i)
			}
			sleep(t.Context(), 300*time.Millisecond) // the segment's age
			put(rounds)                              // closes the segment, so that it can be compacted
			count := func() int {
				probe, _ := r.source(1000, func(c *SourceConfig) { c.Group = devtest.Name("probe") })
				defer closeWithin(t, probe.Close)
				n := 0
				for {
					ctx, cancel := context.WithTimeout(t.Context(), 1500*time.Millisecond)
					ds, err := probe.Receive(ctx, 1000)
					cancel()
					if err != nil {
						return n
					}
					seen := map[string]bool{}
					for _, d := range ds {
						assert.False(t, seen[d.Coordinates], "%s twice", d.Coordinates)
						seen[d.Coordinates] = true
					}
					n += len(ds)
				}
			}
			compacted := false
			for range 15 {
				if n := count(); n < rounds*10/2 {
					compacted = true
					break
				}
				put(rounds) // more to close a segment with
				sleep(t.Context(), 500*time.Millisecond)
			}
			require.True(t, compacted, "the broker's cleaner did not run")
			s, _ := r.source(1000)
			last := map[string]string{}
			end := r.end(0)
			for len(last) < 10 || r.committed(0) < end {
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				ds, _ := s.Receive(ctx, 1000)
				cancel()
				for _, d := range ds {
					last[d.Key] = string(d.Payload)
				}
				done(t, s, ds...)
			}
			for k, v := range last {
				assert.Equal(t, fmt.Sprint(rounds), v, "key %s", k)
			}
		})
	}
}

// A topic that is misspelt is an error, and is not created by looking at it.
func TestAMissingTopicIsFatalAndNotCreated(t *testing.T) {
	t.Parallel()
	r := newRig(t, 0)
	s := r.make()
	_, err := s.Open(t.Context(), brokers.OpenOptions{Consumer: "x"})
	require.ErrorIs(t, err, brokers.ErrNoRoute)
	require.Equal(t, brokers.Fatal, brokers.ClassOf(err))
	require.ErrorContains(t, err, r.topic)
	res, err := r.admin.Metadata(t.Context(), &kafka.MetadataRequest{Topics: []string{r.topic}})
	require.NoError(t, err)
	require.ErrorIs(t, res.Topics[0].Error, kafka.UnknownTopicOrPartition)
}

// One of several topics is deleted and does not come back.
func TestATopicThatIsDeletedIsFatalAfterAWhile(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	s, _ := r.source(10, func(c *SourceConfig) { c.MissingFor = time.Second; c.WatchInterval = 200 * time.Millisecond })
	_, err := r.admin.DeleteTopics(t.Context(), &kafka.DeleteTopicsRequest{Topics: []string{r.topic}})
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	_, err = s.Receive(ctx, 1)
	require.ErrorIs(t, err, brokers.ErrNoRoute)
	require.Equal(t, brokers.Fatal, brokers.ClassOf(err))
}
