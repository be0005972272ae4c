package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// Topology says what a Source or Publisher does about queues and exchanges before
// it uses them.
type Topology uint8

const (
	// Verify checks that the queue or exchange exists, and nothing else about it:
	// AMQP cannot read the arguments of one.
	Verify Topology = iota
	// Declare creates what is missing and fails where something exists with other
	// arguments.
	Declare
	// None does nothing: for users whose permissions allow neither.
	None
)

// String returns "verify", "declare" or "none".
func (t Topology) String() string { return [...]string{"verify", "declare", "none"}[min(t, 2)] }

// QueueType is the kind of a queue.
type QueueType uint8

const (
	// Quorum queues are replicated and count deliveries.
	Quorum QueueType = iota
	// Classic queues live on one node and only flag redeliveries.
	Classic
)

// String returns "quorum" or "classic", as RabbitMQ calls them.
func (q QueueType) String() string { return [...]string{"quorum", "classic"}[min(q, 1)] }

// Binding routes messages of an exchange into a queue.
type Binding struct {
	// Exchange is the exchange's name.
	Exchange string
	// Kind, if set, makes Declare create the exchange, durable: "topic", "direct",
	// "fanout" or "headers". Empty means that it must exist.
	Kind string
	// Key is the routing key or pattern.
	Key string
	// Args are for headers exchanges.
	Args map[string]any
}

// onThrowaway runs fn on a channel of its own: any refusal closes the channel.
func (c *conn) onThrowaway(ctx context.Context, fn func(*amqp.Channel) error) error {
	return c.bounded(ctx, func() error {
		ch, err := c.Channel()
		if err != nil {
			return err
		}
		err = fn(ch)
		_ = ch.Close() // after a refusal it is closed already
		return err
	})
}

// topology does what the configuration says about the queue.
func (c *SourceConfig) topology(ctx context.Context, cn *conn) error {
	switch c.Topology {
	case Verify:
		op := fmt.Sprintf("look for the queue %q", c.Queue)
		return classify(op, cn.onThrowaway(ctx, func(ch *amqp.Channel) error {
			_, err := ch.QueueDeclarePassive(c.Queue, true, false, false, false, nil)
			return err
		}))
	case Declare:
		return c.declare(ctx, cn)
	}
	return nil
}

func (c *SourceConfig) declare(ctx context.Context, cn *conn) error {
	if c.deadLetters() {
		// The same type, so that dead letters are as safe as the others.
		op := fmt.Sprintf("declare the dead-letter queue %q", c.DeadLetterQueue)
		err := cn.onThrowaway(ctx, func(ch *amqp.Channel) error {
			args := amqp.Table{"x-queue-type": c.QueueType.String()}
			if c.QueueType == Quorum {
				// Dead letters are read by hand and must not be dropped for it.
				args["x-delivery-limit"] = int32(defaultDeliveryLimit)
			}
			_, err := ch.QueueDeclare(c.DeadLetterQueue, true, false, false, false, args)
			return err
		})
		if err != nil {
			return classify(op, err)
		}
	}
	op := fmt.Sprintf("declare the queue %q", c.Queue)
	err := cn.onThrowaway(ctx, func(ch *amqp.Channel) error {
		_, err := ch.QueueDeclare(c.Queue, true, false, false, false, c.arguments())
		return err
	})
	if err != nil {
		return classify(op, err)
	}
	for _, b := range c.Bindings {
		op := fmt.Sprintf("bind the queue %q to the exchange %q", c.Queue, b.Exchange)
		err := cn.onThrowaway(ctx, func(ch *amqp.Channel) error {
			if b.Kind != "" {
				if err := ch.ExchangeDeclare(b.Exchange, b.Kind, true, false, false, false, nil); err != nil {
					return err
				}
			}
			return ch.QueueBind(c.Queue, b.Key, b.Exchange, false, amqp.Table(b.Args))
		})
		if err != nil {
			return classify(op, err)
		}
	}
	return nil
}

// arguments are those of the queue, the user's own last.
func (c *SourceConfig) arguments() amqp.Table {
	args := amqp.Table{"x-queue-type": c.QueueType.String()}
	if c.SingleActiveConsumer {
		args["x-single-active-consumer"] = true
	}
	if c.deadLetters() {
		// Through the default exchange, which routes by queue name: nothing else to declare.
		args["x-dead-letter-exchange"] = ""
		args["x-dead-letter-routing-key"] = c.DeadLetterQueue
	}
	if c.QueueType == Quorum {
		if c.DeliveryLimit > 0 {
			args["x-delivery-limit"] = int32(c.DeliveryLimit)
		}
		if c.deadLetters() {
			// By default a dead letter is sent at most once, and lost with a full or
			// missing dead-letter queue.
			args["x-dead-letter-strategy"] = "at-least-once"
			args["x-overflow"] = "reject-publish"
		}
	}
	maps.Copy(args, c.QueueArgs)
	return args
}

func (c *SourceConfig) deadLetters() bool {
	return c.Topology == Declare && c.DeadLetterQueue != NoDeadLetters
}

// verifyExchange checks an exchange, or declares it where kind is set. The default
// exchange always exists.
func (c *conn) verifyExchange(ctx context.Context, name, kind string, t Topology) error {
	if name == "" || t == None {
		return nil
	}
	op := fmt.Sprintf("look for the exchange %q", name)
	err := c.onThrowaway(ctx, func(ch *amqp.Channel) error {
		if t == Declare && kind != "" {
			return ch.ExchangeDeclare(name, kind, true, false, false, false, nil)
		}
		return ch.ExchangeDeclarePassive(name, "direct", true, false, false, false, nil)
	})
	return classify(op, err)
}

// readyCount asks for the number of messages that wait in the queue, not counting
// those handed over.
func (c *conn) readyCount(ctx context.Context, queue string) (int64, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, 10*time.Second, errors.New("no answer within 10s"))
	defer cancel()
	var n int64
	err := c.onThrowaway(ctx, func(ch *amqp.Channel) error {
		q, err := ch.QueueDeclarePassive(queue, true, false, false, false, nil)
		n = int64(q.Messages)
		return err
	})
	return n, classify(fmt.Sprintf("count the queue %q", queue), err)
}
