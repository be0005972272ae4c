package kafka

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/sasl/plain"
	"github.com/segmentio/kafka-go/sasl/scram"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/brokers/brokertest"
)

// What a healthy broker does not do on demand is asked of kfake, a Kafka in the process.

func newFake(t *testing.T, opts ...kfake.Opt) *kfake.Cluster {
	t.Helper()
	c, err := kfake.NewCluster(append([]kfake.Opt{kfake.NumBrokers(3), kfake.GroupMinSessionTimeout(100 * time.Millisecond)}, opts...)...)
	require.NoError(t, err)
	t.Cleanup(c.Close)
	return c
}

// fakeRig is a rig on a cluster of its own.
func fakeRig(t *testing.T, partitions int, opts ...kfake.Opt) (*rig, *kfake.Cluster) {
	t.Helper()
	c := newFake(t, opts...)
	return newRigOn(t, c.ListenAddrs(), partitions), c
}

func TestConformanceOnKfake(t *testing.T) {
	t.Parallel()
	c := newFake(t)
	brokertest.Run(t, brokertest.Config{
		Expected: "testdata/conformance.txt",
		Parallel: true, Wait: 30 * time.Second, Lease: 3 * time.Second,
		New: func(t *testing.T) brokertest.Fixture { return newRigOn(t, c.ListenAddrs(), 3).fixture() },
	})
}

func fault(key kmsg.Key, err *kerr.Error, count int) kfake.Fault {
	return kfake.Fault{Keys: []kmsg.Key{key}, Err: err, Count: count}
}

// An error of a moment does not reach the caller.
func TestACommitIsTriedAgainWhereTheCoordinatorIsAwayForAMoment(t *testing.T) {
	t.Parallel()
	for _, code := range []*kerr.Error{kerr.NotCoordinator, kerr.CoordinatorLoadInProgress, kerr.CoordinatorNotAvailable} {
		t.Run(code.Message, func(t *testing.T) {
			t.Parallel()
			r, c := fakeRig(t, 1)
			r.put(0, 0, 3)
			s, _ := r.source(10)
			got := receive(t, s, 3)
			h := c.Fault(fault(kmsg.OffsetCommit, code, 1))
			done(t, s, got...)
			require.Equal(t, 1, h.Hits())
			r.commits(0, 3)
		})
	}
}

// The group's word that the generation is over ends the ownership at once, and the
// member comes back.
func TestARefusedCommitEndsTheOwnership(t *testing.T) {
	t.Parallel()
	for _, code := range []*kerr.Error{kerr.IllegalGeneration, kerr.UnknownMemberID, kerr.RebalanceInProgress} {
		t.Run(code.Message, func(t *testing.T) {
			t.Parallel()
			r, c := fakeRig(t, 1)
			r.put(0, 0, 3)
			s, ev := r.source(10)
			got := receive(t, s, 3)
			c.Fault(fault(kmsg.OffsetCommit, code, 1))
			require.ErrorIs(t, s.Settle(t.Context(), settlements(brokers.Done, got[0])...)[0], brokers.ErrOwnershipLost)
			require.ErrorIs(t, context.Cause(got[1].Context), brokers.ErrOwnershipLost)
			ev.wait(t, brokers.EventSettleLost, 1)
			again := receive(t, s, 3)
			require.Equal(t, ids(got), ids(again))
			require.Greater(t, again[0].Lane.Epoch, got[0].Lane.Epoch)
			done(t, s, again...)
			r.commits(0, 3)
		})
	}
}

func TestWhatTheGroupRefusesForGoodComesOutOfOpen(t *testing.T) {
	t.Parallel()
	for _, code := range []*kerr.Error{kerr.GroupAuthorizationFailed, kerr.InvalidSessionTimeout, kerr.InconsistentGroupProtocol} {
		t.Run(code.Message, func(t *testing.T) {
			t.Parallel()
			r, c := fakeRig(t, 1)
			c.Fault(fault(kmsg.JoinGroup, code, -1))
			s := r.make()
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			_, err := s.Open(ctx, brokers.OpenOptions{Consumer: "x"})
			require.Equal(t, brokers.Fatal, brokers.ClassOf(err), "%v", err)
			require.ErrorContains(t, err, r.group)
		})
	}
}

