package kafka

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
)

// Each pair runs on the same topic of the same broker in one run; only their ratio
// means anything. Run them with a fixed number of messages, and in turns, for the broker
// warms up (-count repeats each one by itself):
//
//	go build -o devenv ./cmd/devenv
//	./devenv -only kafka -- sh -c 'for i in 1 2 3 4 5 6; do go test -run - -bench . -benchtime 1000000x ./brokers/kafka; done'

const benchPartitions = 6

// benchPayload is 256 bytes of digits: they compress to half, as JSON does.
func benchPayload(i int) []byte {
	r := rand.New(rand.NewPCG(uint64(i), 0))
	p := make([]byte, 256)
	for j := range p {
		p[j] = '0' + byte(r.IntN(10))
	}
	return p
}

// full is one topic for all consume benchmarks of a run, with at least n messages.
var full struct {
	sync.Mutex
	topic string
	n     int
}

func benchTopic(b *testing.B, addrs []string, name string) *kafka.Client {
	b.Helper()
	tr := &kafka.Transport{MetadataTTL: time.Second}
	b.Cleanup(tr.CloseIdleConnections)
	c := &kafka.Client{Addr: kafka.TCP(addrs...), Timeout: 30 * time.Second, Transport: tr}
	res, err := c.CreateTopics(b.Context(), &kafka.CreateTopicsRequest{Topics: []kafka.TopicConfig{{Topic: name, NumPartitions: benchPartitions, ReplicationFactor: 1}}})
	require.NoError(b, err)
	require.NoError(b, res.Errors[name])
	for p := range benchPartitions {
		require.Eventually(b, func() bool {
			res, err := c.ListOffsets(b.Context(), listLast(name, p))
			return err == nil && res.Topics[name][0].Error == nil
		}, patience, 20*time.Millisecond)
	}
	return c
}

func benchMessages(topic string, from, to int) []*brokers.Message {
	ms := make([]*brokers.Message, 0, to-from)
	for i := from; i < to; i++ {
		ms = append(ms, &brokers.Message{ID: fmt.Sprintf("m%09d", i), Topic: topic, Key: fmt.Sprintf("key%d", i%1000), Payload: benchPayload(i)})
	}
	return ms
}

func fill(b *testing.B, addrs []string, n int) string {
	b.Helper()
	full.Lock()
	defer full.Unlock()
	if full.topic == "" {
		full.topic = devtest.Name("bench")
		benchTopic(b, addrs, full.topic)
	}
	p, err := NewPublisher(PublisherConfig{Brokers: addrs})
	require.NoError(b, err)
	defer p.Close(context.Background()) //nolint:errcheck // nothing is in flight
	for full.n < n {
		to := min(full.n+5000, n)
		for _, r := range p.Publish(b.Context(), benchMessages(full.topic, full.n, to)...) {
			require.NoError(b, r.Err)
		}
		full.n = to
	}
	return full.topic
}

// BenchmarkConsume reads a topic with six partitions as a group of one member, and
// commits.
func BenchmarkConsume(b *testing.B) {
	addrs := devtest.KafkaBrokers(b)
	b.Run("source", func(b *testing.B) {
		topic := fill(b, addrs, b.N)
		s, err := NewSource(SourceConfig{Brokers: addrs, Group: devtest.Name("g"), Topics: []string{topic}, MaxLaneSpan: 10_000})
		require.NoError(b, err)
		_, err = s.Open(b.Context(), brokers.OpenOptions{Consumer: "bench", Room: 10_000})
		require.NoError(b, err)
		first, err := s.Receive(b.Context(), 1) // it is under way
		require.NoError(b, err)
		b.ReportAllocs()
		b.ResetTimer()
		// As the runner does it: one goroutine settles whatever is finished by then.
		finished := make(chan []*brokers.Delivery, 100)
		settled := make(chan error)
		go func() {
			var ss []brokers.Settlement
			for ds := range finished {
				ss = ss[:0]
				for more := true; more; {
					for _, d := range ds {
						ss = append(ss, brokers.Settlement{Delivery: d, Verb: brokers.Done})
					}
					select {
					case ds, more = <-finished:
					default:
						more = false
					}
				}
				for _, err := range s.Settle(context.Background(), ss...) {
					if err != nil {
						settled <- err
						return
					}
				}
			}
			settled <- nil
		}()
		finished <- first
		for n := 1; n < b.N; {
			ds, err := s.Receive(b.Context(), 500)
			require.NoError(b, err)
			finished <- ds
			n += len(ds)
		}
		close(finished)
		require.NoError(b, <-settled)
		b.StopTimer()
		require.NoError(b, s.Close(context.Background()))
	})
	b.Run("reader", func(b *testing.B) {
		topic := fill(b, addrs, b.N)
		// As bare as it gets: it commits by itself, every second, whatever became of the
		// messages.
		r := kafka.NewReader(kafka.ReaderConfig{Brokers: addrs, GroupID: devtest.Name("g"), Topic: topic, StartOffset: kafka.FirstOffset,
			MinBytes: 1, MaxBytes: 1 << 20, MaxWait: fetchWait, CommitInterval: time.Second, QueueCapacity: 10_000, JoinGroupBackoff: time.Second})
		_, err := r.FetchMessage(b.Context()) // it is under way
		require.NoError(b, err)
		b.ReportAllocs()
		b.ResetTimer()
		for range b.N - 1 {
			if _, err := r.ReadMessage(b.Context()); err != nil {
				b.Fatal(err)
			}
		}
		b.StopTimer()
		require.NoError(b, r.Close())
	})
}

// BenchmarkPublish writes batches of 500 and waits for all in-sync replicas.
func BenchmarkPublish(b *testing.B) {
	addrs := devtest.KafkaBrokers(b)
	const batch = 500
	b.Run("publisher", func(b *testing.B) {
		topic := devtest.Name("bench")
		benchTopic(b, addrs, topic)
		p, err := NewPublisher(PublisherConfig{Brokers: addrs})
		require.NoError(b, err)
		ms := benchMessages(topic, 0, batch)
		require.NoError(b, p.Publish(b.Context(), ms[0])[0].Err)
		b.ReportAllocs()
		b.ResetTimer()
		for n := 0; n < b.N; n += batch {
			for _, r := range p.Publish(b.Context(), ms...) {
				if r.Err != nil {
					b.Fatal(r.Err)
				}
			}
		}
		b.StopTimer()
		require.NoError(b, p.Close(context.Background()))
	})
	b.Run("writer", func(b *testing.B) {
		topic := devtest.Name("bench")
		benchTopic(b, addrs, topic)
		tr := &kafka.Transport{}
		w := &kafka.Writer{Addr: kafka.TCP(addrs...), Topic: topic, Balancer: partitioner, RequiredAcks: kafka.RequireAll, Compression: kafka.Snappy,
			// The default is a second, which each call would wait for.
			BatchSize: batch, BatchTimeout: time.Millisecond, Transport: tr}
		ms := make([]kafka.Message, batch)
		for i, m := range benchMessages(topic, 0, batch) {
			ms[i] = kafka.Message{Key: []byte(m.Key), Value: m.Payload, Headers: []kafka.Header{{Key: brokers.HeaderMessageID, Value: []byte(m.ID)}}}
		}
		require.NoError(b, w.WriteMessages(b.Context(), ms[0]))
		b.ReportAllocs()
		b.ResetTimer()
		for n := 0; n < b.N; n += batch {
			if err := w.WriteMessages(b.Context(), ms...); err != nil {
				b.Fatal(err)
			}
		}
		b.StopTimer()
		require.NoError(b, w.Close())
		tr.CloseIdleConnections()
	})
}
