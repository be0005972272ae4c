package rabbitmq

import (
	"testing"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/brokers/brokertest"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
)

// Each kind of queue has other capabilities, and each of them is verified.
func TestConformance(t *testing.T) {
	t.Parallel()
	url := devtest.RabbitMQURL(t)
	for name, edit := range map[string]func(*SourceConfig){
		"quorum":        func(c *SourceConfig) { c.QueueType = Quorum },
		"classic":       func(c *SourceConfig) { c.QueueType = Classic },
		"single-active": func(c *SourceConfig) { c.SingleActiveConsumer = true },
		"no-dead-letters": func(c *SourceConfig) {
			c.DeadLetterQueue = NoDeadLetters
		},
		"single-active-classic": func(c *SourceConfig) { c.SingleActiveConsumer, c.QueueType = true, Classic },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			brokertest.Run(t, brokertest.Config{
				Expected: "testdata/conformance-" + name + ".txt",
				Parallel: true,
				Exempt: map[string]string{
					"message/payload-nil-is-no-empty-payload": "AMQP cannot tell a nil payload from an empty one",
					"message/headers-repeated":                "AMQP keeps the order of one header's values, and none between headers",
				},
				New: func(t *testing.T) brokertest.Fixture { return fixture(t, url, edit) },
			})
		})
	}
}

func fixture(t *testing.T, url string, edit func(*SourceConfig)) brokertest.Fixture {
	r := newRigOn(t, url)
	cfg := SourceConfig{URL: url, Queue: r.queue, Topology: Declare}
	edit(&cfg)
	// The queue exists before the first Source: cases publish first.
	full, _, err := cfg.withDefaults()
	require.NoError(t, err)
	r.do(func(ch *amqp.Channel) error {
		_, err := ch.QueueDeclare(r.queue, true, false, false, false, full.arguments())
		return err
	})
	source := func(cfg SourceConfig) brokers.Source {
		s, err := NewSource(cfg)
		require.NoError(t, err)
		return s
	}
	return brokertest.Fixture{
		Destination: r.queue,
		Source:      func() brokers.Source { return source(cfg) },
		Publisher: func() brokers.Publisher {
			p, err := NewPublisher(PublisherConfig{URL: url})
			require.NoError(t, err)
			return p
		},
		Missing:       r.queue + "-missing",
		MissingSource: func() brokers.Source { return source(SourceConfig{URL: url, Queue: r.queue + "-missing"}) },
		Disconnect:    func(s brokers.Source) { s.(*Source).connection().sock.kill() },
	}
}
