package consumer

import (
	"context"
	"strconv"
	"strings"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/inbox"
)

// Headers that [DeadLetterTo] adds to the copy of a dead message.
const (
	HeaderDeadID          = "dead-letter-message-id"
	HeaderDeadConsumer    = "dead-letter-consumer"
	HeaderDeadReason      = "dead-letter-reason"
	HeaderDeadClass       = "dead-letter-error-class"
	HeaderDeadError       = "dead-letter-error" // cut to 1 KiB
	HeaderDeadAttempts    = "dead-letter-attempts"
	HeaderDeadCoordinates = "dead-letter-coordinates"
)

// Enqueuer writes messages into an outbox in the caller's transaction. An
// outbox.Writer is one.
type Enqueuer[Tx any] interface {
	Enqueue(ctx context.Context, tx Tx, ms ...*brokers.Message) error
}

// DeadLetterTo also publishes every message that becomes dead to topic, through an
// outbox of the same database: the copy is enqueued in the transaction that records
// the death, so that there is exactly one of each death, whatever crashes. The message
// stays held as well; a replay that fails for good again is another death.
//
// The copy has the original's payload, key, type and headers, an ID of its own
// (brokers.JoinID("dead", consumer, id, n-th death)), and the headers above. If the
// enqueuing fails the death is not recorded either: it is tried again.
func DeadLetterTo[Tx any](w Enqueuer[Tx], topic string) Option[Tx] {
	return func(l *loop[Tx]) {
		l.deadLetter = func(ctx context.Context, tx Tx, it *inbox.Item, o outcome, death int) error {
			return w.Enqueue(ctx, tx, l.letter(topic, it, o, death))
		}
	}
}

// letter is the copy of a dead message.
func (l *loop[Tx]) letter(topic string, it *inbox.Item, o outcome, death int) *brokers.Message {
	c := it.Message.Clone()
	id := it.ID
	if id == "" {
		id = it.Coordinates // what it is told by where it has no usable ID
	}
	c.ID, c.Topic = brokers.JoinID("dead", l.cfg.Name, id, strconv.Itoa(death)), topic
	add := func(name, value string) {
		if value != "" {
			c.Headers.Add(name, []byte(strings.ToValidUTF8(value, "\uFFFD")))
		}
	}
	add(HeaderDeadID, it.Message.ID)
	add(HeaderDeadConsumer, l.cfg.Name)
	add(HeaderDeadReason, o.reason)
	add(HeaderDeadClass, o.failure.Class)
	const limit = 1 << 10
	add(HeaderDeadError, o.failure.Text[:min(len(o.failure.Text), limit)])
	add(HeaderDeadAttempts, strconv.Itoa(o.attempts))
	add(HeaderDeadCoordinates, it.Coordinates)
	return c
}
