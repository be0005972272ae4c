package rabbitmq

import (
	"crypto/tls"
	"errors"
	"fmt"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/twiceproof/twiceproof/brokers"
)

const (
	// NoDeadLetters as [SourceConfig.DeadLetterQueue] makes Declare set up none.
	NoDeadLetters = "-"
	// NoDeliveryLimit as [SourceConfig.DeliveryLimit] leaves it to the broker: 20 on
	// RabbitMQ 4, none before.
	NoDeliveryLimit = -1

	defaultDeliveryLimit = 1000
	defaultMaxHold       = 25 * time.Minute
	defaultMissingFor    = 60 * time.Second
	defaultRoom          = 64
	// maxPrefetch is the most that quorum queues take.
	maxPrefetch = 2000
)

// SourceConfig configures a [Source]. URL and Queue are required; every other zero
// value is ready.
type SourceConfig struct {
	// URL is a node of the broker: amqp://user:password@host:5672/vhost, or amqps:// for
	// TLS. Parameters in it (heartbeat, connection_timeout) count before the fields here.
	URL string
	// MoreURLs are further nodes of the cluster, tried in turn.
	MoreURLs []string
	// TLS is used with amqps:// URLs. Nil means the system's certificate authorities
	// and the URL's host name.
	TLS *tls.Config
	// Dial opens the network connection. Nil means a net.Dialer. ctx bounds it.
	Dial DialFunc
	// SASL replaces user and password of the URL, for example by amqp.ExternalAuth.
	SASL []amqp.Authentication
	// Heartbeat is asked of the broker; a connection that is silent for three of them
	// is dead. 0 means 10 s; at least 1 s.
	Heartbeat time.Duration

	// Queue is the queue's name.
	Queue string
	// Topology says what Open does about the queue. The zero value is Verify.
	Topology Topology
	// QueueType is what Declare creates. With Verify and None it is your statement
	// about the queue, which cannot be checked. The zero value is Quorum.
	QueueType QueueType
	// SingleActiveConsumer is declared by Declare; with Verify and None it is your
	// statement about the queue, which cannot be checked. The Source is then
	// LaneOrdered: one consumer at a time gets the messages, in order, and what is
	// given back takes all later ones with it. Default: false.
	SingleActiveConsumer bool
	// DeadLetterQueue is where Declare lets rejected messages and those past the
	// delivery limit go, by way of the default exchange. Empty means the queue's name
	// with ".dead"; NoDeadLetters means nowhere: such messages are lost.
	DeadLetterQueue string
	// DeadLetters states, with Verify and None, that the queue has a dead-letter
	// exchange: without one a rejected message is lost, hence Reject is unsupported
	// unless this is set. Declare knows by itself. Default: false.
	DeadLetters bool
	// DeliveryLimit is the x-delivery-limit of a quorum queue that Declare creates: how
	// often a message may be returned to the broker before it is dead-lettered. Every
	// lost connection and every Release counts, neighbours included, so it is no limit
	// of attempts. 0 means 1000; NoDeliveryLimit leaves it to the broker.
	DeliveryLimit int
	// QueueArgs are further arguments for Declare; they win over all others.
	QueueArgs map[string]any
	// Bindings are made by Declare.
	Bindings []Binding
	// ConsumerArgs are arguments of the subscription, for example "x-priority".
	ConsumerArgs map[string]any

	// ID tells a message's ID. Nil means the message_id property, which the function
	// finds in m.ID. An error marks the delivery as defective: it is kept as dead and
	// never processed. It is called once for each delivery and must be fast.
	ID func(m *brokers.Message) (string, error)
	// KeyFromRoutingKey makes the routing key the Key of messages without a
	// "message-key" header. Default: false.
	KeyFromRoutingKey bool

	// MaxHold is how long a delivery may stay unsettled, counted from its arrival. It
	// must be shorter than the broker's consumer_timeout (30 min by default), which
	// closes the channel and takes back everything on it; the Source gives the one
	// message back at MaxHold and ends its Context. When nobody receives, it does not come
	// again until somebody does. 0 means 25 min.
	MaxHold time.Duration
	// MissingFor is how long the queue may be missing after Open (deleted, failing
	// over) before Receive returns an error of class Fatal. 0 means 60 s.
	MissingFor time.Duration
	// RedeliveryHorizon is how long a message can stay in the queue, if it has a
	// message TTL. 0 means for ever.
	RedeliveryHorizon time.Duration
}