// Leaders and the coordinator move, and a broker goes for good.
func TestLeadersAndCoordinatorsMove(t *testing.T) {
	t.Parallel()
	const partitions, n = 3, 600
	r, c := fakeRig(t, partitions)
	s, _ := r.source(50)
	p := r.publisher()
	seen := map[string]bool{}
	sent := 0
	for round := range 6 {
		var ms []*brokers.Message
		for range n / 6 {
			ms = append(ms, r.message(sent, id(sent)))
			sent++
		}
		for len(ms) > 0 {
			rs := p.Publish(t.Context(), ms...)
			left := ms[:0]
			for i, m := range ms {
				if rs[i].Outcome != brokers.Accepted {
					require.NotEqual(t, brokers.Fatal, brokers.ClassOf(rs[i].Err), "%v", rs[i].Err)
					left = append(left, m)
				}
			}
			ms = left
		}
		switch round {
		case 1, 3:
			c.ShufflePartitionLeaders()
		case 2:
			c.RehashCoordinators()
		case 4:
			require.NoError(t, c.RemoveNode(c.LeaderFor(r.topic, 0)))
		}
		require.Eventually(t, func() bool {
			ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
			defer cancel()
			ds, _ := s.Receive(ctx, 50)
			for i, err := range s.Settle(t.Context(), settlements(brokers.Done, ds...)...) {
				if err == nil {
					seen[ds[i].ID] = true
				}
			}
			return len(seen) == sent
		}, patience, time.Millisecond, "round %d: %d of %d", round, len(seen), sent)
	}
}

// What the broker answers to a publish, and what it means.
func TestOutcomesOfAPublish(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		code    *kerr.Error
		outcome brokers.Outcome
		class   brokers.Class
	}{
		{kerr.NotLeaderForPartition, brokers.Refused, brokers.Retryable},
		{kerr.LeaderNotAvailable, brokers.Refused, brokers.Retryable},
		{kerr.NotEnoughReplicas, brokers.Refused, brokers.Retryable},
		{kerr.ThrottlingQuotaExceeded, brokers.Refused, brokers.Throttled},
		{kerr.NotEnoughReplicasAfterAppend, brokers.Unknown, brokers.Retryable},
		{kerr.RequestTimedOut, brokers.Unknown, brokers.Retryable},
		{kerr.MessageTooLarge, brokers.Refused, brokers.Permanent},
		{kerr.InvalidRecord, brokers.Refused, brokers.Permanent},
		{kerr.InvalidTimestamp, brokers.Refused, brokers.Permanent},
		{kerr.TopicAuthorizationFailed, brokers.Refused, brokers.Fatal},
	} {
		t.Run(c.code.Message, func(t *testing.T) {
			t.Parallel()
			r, f := fakeRig(t, 1)
			p := r.publisher(func(c *PublisherConfig) { c.BatchMessages = 1 })
			f.Fault(fault(kmsg.Produce, c.code, 1))
			rs := p.Publish(t.Context(), r.message(0, "k"), r.message(1, "k"), r.message(2, "k"))
			require.Equal(t, c.outcome, rs[0].Outcome, "%v", rs[0].Err)
			require.Equal(t, c.class, brokers.ClassOf(rs[0].Err), "%v", rs[0].Err)
			for _, r := range rs[1:] {
				require.Equal(t, brokers.NotSent, r.Outcome, "nothing of a key after what was not accepted")
				require.Error(t, r.Err)
			}
			rs = p.Publish(t.Context(), r.message(0, "k"), r.message(1, "k"), r.message(2, "k"))
			require.Equal(t, map[brokers.Outcome]int{brokers.Accepted: 3}, outcomes(rs))
			s, _ := r.source(10)
			want := idsFrom(0, 3)
			if c.outcome == brokers.Unknown { // it was stored, as it may be
				want = slices.Concat(idsFrom(0, 1), want)
			}
			require.Equal(t, want, ids(receive(t, s, len(want))))
		})
	}
}

