package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/brokers/kafka"
	"github.com/twiceproof/twiceproof/consumer"
	"github.com/twiceproof/twiceproof/inbox"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
)

// A consumer on a real Kafka and a real PostgreSQL: a log has no nack, no delay and no
// delivery count, so that a partition goes on only by what is held.

// kafkaSession is short: a member that says nothing is out within a test.
const kafkaSession = 2 * time.Second

// kafkaTopic is a fresh topic with a group of the same name.
type kafkaTopic struct {
	t          *testing.T
	name       string
	partitions int
	brokers    []string
	client     *kafkago.Client
}

func newKafkaTopic(t *testing.T, partitions int) *kafkaTopic {
	tr := &kafkago.Transport{MetadataTTL: 200 * time.Millisecond}
	t.Cleanup(tr.CloseIdleConnections)
	k := &kafkaTopic{t: t, name: devtest.Name("runner"), partitions: partitions, brokers: devtest.KafkaBrokers(t)}
	k.client = &kafkago.Client{Addr: kafkago.TCP(k.brokers...), Timeout: 10 * time.Second, Transport: tr}
	created, err := k.client.CreateTopics(t.Context(), &kafkago.CreateTopicsRequest{Topics: []kafkago.TopicConfig{
		{Topic: k.name, NumPartitions: partitions, ReplicationFactor: 1}}})
	require.NoError(t, err)
	require.NoError(t, created.Errors[k.name])
	t.Cleanup(func() {
		_, err := k.client.DeleteTopics(context.Background(), &kafkago.DeleteTopicsRequest{Topics: []string{k.name}})
		assert.NoError(t, err)
	})
	return k
}

func (k *kafkaTopic) source(change func(*kafka.SourceConfig)) brokers.Source {
	cfg := kafka.SourceConfig{Brokers: k.brokers, Group: k.name, Topics: []string{k.name}, SessionTimeout: kafkaSession,
		RebalanceTimeout: 6 * time.Second, HeartbeatInterval: 100 * time.Millisecond, DrainFor: time.Second}
	if change != nil {
		change(&cfg)
	}
	src, err := kafka.NewSource(cfg)
	require.NoError(k.t, err)
	return src
}

// run starts a member of the group and waits until it has its partitions.
func (k *kafkaTopic) run(db database, cfg consumer.Config, h handlerFunc) *running {
	k.t.Helper()
	r := db.start(k.t, k.source(nil), cfg, h)
	eventually(k.t, "ready", func() bool { return r.Ready() == nil })
	return r
}

func (k *kafkaTopic) publish(ms ...*brokers.Message) {
	k.t.Helper()
	pub, err := kafka.NewPublisher(kafka.PublisherConfig{Brokers: k.brokers})
	require.NoError(k.t, err)
	for _, m := range ms {
		m.Topic = k.name
	}
	for _, r := range pub.Publish(k.t.Context(), ms...) {
		require.NoError(k.t, r.Err)
	}
	require.NoError(k.t, pub.Close(k.t.Context()))
}

// state is what the group is doing.
func (k *kafkaTopic) state() string {
	k.t.Helper()
	res, err := k.client.DescribeGroups(context.Background(), &kafkago.DescribeGroupsRequest{GroupIDs: []string{k.name}})
	require.NoError(k.t, err)
	require.Len(k.t, res.Groups, 1)
	require.NoError(k.t, res.Groups[0].Error)
	return res.Groups[0].GroupState
}

// left counts the messages between the group's offsets and the ends of the partitions.
func (k *kafkaTopic) left() (n int64) {
	k.t.Helper()
	var all []int
	var ends []kafkago.OffsetRequest
	for p := range k.partitions {
		all, ends = append(all, p), append(ends, kafkago.LastOffsetOf(p))
	}
	last, err := k.client.ListOffsets(context.Background(), &kafkago.ListOffsetsRequest{Topics: map[string][]kafkago.OffsetRequest{k.name: ends}})
	require.NoError(k.t, err)
	at, err := k.client.OffsetFetch(context.Background(), &kafkago.OffsetFetchRequest{GroupID: k.name, Topics: map[string][]int{k.name: all}})
	require.NoError(k.t, err)
	require.NoError(k.t, at.Error)
	for _, p := range last.Topics[k.name] {
		require.NoError(k.t, p.Error)
		n += p.LastOffset
	}
	for _, p := range at.Topics[k.name] {
		require.NoError(k.t, p.Error)
		n -= max(p.CommittedOffset, 0)
	}
	return n
}

