package brokers

import (
	"context"
	"strconv"
	"time"
)

// Lane is a unit of ownership and, where [Capabilities] says LaneOrdered, of
// order on the broker's side: a Kafka partition, an SQS FIFO message group, a
// RabbitMQ queue on one channel.
type Lane struct {
	// Name tells the lane among those of its Source, for example "orders/3".
	Name string
	// Epoch counts the ownerships of the lane: the Kafka generation, the AMQP
	// channel. It is different whenever the broker may have given the lane's
	// messages to somebody else in between.
	Epoch uint64
}

// String returns name#epoch.
func (l Lane) String() string { return l.Name + "#" + strconv.FormatUint(l.Epoch, 10) }

// Delivery is one hand-over of a [Message]. Only its Source settles it. All fields
// are set by the Source and must not be changed.
type Delivery struct {
	Message
	// Lane is where the message came from, with the epoch it was received under.
	Lane Lane
	// Attempt is the broker's lower bound of the number of hand-overs of this
	// message, this one included: 0 unknown (Kafka), 1 certainly the first, n >= 2
	// handed over before. It is for logs, and never the limit of attempts: brokers
	// count innocent neighbours too.
	Attempt int
	// Coordinates say where the message lies on the broker ("orders/3@1041"): for
	// logs and the held row, and the identity of a message without an ID where
	// [Capabilities] says StableCoordinates.
	Coordinates string
	// Defect is why the Source could make no proper Message of what it received
	// (two different message-id headers, a malformed envelope); nil is the rule.
	// Everything that could be read is in Message.
	Defect error
	// Context ends with cause [ErrOwnershipLost] once the broker may have given the
	// message to somebody else, and with [ErrClosed] once the Source is closed. It
	// carries no deadline. On a LaneOrdered lane it never ends before those of the
	// later messages in hand: the next of a key must not start in its place.
	Context context.Context
	// Draining is closed when the lane is about to go: do not start the message any
	// more, Release it; what has started may still be settled while Context lives.
	// Nil means never.
	Draining <-chan struct{}
	// Handle is the adapter's own; nobody else reads it.
	Handle any
}

// Verb is what a [Settlement] asks for.
type Verb uint8

const (
	// Done: the message's effect is committed (or recorded as held or discarded).
	// The broker must not deliver it again, though it may.
	Done Verb = iota + 1
	// Retry: deliver it again after a delay, counted as a failed attempt by brokers
	// that count. ErrUnsupported where Capabilities.MaxRetryDelay is 0.
	Retry
	// Release: give it back at once and without blame, as far as the broker can tell
	// the difference. On a source with GiveBack none it is legal only while the lane
	// is Draining or on Close. On a LaneOrdered lane it gives back the whole lane.
	Release
	// Reject: the broker shall put it to its own dead letters. ErrUnsupported where
	// Capabilities.Reject is false.
	Reject
)

// String returns the verb's name in lower case.
func (v Verb) String() string {
	switch v {
	case Done:
		return "done"
	case Retry:
		return "retry"
	case Release:
		return "release"
	case Reject:
		return "reject"
	}
	return "verb(" + strconv.Itoa(int(v)) + ")"
}

// Settlement is the answer to one delivery.
type Settlement struct {
	Delivery *Delivery
	Verb     Verb
	// After is the delay of a Retry; other verbs ignore it.
	After time.Duration
}