// A broker that creates topics for whoever asks creates none for us.
func TestNoTopicIsCreatedWhereTheBrokerWould(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.AllowAutoTopicCreation())
	r := newRigOn(t, c.ListenAddrs(), 0)
	_, err := r.make().Open(t.Context(), brokers.OpenOptions{Consumer: "x"})
	require.ErrorIs(t, err, brokers.ErrNoRoute)
	require.Equal(t, brokers.Fatal, brokers.ClassOf(err))
	p := r.publisher()
	require.ErrorIs(t, p.Publish(t.Context(), r.message(0, ""))[0].Err, brokers.ErrNoRoute)
	require.Nil(t, c.TopicInfo(r.topic), "the topic was created")
}

// Nothing can be read for long, and nobody else would say so.
func TestAStallIsReportedAndTheSourceStartsAfresh(t *testing.T) {
	t.Parallel()
	r, c := fakeRig(t, 1)
	s, ev := r.source(10, func(c *SourceConfig) { c.StallAfter = 500 * time.Millisecond })
	h := c.Fault(fault(kmsg.Fetch, kerr.KafkaStorageError, -1))
	stalled := ev.wait(t, brokers.EventStalled, 1)[0]
	require.Equal(t, r.topic+"/0", stalled.Lane.Name)
	require.True(t, isCode(stalled.Err, kafka.KafkaStorageError), "%v", stalled.Err)
	h.Remove()
	r.put(0, 0, 3)
	done(t, s, receive(t, s, 3)...)
	r.commits(0, 3)
}

// Idle is not stalled.
func TestAnIdlePartitionIsNoStall(t *testing.T) {
	t.Parallel()
	r, _ := fakeRig(t, 1)
	r.put(0, 0, 100)
	s, ev := r.source(100, func(c *SourceConfig) { c.StallAfter, c.MaxLaneSpan = time.Second, 10 })
	held := receive(t, s, 10) // a full span, with more in the buffer
	sleep(t.Context(), 2*time.Second)
	require.Empty(t, ev.of(brokers.EventStalled))
	require.NoError(t, context.Cause(held[0].Context))
}

func TestCredentials(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.EnableSASL(), kfake.Superuser("PLAIN", "alice", "alice-pw"), kfake.Superuser("SCRAM-SHA-512", "alice", "alice-pw"))
	scram512 := func(pw string) Security {
		m, err := scram.Mechanism(scram.SHA512, "alice", pw)
		require.NoError(t, err)
		return Security{SASL: m}
	}
	for name, sec := range map[string]Security{
		"wrong password": {SASL: plain.Mechanism{Username: "alice", Password: "x"}},
		"wrong user":     {SASL: plain.Mechanism{Username: "bob", Password: "alice-pw"}},
		"scram":          scram512("x"),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, err := NewSource(SourceConfig{Brokers: c.ListenAddrs(), Group: "g", Topics: []string{"t"}, Security: sec})
			require.NoError(t, err)
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			_, err = s.Open(ctx, brokers.OpenOptions{Consumer: "x"})
			require.Equal(t, brokers.Fatal, brokers.ClassOf(err), "%v", err)
			require.ErrorContains(t, err, "Security.SASL")
			p, err := NewPublisher(PublisherConfig{Brokers: c.ListenAddrs(), Security: sec})
			require.NoError(t, err)
			defer closeWithin(t, p.Close)
			r := p.Publish(ctx, &brokers.Message{ID: "a", Topic: "t"})[0]
			require.Equal(t, brokers.Refused, r.Outcome)
			require.Equal(t, brokers.Fatal, brokers.ClassOf(r.Err), "%v", r.Err)
		})
	}
	for name, sec := range map[string]Security{"plain": {SASL: plain.Mechanism{Username: "alice", Password: "alice-pw"}}, "scram right": scram512("alice-pw")} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			topic := "t-" + name[:5]
			require.NoError(t, c.CreateTopic(topic, 1, nil))
			s, err := NewSource(SourceConfig{Brokers: c.ListenAddrs(), Group: name, Topics: []string{topic}, Security: sec})
			require.NoError(t, err)
			_, err = s.Open(t.Context(), brokers.OpenOptions{Consumer: "x"})
			require.NoError(t, err)
			defer closeWithin(t, s.Close)
			p, err := NewPublisher(PublisherConfig{Brokers: c.ListenAddrs(), Security: sec})
			require.NoError(t, err)
			defer closeWithin(t, p.Close)
			require.Equal(t, brokers.Accepted, p.Publish(t.Context(), &brokers.Message{ID: "a", Topic: topic})[0].Outcome)
			done(t, s, receive(t, s, 1)...)
		})
	}
}