// rewind makes the group read everything again. It must have no member.
func (k *kafkaTopic) rewind() {
	k.t.Helper()
	var offsets []kafkago.OffsetCommit
	for p := range k.partitions {
		offsets = append(offsets, kafkago.OffsetCommit{Partition: p})
	}
	res, err := k.client.OffsetCommit(context.Background(), &kafkago.OffsetCommitRequest{
		GroupID: k.name, GenerationID: -1, Topics: map[string][]kafkago.OffsetCommit{k.name: offsets}})
	require.NoError(k.t, err)
	for _, p := range res.Topics[k.name] {
		require.NoError(k.t, p.Error)
	}
}

const outOfOrder = `SELECT count(*) FROM effects a JOIN effects b ON a.key = b.key AND a.id < b.id AND a.seq > b.seq`

// Some fail in place and succeed, some are held while the rest of their key waits behind
// them, some are dead; the partition goes on in all cases, the consumer is replaced on
// the way, and everything is read a second time in the end.
func TestFailuresOnKafkaKeepTheOrderOfTheirKey(t *testing.T) {
	t.Parallel()
	k, db := newKafkaTopic(t, 2), postgres(t)
	const keys, each = 10, 30
	var ms []*brokers.Message
	for i := range each {
		for g := range keys {
			ms = append(ms, msg("", fmt.Sprintf("%02d/%03d", g, i), fmt.Sprint("k", g), "x"))
		}
	}
	k.publish(ms...)
	var runs sync.Map
	handler := func(_ context.Context, exec execFunc, m *consumer.Message) error {
		if err := effect(exec, m); err != nil {
			return err
		}
		n, _ := runs.LoadOrStore(m.ID, new(atomic.Int64))
		run := n.(*atomic.Int64).Add(1)
		switch {
		case m.ID == "03/029":
			return consumer.Permanent(errors.New("never"))
		case strings.HasSuffix(m.ID, "5") && run <= 1, // in place
			strings.HasSuffix(m.ID, "1") && run <= 5: // held
			return fmt.Errorf("run %d fails", run)
		}
		return nil
	}
	cfg := quick()
	cfg.MaxAttempts, cfg.RequireOrder, cfg.Name = 50, true, t.Name()
	r := k.run(db, cfg, handler)
	eventually(t, "half are done", func() bool { return r.Stats().Processed >= keys*each/2 })
	require.NoError(t, r.stop())
	r2 := k.run(db, cfg, handler)
	eventually(t, "all are done", func() bool { return r.Stats().Processed+r2.Stats().Processed == keys*each-1 })
	require.NoError(t, r2.stop())
	require.Positive(t, r.Stats().Held)
	require.Zero(t, k.left(), "a message that is held holds up no partition")

	k.rewind()
	r3 := k.run(db, cfg, handler)
	eventually(t, "all again", func() bool { return r3.Stats().Duplicates == keys*each })
	require.NoError(t, r3.stop())
	require.Zero(t, r3.Stats().Processed+r3.Stats().Failures)
	require.Equal(t, keys*each-1, db.query(t, `SELECT count(*) FROM effects`))
	require.Equal(t, keys*each-1, db.query(t, `SELECT count(DISTINCT id) FROM effects`))
	require.Zero(t, db.query(t, outOfOrder), "out of order")
	require.Equal(t, 1, db.query(t, `SELECT count(*) FROM held_messages WHERE dead`))
	require.Equal(t, 1, db.query(t, `SELECT count(*) FROM held_messages`))
	require.Zero(t, k.left())
}

// spring-projects/spring-kafka#2542: a wait in the consumer outlives the session. Here
// the database is away, and a handler runs, for longer than that: the group keeps its
// member, and everything is read once.
func TestOutageOnKafkaLongerThanTheSessionKeepsTheMembership(t *testing.T) {
	t.Parallel()
	k, db := newKafkaTopic(t, 2), postgres(t)
	r := k.run(db, quick(), onlyEffect)
	db.cut.next.Store(true)
	var ms []*brokers.Message
	for i := range 30 {
		ms = append(ms, msg("", fmt.Sprintf("%02d", i), fmt.Sprint("k", i%3), "x"))
	}
	k.publish(ms...)
	began := time.Now()
	eventually(t, "probed for two sessions", func() bool { return time.Since(began) > 2*kafkaSession && db.cut.calls.Load() >= 3 })
	db.cut.down.Store(false)
	eventually(t, "all are done", func() bool { return r.Stats().Processed == 30 })
	require.NoError(t, r.stop())
	require.EqualValues(t, 30, r.Stats().Received, "each was received once")
	require.Zero(t, r.Stats().Failures+r.Stats().Held+r.Stats().Lost+r.Stats().Released)
	require.Zero(t, db.query(t, outOfOrder), "out of order")
	require.Zero(t, k.left())
}

