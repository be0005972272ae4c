package kafka

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/internal/tcpproxy"
)

// Keys go where Java's and franz-go's producers put them, or a second producer in
// another language would break their order.
func TestKeysGoToJavasPartition(t *testing.T) {
	t.Parallel()
	java := kgo.StickyKeyPartitioner(nil).ForTopic("t")
	for _, n := range []int{1, 2, 3, 7, 12, 50} {
		parts := make([]int, n)
		for i := range parts {
			parts[i] = i
		}
		for _, key := range []string{"a", "order-17", "ключ", "鍵", "🔑", "\x00\x01", "\xff\xfe", strings.Repeat("x", 300)} {
			got := partitioner.Balance(kafka.Message{Key: []byte(key)}, parts...)
			assert.Equal(t, java.Partition(&kgo.Record{Key: []byte(key)}, n), got, "key %q of %d", key, n)
		}
	}
}

func TestOneKeyIsOnePartitionInOrder(t *testing.T) {
	t.Parallel()
	r := newRig(t, 4)
	p := r.publisher(func(c *PublisherConfig) { c.BatchMessages = 7 })
	var ms []*brokers.Message
	for i := range 400 {
		ms = append(ms, r.message(i, fmt.Sprint("key", i%10)))
	}
	require.Equal(t, map[brokers.Outcome]int{brokers.Accepted: 400}, outcomes(p.Publish(t.Context(), ms...)))
	s, _ := r.source(400)
	lanes, last := map[string]string{}, map[string]string{}
	for _, d := range receive(t, s, 400) {
		if lane, ok := lanes[d.Key]; ok {
			require.Equal(t, lane, d.Lane.Name)
		}
		lanes[d.Key] = d.Lane.Name
		require.Less(t, last[d.Key], d.ID, "order of %s", d.Key)
		last[d.Key] = d.ID
	}
}

// The broker's limit is smaller than ours: only the large one is refused, for good, and
// of its key what follows.
func TestALargeMessageIsFoundInItsBatch(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1, "max.message.bytes", "20000")
	p := r.publisher(func(c *PublisherConfig) { c.Compression = NoCompression })
	ms := []*brokers.Message{r.message(0, "a"), r.message(1, "b"), r.message(2, "b"), r.message(3, "a"), r.message(4, "")}
	ms[1].Payload = bytes.Repeat([]byte("x"), 50_000)
	rs := p.Publish(t.Context(), ms...)
	require.Equal(t, brokers.Accepted, rs[0].Outcome)
	require.Equal(t, brokers.Refused, rs[1].Outcome)
	require.Equal(t, brokers.Permanent, brokers.ClassOf(rs[1].Err), "%v", rs[1].Err)
	require.Equal(t, brokers.NotSent, rs[2].Outcome)
	require.ErrorIs(t, rs[2].Err, brokers.ErrKeyStopped)
	require.Equal(t, brokers.Accepted, rs[3].Outcome)
	require.Equal(t, brokers.Accepted, rs[4].Outcome)
	s, _ := r.source(10)
	require.Equal(t, []string{id(0), id(3), id(4)}, ids(receive(t, s, 3)))
}

func TestAMessageOverOurOwnLimitIsRefusedUnsent(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	p := r.publisher(func(c *PublisherConfig) { c.MaxMessageBytes = 1000 })
	big := r.message(0, "")
	big.Headers.Add("h", make([]byte, 2000))
	rs := p.Publish(t.Context(), big, r.message(1, ""))
	require.Equal(t, brokers.Refused, rs[0].Outcome)
	require.ErrorContains(t, rs[0].Err, "MaxMessageBytes is 1000")
	require.Equal(t, brokers.Accepted, rs[1].Outcome)
}

// A compacted topic refuses a message without a key, by Kafka's own check of the record.
func TestACompactedTopicTakesNoMessageWithoutAKey(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1, "cleanup.policy", "compact")
	p := r.publisher()
	rs := p.Publish(t.Context(), r.message(0, "a"), r.message(1, ""), r.message(2, "a"))
	require.Equal(t, brokers.Accepted, rs[0].Outcome, "%v", rs[0].Err)
	require.Equal(t, brokers.Refused, rs[1].Outcome)
	require.Equal(t, brokers.Permanent, brokers.ClassOf(rs[1].Err), "%v", rs[1].Err)
	require.Equal(t, brokers.Accepted, rs[2].Outcome, "%v", rs[2].Err)
}