// A given Transport and its settings serve both halves, and stay the caller's.
func TestAGivenTransportIsUsedAndStaysOpen(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.EnableSASL(), kfake.Superuser("PLAIN", "alice", "alice-pw"))
	require.NoError(t, c.CreateTopic("t", 1, nil))
	tr := &kafka.Transport{SASL: plain.Mechanism{Username: "alice", Password: "alice-pw"}}
	defer tr.CloseIdleConnections()
	s, err := NewSource(SourceConfig{Brokers: c.ListenAddrs(), Group: "g", Topics: []string{"t"}, Security: Security{Transport: tr}})
	require.NoError(t, err)
	_, err = s.Open(t.Context(), brokers.OpenOptions{Consumer: "x"})
	require.NoError(t, err)
	closeWithin(t, s.Close)
	_, err = (&kafka.Client{Addr: kafka.TCP(c.ListenAddrs()...), Transport: tr}).Metadata(t.Context(), &kafka.MetadataRequest{})
	require.NoError(t, err)
	_, err = NewSource(SourceConfig{Brokers: c.ListenAddrs(), Group: "g", Topics: []string{"t"}, Security: Security{Transport: tr, SASL: must(scram.Mechanism(scram.SHA256, "a", "b"))}})
	require.ErrorContains(t, err, "Security.SASL is not that of Security.Transport")
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// The first broker of the list is away.
func TestAnyBrokerOfTheListWillDo(t *testing.T) {
	t.Parallel()
	r, _ := fakeRig(t, 1)
	r.put(0, 0, 2)
	r.brokers = slices.Concat([]string{"127.0.0.1:1"}, r.brokers)
	s, _ := r.source(10)
	require.Len(t, receive(t, s, 2), 2)
}

// Close within its ctx while the broker answers nothing, and nothing stays behind: the
// package's TestMain looks for goroutines.
func TestCloseWhileTheBrokerHangs(t *testing.T) {
	t.Parallel()
	r, c := fakeRig(t, 1)
	r.put(0, 0, 2)
	s, _ := r.source(10)
	held := receive(t, s, 2)
	release, hanging := make(chan struct{}), make(chan struct{})
	var once sync.Once
	c.ControlKey(int16(kmsg.OffsetCommit), func(kmsg.Request) (kmsg.Response, error, bool) {
		c.KeepControl()
		once.Do(func() { close(hanging) })
		c.SleepControl(func() { <-release })
		return nil, nil, false
	})
	go s.Settle(context.Background(), settlements(brokers.Done, held...)...)
	<-hanging
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	began := time.Now()
	err := s.Close(ctx)
	assert.Less(t, time.Since(began), 3*time.Second)
	require.Error(t, err)
	for _, d := range held {
		require.ErrorIs(t, context.Cause(d.Context), brokers.ErrClosed)
	}
	close(release)
}

func TestABatchOverTheLimitIsFatal(t *testing.T) {
	t.Parallel()
	r, _ := fakeRig(t, 1)
	m := r.message(0, "k")
	m.Payload = make([]byte, 500_000) // a few hundred bytes on the wire
	require.NoError(t, r.publisher().Publish(t.Context(), m)[0].Err)
	s, _ := r.source(10, func(c *SourceConfig) { c.MaxBatchBytes = 100_000 })
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	_, err := s.Receive(ctx, 1)
	require.Equal(t, brokers.Fatal, brokers.ClassOf(err), "%v", err)
	require.ErrorContains(t, err, "MaxBatchBytes is 100000")
	require.ErrorContains(t, err, r.topic+"/0")
	require.EqualValues(t, 0, r.committed(0), "nothing is skipped")
}
