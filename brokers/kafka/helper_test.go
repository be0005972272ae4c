package kafka

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const patience = 30 * time.Second

// rig is a topic and a group of one test, with a plain client beside the code under test.
type rig struct {
	t       *testing.T
	brokers []string
	topic   string
	group   string
	admin   *kafka.Client
}

func newRig(t *testing.T, partitions int, config ...string) *rig {
	t.Helper()
	return newRigOn(t, devtest.KafkaBrokers(t), partitions, config...)
}

// newRigOn makes a topic; config is a list of names and values.
func newRigOn(t *testing.T, addrs []string, partitions int, config ...string) *rig {
	t.Helper()
	tr := &kafka.Transport{MetadataTTL: 500 * time.Millisecond}
	r := &rig{
		t: t, brokers: addrs, topic: devtest.Name("t"), group: devtest.Name("g"),
		admin: &kafka.Client{Addr: kafka.TCP(addrs...), Timeout: 10 * time.Second, Transport: tr},
	}
	t.Cleanup(tr.CloseIdleConnections)
	if partitions > 0 {
		r.create(r.topic, partitions, config...)
	}
	return r
}

func (r *rig) create(topic string, partitions int, config ...string) {
	r.t.Helper()
	tc := kafka.TopicConfig{Topic: topic, NumPartitions: partitions, ReplicationFactor: 1}
	for i := 0; i+1 < len(config); i += 2 {
		tc.ConfigEntries = append(tc.ConfigEntries, kafka.ConfigEntry{ConfigName: config[i], ConfigValue: config[i+1]})
	}
	require.EventuallyWithT(r.t, func(c *assert.CollectT) {
		res, err := r.admin.CreateTopics(context.Background(), &kafka.CreateTopicsRequest{Topics: []kafka.TopicConfig{tc}})
		if assert.NoError(c, err) {
			assert.NoError(c, res.Errors[topic])
		}
	}, patience, 100*time.Millisecond)
	r.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		_, _ = r.admin.DeleteTopics(ctx, &kafka.DeleteTopicsRequest{Topics: []string{topic}})
	})
	// A new topic is not led at once.
	for p := range partitions {
		require.Eventually(r.t, func() bool {
			res, err := r.admin.ListOffsets(context.Background(), listLast(topic, p))
			return err == nil && len(res.Topics[topic]) == 1 && res.Topics[topic][0].Error == nil
		}, patience, 50*time.Millisecond)
	}
}

func id(i int) string { return fmt.Sprintf("m%05d", i) }

// put writes messages with the IDs from..to-1 to one partition.
func (r *rig) put(partition, from, to int) {
	r.t.Helper()
	recs := make([]protocol.Record, 0, to-from)
	for i := from; i < to; i++ {
		recs = append(recs, protocol.Record{
			Time: time.Now(), Key: protocol.NewBytes([]byte(id(i))), Value: protocol.NewBytes([]byte(id(i))),
			Headers: []protocol.Header{{Key: brokers.HeaderMessageID, Value: []byte(id(i))}},
		})
	}
	r.write(partition, recs...)
}

func (r *rig) write(partition int, recs ...protocol.Record) {
	r.t.Helper()
	var res *kafka.ProduceResponse
	var err error
	for until := time.Now().Add(patience); time.Now().Before(until); time.Sleep(50 * time.Millisecond) {
		res, err = r.admin.Produce(context.Background(), &kafka.ProduceRequest{
			Topic: r.topic, Partition: partition, RequiredAcks: kafka.RequireAll, Records: protocol.NewRecordReader(recs...),
		})
		// The client learns of a new partition late; nothing was sent then.
		if !errors.Is(err, protocol.ErrNoPartition) && !errors.Is(err, protocol.ErrNoLeader) {
			break
		}
	}
	require.NoError(r.t, err)
	require.NoError(r.t, res.Error)
}

// committed returns the group's offset of a partition, or -1.
func (r *rig) committed(partition int) int64 {
	r.t.Helper()
	at, err := r.tryCommitted(partition)
	require.NoError(r.t, err)
	return at
}

