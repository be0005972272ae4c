package memory_test

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/brokers/brokertest"
	"github.com/twiceproof/twiceproof/brokers/memory"
)

func TestConformance(t *testing.T) {
	for _, p := range []struct {
		name    string
		declare func(b *memory.Broker, name string)
		lease   time.Duration
	}{
		{"queue", func(b *memory.Broker, n string) { b.Queue(n, memory.QueueConfig{}) }, 30 * time.Second},
		{"queue-fifo", func(b *memory.Broker, n string) { b.Queue(n, memory.QueueConfig{FIFO: true}) }, 30 * time.Second},
		{"channel-classic", func(b *memory.Broker, n string) { b.Channel(n, memory.ChannelConfig{}) }, 0},
		{"channel-quorum", func(b *memory.Broker, n string) {
			b.Channel(n, memory.ChannelConfig{Quorum: true, NackCounts: true, DeliveryLimit: 20, DeadLetter: n + "-dead"})
		}, 0},
		{"channel-single-active", func(b *memory.Broker, n string) {
			b.Channel(n, memory.ChannelConfig{Quorum: true, NackCounts: true, SingleActive: true})
		}, 0},
		{"topic", func(b *memory.Broker, n string) { b.Topic(n, memory.TopicConfig{}) }, 0},
		{"topic-partitions", func(b *memory.Broker, n string) { b.Topic(n, memory.TopicConfig{Partitions: 4}) }, 0},
	} {
		for _, seed := range []uint64{0, 7} {
			name := p.name
			if seed != 0 {
				name += "-seeded"
			}
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				brokertest.Run(t, brokertest.Config{
					Bubble:   synctest.Test,
					Expected: "testdata/conformance-" + p.name + ".txt",
					Lease:    p.lease,
					Wait:     10 * time.Minute, // no time at all in a bubble
					Quiet:    time.Minute,
					Exempt:   map[string]string{},
					New: func(t *testing.T) brokertest.Fixture {
						b := memory.New(memory.Config{Seed: seed, Strict: true, MaxMessageBytes: 1 << 20})
						p.declare(b, "orders")
						t.Cleanup(func() { assert.NoError(t, b.Check()) })
						return brokertest.Fixture{
							Destination:   "orders",
							Missing:       "nowhere",
							Source:        func() brokers.Source { return b.Source("orders") },
							MissingSource: func() brokers.Source { return b.Source("nowhere") },
							Publisher:     b.Publisher,
							Disconnect: func(src brokers.Source) {
								b.Disconnect(src, errors.New("connection reset"), 0)
							},
						}
					},
				})
			})
		}
	}
}
