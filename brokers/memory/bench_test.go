package memory_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/brokers/memory"
)

// BenchmarkBroker is one message published, received and settled, in batches of
// 500, which is how much of a benchmark the broker itself takes.
func BenchmarkBroker(b *testing.B) {
	profiles := map[string]func(*memory.Broker){
		"queue":   func(m *memory.Broker) { m.Queue("x", memory.QueueConfig{BatchMax: 500}) },
		"fifo":    func(m *memory.Broker) { m.Queue("x", memory.QueueConfig{BatchMax: 500, FIFO: true}) },
		"channel": func(m *memory.Broker) { m.Channel("x", memory.ChannelConfig{Quorum: true}) },
		"topic":   func(m *memory.Broker) { m.Topic("x", memory.TopicConfig{Partitions: 6, Retention: time.Second}) },
	}
	for _, name := range []string{"queue", "fifo", "channel", "topic"} {
		b.Run(name, func(b *testing.B) {
			m := memory.New(memory.Config{})
			profiles[name](m)
			src, pub := m.Source("x"), m.Publisher()
			_, err := src.Open(b.Context(), brokers.OpenOptions{Room: 1000})
			require.NoError(b, err)
			defer src.Close(b.Context())
			const batch = 500
			ms := make([]*brokers.Message, batch)
			for i := range ms {
				ms[i] = &brokers.Message{ID: fmt.Sprintf("m%d", i), Topic: "x", Key: fmt.Sprint(i % 50), Payload: make([]byte, 200)}
			}
			ss := make([]brokers.Settlement, 0, batch)
			b.ReportAllocs()
			b.ResetTimer()
			for n := 0; n < b.N; n += batch {
				pub.Publish(b.Context(), ms...)
				for got := 0; got < batch; {
					ds, err := src.Receive(b.Context(), batch)
					require.NoError(b, err)
					ss = ss[:0]
					for _, d := range ds {
						ss = append(ss, brokers.Settlement{Delivery: d, Verb: brokers.Done})
					}
					for _, err := range src.Settle(b.Context(), ss...) {
						require.NoError(b, err)
					}
					got += len(ds)
				}
			}
		})
	}
}