// withDefaults checks the configuration and fills it in; all mistakes come at once.
func (c SourceConfig) withDefaults() (SourceConfig, connConfig, error) {
	cc, errs := newConnConfig(c.URL, c.MoreURLs, c.TLS, c.Dial, c.SASL, c.Heartbeat)
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	switch {
	case c.Queue == "":
		bad("Queue is empty: set the name of the queue to consume")
	case len(c.Queue) > maxShort:
		bad("Queue has %d bytes; AMQP allows %d", len(c.Queue), maxShort)
	}
	if c.Topology > None {
		bad("Topology %d is unknown: use Verify, Declare or None", c.Topology)
	}
	if c.QueueType > Classic {
		bad("QueueType %d is unknown: use Quorum or Classic", c.QueueType)
	}
	if c.Topology != Declare && (len(c.QueueArgs) > 0 || len(c.Bindings) > 0) {
		bad("QueueArgs and Bindings need Topology: Declare")
	}
	if err := amqp.Table(c.QueueArgs).Validate(); err != nil {
		bad("QueueArgs: %w", err)
	}
	if err := amqp.Table(c.ConsumerArgs).Validate(); err != nil {
		bad("ConsumerArgs: %w", err)
	}
	if c.DeliveryLimit < NoDeliveryLimit {
		bad("DeliveryLimit is %d: use 0 for the default, NoDeliveryLimit for none", c.DeliveryLimit)
	}
	for _, d := range []struct {
		name  string
		value *time.Duration
		zero  time.Duration
	}{
		{"MaxHold", &c.MaxHold, defaultMaxHold},
		{"MissingFor", &c.MissingFor, defaultMissingFor},
		{"RedeliveryHorizon", &c.RedeliveryHorizon, brokers.Unlimited},
	} {
		if *d.value < 0 {
			bad("%s is negative: %s", d.name, *d.value)
		}
		if *d.value == 0 {
			*d.value = d.zero
		}
	}
	if c.DeliveryLimit == 0 {
		c.DeliveryLimit = defaultDeliveryLimit
	}
	if c.DeadLetterQueue == "" {
		c.DeadLetterQueue = c.Queue + ".dead"
	}
	if c.Topology == Declare {
		c.DeadLetters = c.DeadLetterQueue != NoDeadLetters
	}
	if len(errs) > 0 {
		return c, cc, brokers.NewFatal("rabbitmq.SourceConfig", errors.Join(errs...), "")
	}
	return c, cc, nil
}

// capabilities states what the queue can do, as configured.
func (c *SourceConfig) capabilities() brokers.Capabilities {
	caps := brokers.Capabilities{
		GiveBack: brokers.GiveBackMessage, Reject: c.DeadLetters, MaxRetryDelay: 1, MaxHold: c.MaxHold,
		RedeliveryHorizon: c.RedeliveryHorizon, Counting: brokers.CountsDeliveries,
		SettleBatch: 200, SettleLinger: 5 * time.Millisecond,
	}
	if c.QueueType == Classic {
		caps.Counting = brokers.CountsRedelivered
	}
	if c.SingleActiveConsumer {
		// A single message put back would come after the later ones in hand.
		caps.LaneOrdered, caps.GiveBack, caps.MaxRetryDelay = true, brokers.GiveBackLane, 0
	}
	return caps
}