func (r *rig) tryCommitted(partition int) (int64, error) {
	res, err := r.admin.OffsetFetch(context.Background(), &kafka.OffsetFetchRequest{GroupID: r.group, Topics: map[string][]int{r.topic: {partition}}})
	if err != nil {
		return 0, err
	}
	for _, p := range res.Topics[r.topic] {
		if p.Partition == partition {
			return p.CommittedOffset, p.Error
		}
	}
	return 0, fmt.Errorf("no answer: %+v", res)
}

// commits waits until the group's offset of a partition is n.
func (r *rig) commits(partition int, n int64) {
	r.t.Helper()
	var at int64
	ok := assert.Eventually(r.t, func() bool {
		var err error
		at, err = r.tryCommitted(partition)
		return err == nil && at == n
	}, patience, 20*time.Millisecond)
	if !ok {
		require.FailNow(r.t, "committed offset", "partition %d is at %d, expected %d", partition, at, n)
	}
}

// setCommitted sets the group's offset while the group has no member.
func (r *rig) setCommitted(partition int, n int64) {
	r.t.Helper()
	res, err := r.admin.OffsetCommit(context.Background(), &kafka.OffsetCommitRequest{
		GroupID: r.group, GenerationID: -1, Topics: map[string][]kafka.OffsetCommit{r.topic: {{Partition: partition, Offset: n}}},
	})
	require.NoError(r.t, err)
	require.NoError(r.t, res.Topics[r.topic][0].Error)
}

// deleteBefore deletes the messages before an offset, as retention does.
func (r *rig) deleteBefore(partition int, offset int64) {
	r.t.Helper()
	adminOf(r.t, r.brokers).deleteRecords(r.topic, partition, offset)
}

// members returns the IDs of the group's members.
func (r *rig) members() []string {
	r.t.Helper()
	res, err := r.admin.DescribeGroups(context.Background(), &kafka.DescribeGroupsRequest{GroupIDs: []string{r.group}})
	require.NoError(r.t, err)
	var ids []string
	for _, g := range res.Groups {
		for _, m := range g.Members {
			ids = append(ids, m.MemberID)
		}
	}
	return ids
}

// evict takes a Source out of its group, as the group does after a silence.
func (r *rig) evict(s *Source) {
	r.t.Helper()
	var member string
	require.Eventually(r.t, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.gen != nil {
			member = s.gen.g.MemberID
		}
		return member != ""
	}, patience, 10*time.Millisecond)
	res, err := r.admin.LeaveGroup(context.Background(), &kafka.LeaveGroupRequest{GroupID: r.group, Members: []kafka.LeaveGroupRequestMember{{ID: member}}})
	require.NoError(r.t, err)
	require.NoError(r.t, res.Error)
}

func (r *rig) config(edit ...func(*SourceConfig)) SourceConfig {
	cfg := SourceConfig{
		Brokers: r.brokers, Group: r.group, Topics: []string{r.topic},
		SessionTimeout: 3 * time.Second, RebalanceTimeout: 6 * time.Second, HeartbeatInterval: 200 * time.Millisecond,
		DrainFor: 3 * time.Second, WatchInterval: time.Second,
	}
	for _, e := range edit {
		e(&cfg)
	}
	return cfg
}

// make makes a Source that is not open.
func (r *rig) make(edit ...func(*SourceConfig)) *Source {
	r.t.Helper()
	s, err := NewSource(r.config(edit...))
	require.NoError(r.t, err)
	return s
}

// source opens a Source and closes it with the test.
func (r *rig) source(room int, edit ...func(*SourceConfig)) (*Source, *events) {
	r.t.Helper()
	s, ev := r.make(edit...), &events{}
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	_, err := s.Open(ctx, brokers.OpenOptions{Consumer: r.t.Name(), Room: room, Observer: ev.observe})
	require.NoError(r.t, err)
	r.t.Cleanup(func() { closeWithin(r.t, s.Close) })
	return s, ev
}

func (r *rig) publisher(edit ...func(*PublisherConfig)) *Publisher {
	r.t.Helper()
	cfg := PublisherConfig{Brokers: r.brokers}
	for _, e := range edit {
		e(&cfg)
	}
	p, err := NewPublisher(cfg)
	require.NoError(r.t, err)
	r.t.Cleanup(func() { closeWithin(r.t, p.Close) })
	return p
}