// confluentinc/confluent-kafka-go#1252: another member comes while a handler runs. One
// that ends within the drain is committed and settled by the one that ran it; the
// context of one that does not ends, what it wrote is rolled back, and it runs at the
// other member: one effect, no failed run.
func TestAMemberThatComesWhileHandlersRunOnKafka(t *testing.T) {
	t.Parallel()
	for name, slow := range map[string]bool{"ends within the drain": false, "is cut off": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			k, db := newKafkaTopic(t, 2), postgres(t)
			var ms []*brokers.Message
			for i := range 20 { // keys on both partitions
				ms = append(ms, msg("", fmt.Sprintf("%02d", i), fmt.Sprint("k", i), "x"))
			}
			k.publish(ms...)
			var first, lost atomic.Int64
			moved := make(chan struct{})
			r := k.run(db, consumer.Config{Name: t.Name() + "/1", Concurrency: 16}, func(ctx context.Context, exec execFunc, m *consumer.Message) error {
				if err := effect(exec, m); err != nil {
					return err
				}
				first.Add(1)
				if slow {
					<-ctx.Done()
					if errors.Is(context.Cause(ctx), brokers.ErrOwnershipLost) {
						lost.Add(1)
					}
					return ctx.Err()
				}
				<-moved
				return nil
			})
			eventually(t, "handlers run", func() bool { return first.Load() == 16 })
			// Of another name: one process takes each name once.
			r2 := db.start(t, k.source(nil), consumer.Config{Name: t.Name() + "/2"}, onlyEffect)
			eventually(t, "the group waits for its first member", func() bool { return k.state() == "PreparingRebalance" })
			close(moved)
			if slow {
				eventually(t, "cut off", func() bool { return lost.Load() > 0 })
				require.NoError(t, r.stop())
			}
			eventually(t, "nothing is left", func() bool { return k.left() == 0 })
			require.NoError(t, r.stop())
			require.NoError(t, r2.stop())
			require.Zero(t, r.Stats().Failures+r.Stats().Held+r2.Stats().Failures+r2.Stats().Held)
			if slow {
				require.Zero(t, r.Stats().Processed)
				require.EqualValues(t, 20, r2.Stats().Processed)
			}
			require.Equal(t, 20, db.query(t, `SELECT count(*) FROM effects`))
			require.Equal(t, 20, db.query(t, `SELECT count(DISTINCT id) FROM effects`))
		})
	}
}

// A message without an ID, and two of one ID with other content: kept once, however
// often the group reads them, and the partition goes on.
func TestDefectsOnKafkaAreKeptOnce(t *testing.T) {
	t.Parallel()
	k, db := newKafkaTopic(t, 1), postgres(t)
	// Of one key, or either of the two could be the first.
	k.publish(msg("", "1", "k", "one"), msg("", "1", "k", "another"), msg("", "2", "", "x"))
	res, err := k.client.Produce(t.Context(), &kafkago.ProduceRequest{Topic: k.name, RequiredAcks: kafkago.RequireAll,
		Records: kafkago.NewRecordReader(kafkago.Record{Value: kafkago.NewBytes([]byte("no id"))}, kafkago.Record{Value: kafkago.NewBytes([]byte("no id"))})})
	require.NoError(t, err)
	require.NoError(t, res.Error)
	for range 2 {
		r := k.run(db, consumer.Config{}, onlyEffect)
		eventually(t, "all are settled", func() bool { s := r.Stats(); return s.Processed+s.Duplicates+s.Held == 5 })
		require.NoError(t, r.stop())
		require.Zero(t, k.left())
		require.Equal(t, 2, db.query(t, `SELECT count(*) FROM effects`))
		require.Equal(t, 1, db.query(t, `SELECT count(*) FROM held_messages WHERE dead AND reason = '`+inbox.ReasonConflict+`' AND payload = 'another'`))
		require.Equal(t, 2, db.query(t, `SELECT count(*) FROM held_messages WHERE dead AND reason = '`+inbox.ReasonNoID+`' AND payload = 'no id'`),
			"each has a place of its own in the log")
		require.Equal(t, 3, db.query(t, `SELECT count(*) FROM held_messages`))
		k.rewind()
	}
}