// The answer is lost after the broker has stored the messages.
func TestALostAnswerIsUnknown(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	proxy, err := tcpproxy.New(r.brokers[0])
	require.NoError(t, err)
	t.Cleanup(proxy.Close)
	p := r.publisher(func(c *PublisherConfig) {
		c.Brokers, c.Timeout = []string{proxy.Addr()}, 3*time.Second
		// The cluster tells its own address: go through the proxy there too.
		c.Security.Dial = func(ctx context.Context, network, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, network, proxy.Addr())
		}
	})
	accepted := func(ms ...*brokers.Message) {
		require.Eventually(t, func() bool { return outcomes(p.Publish(t.Context(), ms...))[brokers.Accepted] == len(ms) }, patience, 50*time.Millisecond)
	}
	// kafka-go gives an answer before the connection is free again: the next request may
	// need a new one, whose dialling waits for answers too. Then nothing was sent.
	stored := false
	for range 10 {
		accepted(r.message(0, "k"))
		before := r.end(0)
		proxy.Pass(true, false)
		rs := p.Publish(t.Context(), r.message(1, "k"), r.message(2, "k"))
		require.Equal(t, map[brokers.Outcome]int{brokers.Unknown: 2}, outcomes(rs), "%v", rs)
		require.ErrorIs(t, rs[0].Err, brokers.ErrUnknownOutcome)
		require.Equal(t, brokers.Retryable, brokers.ClassOf(rs[0].Err))
		proxy.Pass(true, true)
		proxy.Cut()
		if stored = r.end(0) > before; stored {
			break
		}
	}
	require.True(t, stored, "nothing that was said to be unknown was stored")
	accepted(r.message(1, "k"), r.message(2, "k"))
	s, _ := r.source(100)
	got := slices.DeleteFunc(ids(receive(t, s, int(r.end(0)))), func(x string) bool { return x == id(0) })
	require.GreaterOrEqual(t, len(got), 4, "Unknown was stored, and was sent again")
	for i, x := range got {
		require.Equal(t, id(1+i%2), x, "%v", got)
	}
}

// Nobody listens: nothing was sent, and nothing claims otherwise.
func TestABrokerThatIsAwayRefusesNothingForGood(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	addr := l.Addr().String()
	require.NoError(t, l.Close())
	p, err := NewPublisher(PublisherConfig{Brokers: []string{addr}, Timeout: time.Second})
	require.NoError(t, err)
	defer closeWithin(t, p.Close)
	rs := p.Publish(t.Context(), &brokers.Message{ID: "a", Topic: "t", Payload: []byte("x")})
	require.Equal(t, brokers.NotSent, rs[0].Outcome, "%v", rs[0].Err)
	require.Equal(t, brokers.Retryable, brokers.ClassOf(rs[0].Err), "%v", rs[0].Err)
}

func TestATopicThatStaysMissingIsFatal(t *testing.T) {
	t.Parallel()
	r := newRig(t, 0)
	p := r.publisher(func(c *PublisherConfig) { c.MissingFor = 300 * time.Millisecond })
	first := p.Publish(t.Context(), r.message(0, ""))[0]
	require.Equal(t, brokers.Refused, first.Outcome)
	require.ErrorIs(t, first.Err, brokers.ErrNoRoute)
	require.Equal(t, brokers.Retryable, brokers.ClassOf(first.Err))
	require.Eventually(t, func() bool {
		return brokers.ClassOf(p.Publish(t.Context(), r.message(0, ""))[0].Err) == brokers.Fatal
	}, patience, 50*time.Millisecond)
	r.create(r.topic, 1)
	require.Eventually(t, func() bool { return p.Publish(t.Context(), r.message(0, ""))[0].Outcome == brokers.Accepted },
		patience, 50*time.Millisecond, "it is taken as soon as the topic is there")
	bad := p.Publish(t.Context(), &brokers.Message{ID: "a", Topic: "no/topic"})[0]
	require.Equal(t, brokers.Refused, bad.Outcome)
	require.Equal(t, brokers.Permanent, brokers.ClassOf(bad.Err), "%v", bad.Err)
}

// The record's own time decides when Kafka deletes it, and a time in the future would
// refuse the whole batch.
func TestTimesBeyondReasonDoNotReachTheBroker(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	p := r.publisher()
	now := time.Now()
	times := []time.Time{{}, now.Add(-time.Hour), now.Add(-10 * 365 * 24 * time.Hour), now.Add(48 * time.Hour), time.Date(1, 2, 3, 4, 5, 6, 789, time.UTC)}
	var ms []*brokers.Message
	for i, at := range times {
		m := r.message(i, "k")
		m.Time = at
		ms = append(ms, m)
	}
	rs := p.Publish(t.Context(), ms...)
	require.Equal(t, map[brokers.Outcome]int{brokers.Accepted: len(ms)}, outcomes(rs), "%v", rs)
	s, _ := r.source(10)
	for i, d := range receive(t, s, len(ms)) {
		if i == 0 {
			require.WithinDuration(t, now, d.Time, time.Minute)
			continue
		}
		require.True(t, d.Time.Equal(times[i]), "message %d: %v, want %v", i, d.Time, times[i])
	}
	res, err := r.admin.Fetch(t.Context(), &kafka.FetchRequest{Topic: r.topic, Partition: 0, Offset: 0, MaxBytes: 1 << 20, MinBytes: 1, MaxWait: time.Second})
	require.NoError(t, err)
	n := 0
	for {
		rec, err := res.Records.ReadRecord()
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
		age := time.Since(rec.Time)
		require.True(t, age > -time.Minute && age < 25*time.Hour, "record %d is timed %v", n, rec.Time)
		n++
	}
	require.Equal(t, len(ms), n)
}