func closeWithin(t *testing.T, fn func(context.Context) error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := fn(ctx); err != nil {
		t.Errorf("close: %v", err)
	}
}

// events collects what a Source observes.
type events struct {
	mu  sync.Mutex
	all []brokers.Event
}

func (e *events) observe(ev brokers.Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.all = append(e.all, ev)
}

func (e *events) of(kind brokers.EventKind) []brokers.Event {
	e.mu.Lock()
	defer e.mu.Unlock()
	var out []brokers.Event
	for _, ev := range e.all {
		if ev.Kind == kind {
			out = append(out, ev)
		}
	}
	return out
}

func (e *events) wait(t *testing.T, kind brokers.EventKind, n int) []brokers.Event {
	t.Helper()
	require.Eventually(t, func() bool { return len(e.of(kind)) >= n }, patience, 10*time.Millisecond, "%d events %q", n, kind)
	return e.of(kind)
}

// receive collects exactly n deliveries.
func receive(t *testing.T, s brokers.Source, n int) []*brokers.Delivery {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var all []*brokers.Delivery
	for len(all) < n {
		ds, err := s.Receive(ctx, n-len(all))
		require.NoError(t, err, "%d of %d received", len(all), n)
		all = append(all, ds...)
	}
	return all
}

func ids(ds []*brokers.Delivery) []string {
	out := make([]string, len(ds))
	for i, d := range ds {
		out[i] = d.ID
	}
	return out
}

func idsFrom(from, to int) []string {
	var out []string
	for i := from; i < to; i++ {
		out = append(out, id(i))
	}
	return out
}

func settlements(v brokers.Verb, ds ...*brokers.Delivery) []brokers.Settlement {
	out := make([]brokers.Settlement, len(ds))
	for i, d := range ds {
		out[i] = brokers.Settlement{Delivery: d, Verb: v}
	}
	return out
}

// done settles as Done and requires every answer to be nil.
func done(t *testing.T, s brokers.Source, ds ...*brokers.Delivery) {
	t.Helper()
	for i, err := range s.Settle(t.Context(), settlements(brokers.Done, ds...)...) {
		require.NoError(t, err, "settle %s", ds[i].ID)
	}
}

func (r *rig) message(i int, key string) *brokers.Message {
	return &brokers.Message{ID: id(i), Topic: r.topic, Key: key, Payload: []byte(id(i))}
}

func outcomes(rs []brokers.Result) map[brokers.Outcome]int {
	n := map[brokers.Outcome]int{}
	for _, r := range rs {
		n[r.Outcome]++
	}
	return n
}

// publishIDs writes one message with several message IDs.
func (r *rig) publishIDs(ids ...string) {
	rec := protocol.Record{Time: time.Now(), Value: protocol.NewBytes([]byte(strings.Join(ids, " ")))}
	for _, id := range ids {
		rec.Headers = append(rec.Headers, protocol.Header{Key: brokers.HeaderMessageID, Value: []byte(id)})
	}
	r.write(0, rec)
}

// end is the offset of a partition's next message.
func (r *rig) end(partition int) int64 {
	r.t.Helper()
	res, err := r.admin.ListOffsets(context.Background(), listLast(r.topic, partition))
	require.NoError(r.t, err)
	return res.Topics[r.topic][0].LastOffset
}

func listLast(topic string, partition int) *kafka.ListOffsetsRequest {
	return &kafka.ListOffsetsRequest{Topics: map[string][]kafka.OffsetRequest{topic: {kafka.LastOffsetOf(partition)}}}
}

// bigRecord is a message of 20,000 bytes that do not compress.
func bigRecord(i int) protocol.Record {
	b := make([]byte, 20_000)
	x := uint32(i + 1)
	for j := range b {
		x = x*1664525 + 1013904223
		b[j] = byte(x >> 24)
	}
	return protocol.Record{
		Time: time.Now(), Value: protocol.NewBytes(b),
		Headers: []protocol.Header{{Key: brokers.HeaderMessageID, Value: []byte(id(i))}},
	}
}