func TestMappingOfMessages(t *testing.T) {
	t.Parallel()
	m := brokers.Message{
		ID: "1", Topic: "t", Key: "k", Type: "order.placed", ContentType: "application/json", Payload: []byte{},
		Headers: brokers.Headers{{Key: "a", Value: []byte{}}, {Key: "a", Value: []byte{0}}, {Key: brokers.HeaderMessageID, Value: []byte("other")}},
	}
	rec, size := recordOf(&m, time.Now())
	require.Greater(t, size, 64)
	got, err := messageOf("t", readBack(t, rec))
	require.NoError(t, err)
	m.Headers = m.Headers[:2] // the message's own ID stands
	m.Time = time.UnixMilli(rec.Time.UnixMilli())
	require.Equal(t, m, got)

	m.Payload = nil
	rec, _ = recordOf(&m, time.Now())
	got, err = messageOf("t", readBack(t, rec))
	require.NoError(t, err)
	require.Nil(t, got.Payload, "a tombstone")

	rec.Headers = append(rec.Headers, protocol.Header{Key: brokers.HeaderMessageID, Value: []byte("2")})
	_, err = messageOf("t", readBack(t, rec))
	require.ErrorIs(t, err, brokers.ErrBadID)
}

func TestCloudEventsID(t *testing.T) {
	t.Parallel()
	h := func(kv ...string) *brokers.Message {
		m := &brokers.Message{ID: "own"}
		for i := 0; i < len(kv); i += 2 {
			m.Headers.Add(kv[i], []byte(kv[i+1]))
		}
		return m
	}
	id, err := CloudEventsID(h("ce_id", "1", "ce_source", "/shop"))
	require.NoError(t, err)
	require.Equal(t, brokers.JoinID("/shop", "1"), id)
	id, err = CloudEventsID(h())
	require.NoError(t, err)
	require.Equal(t, "own", id)
	_, err = CloudEventsID(h("ce_id", "1"))
	require.Error(t, err)
	_, err = CloudEventsID(h("ce_id", "1", "ce_id", "2", "ce_source", "s"))
	require.ErrorIs(t, err, brokers.ErrBadID)
}

func TestCloseCutsOffWhatHangs(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	proxy, err := tcpproxy.New(r.brokers[0])
	require.NoError(t, err)
	t.Cleanup(proxy.Close)
	p := r.publisher(func(c *PublisherConfig) {
		c.Brokers = []string{proxy.Addr()}
		c.Security.Dial = func(ctx context.Context, network, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, network, proxy.Addr())
		}
	})
	require.Equal(t, brokers.Accepted, p.Publish(t.Context(), r.message(0, ""))[0].Outcome)
	proxy.Pass(true, false)
	sent := make(chan brokers.Result)
	go func() { sent <- p.Publish(context.Background(), r.message(1, ""))[0] }()
	require.Eventually(t, func() bool { // it is under way
		p.mu.Lock()
		defer p.mu.Unlock()
		return len(p.topics[r.topic].turns[0]) == 1
	}, patience, time.Millisecond)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, p.Close(ctx), context.DeadlineExceeded)
	got := <-sent
	require.Equal(t, brokers.Unknown, got.Outcome, "%v", got.Err)
	after := p.Publish(t.Context(), r.message(2, ""))[0]
	require.Equal(t, brokers.NotSent, after.Outcome)
	require.ErrorIs(t, after.Err, brokers.ErrClosed)
}

func TestMistakesOfConfigurationComeAllAtOnce(t *testing.T) {
	t.Parallel()
	_, err := NewSource(SourceConfig{Topics: []string{"a b"}, Brokers: []string{"kafka://x:1"}, MaxLaneSpan: -1, SessionTimeout: time.Second, HeartbeatInterval: time.Second, DrainFor: time.Hour, Start: 9})
	require.Equal(t, brokers.Fatal, brokers.ClassOf(err))
	for _, want := range []string{"Group is empty", `topic "a b"`, `broker "kafka://x:1"`, "MaxLaneSpan is negative", "HeartbeatInterval is 1s", "DrainFor is 1h", "Start 9"} {
		require.ErrorContains(t, err, want)
	}
	_, err = NewPublisher(PublisherConfig{Compression: "lzma", Timeout: -1})
	for _, want := range []string{"Brokers is empty", `Compression "lzma"`, "Timeout is negative"} {
		require.ErrorContains(t, err, want)
	}
}
