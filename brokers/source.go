package brokers

import (
	"context"
	"log/slog"
	"time"
)

// Source hands over the messages of one subscription and settles them.
//
// Constructors of Sources do no I/O. All methods are safe for concurrent use, but
// there is one Receive at a time, and a Source serves one Open and one Close.
type Source interface {
	// Open connects, verifies or declares what the subscription needs, and starts
	// receiving up to o.Room messages ahead of Receive. Mistakes of configuration
	// (unknown queue, wrong credentials) come out here, as errors of class Fatal
	// that say what to do. ctx bounds Open alone.
	Open(ctx context.Context, o OpenOptions) (Capabilities, error)

	// Receive blocks until there is at least one delivery and returns 1 to max of
	// them, in the order of their lanes. It returns ctx's error when ctx ends first,
	// and loses nothing then: what was buffered comes with the next call. It heals
	// connections itself; an error of another class than Fatal is worth another
	// call after a pause. After Close it returns ErrClosed.
	Receive(ctx context.Context, max int) ([]*Delivery, error)

	// Settle answers deliveries, in one batch where the broker can, and returns one
	// error per settlement in the same order, nil for those the broker has (or that
	// need nothing sent). It is synchronous. A nil slice means all nil.
	//
	// Errors: ErrOwnershipLost when the ownership the delivery was received under
	// is gone (nothing is sent), ErrAlreadySettled for a second settlement,
	// ErrUnsupported for a verb the broker has not, ErrClosed after Close; others
	// are worth another try.
	Settle(ctx context.Context, ss ...Settlement) []error

	// Status asks the broker how much is waiting. It may be slow and is never called
	// on the path of a message.
	Status(ctx context.Context) (Status, error)

	// Close stops receiving, gives back what is unsettled, ends the contexts of all
	// deliveries and frees everything. It never hangs past ctx: what does not end
	// by then is abandoned to the broker, which delivers it again. Further calls
	// return nil.
	Close(ctx context.Context) error
}

// LanePauser is implemented by Sources that can stop handing over the messages
// of some lanes while keeping their ownership, so that one busy lane does not
// fill the whole room.
type LanePauser interface {
	Pause(lanes ...string)
	Resume(lanes ...string)
}

// OpenOptions is what the runner tells its Source.
type OpenOptions struct {
	// Consumer is the consumer's name, for connection names and logs.
	Consumer string
	// Room is the number of messages the runner can hold between Receive and Settle;
	// everything the adapter buffers counts against it. Zero means 64.
	Room int
	// RoomBytes is the same in bytes of Message.Size, a guideline for adapters that
	// can choose how much to fetch. Zero means 64 MiB.
	RoomBytes int64
	// Observer receives what happens outside any call. Nil means nobody does. It is
	// called from the adapter's goroutines, must be safe for concurrent use and must
	// not block.
	Observer func(Event)
	// Logger is where the adapter logs. Nil means nowhere.
	Logger *slog.Logger
}

// GiveBack says what a Source can give back to its broker.
type GiveBack uint8

const (
	// GiveBackNone: nothing, outside Draining and Close (Kafka).
	GiveBackNone GiveBack = iota
	// GiveBackMessage: single messages (SQS standard queues, RabbitMQ).
	GiveBackMessage
	// GiveBackLane: a message together with all later ones of its lane that are in
	// hand (SQS FIFO).
	GiveBackLane
)

// String returns "none", "message" or "lane".
func (g GiveBack) String() string { return [...]string{"none", "message", "lane"}[min(g, 2)] }

// Counting says what Delivery.Attempt is worth.
type Counting uint8

const (
	// CountsNothing: Attempt is always 0 (Kafka).
	CountsNothing Counting = iota
	// CountsRedelivered: Attempt is 1 or 2; 2 means "at least once before"
	// (RabbitMQ classic queues).
	CountsRedelivered
	// CountsDeliveries: Attempt counts the hand-overs (SQS, RabbitMQ quorum queues).
	CountsDeliveries
)

// String returns "nothing", "redelivered" or "deliveries".
func (c Counting) String() string {
	return [...]string{"nothing", "redelivered", "deliveries"}[min(c, 2)]
}

// Unlimited is the RedeliveryHorizon of brokers that may redeliver for ever.
const Unlimited time.Duration = -1

// Capabilities states where brokers differ and nobody may pretend otherwise.
type Capabilities struct {
	// GiveBack is what Release can give back.
	GiveBack GiveBack
	// LaneOrdered: messages of a lane are handed over in the order they were sent,
	// to one consumer at a time, until the first redelivery.
	LaneOrdered bool
	// PrefixSettle: the broker remembers a position per lane, so a message that is
	// not settled holds back the settling of all later ones (Kafka).
	PrefixSettle bool
	// Reject: the broker takes Reject.
	Reject bool
	// MaxRetryDelay is the longest After of a Retry, in whole broker units; 0 means
	// that Retry is unsupported. A broker that can retry at once only says 1.
	MaxRetryDelay time.Duration
	// MaxHold is how long a delivery may stay unsettled before the broker takes it
	// back whatever the Source does; 0 means no limit.
	MaxHold time.Duration
	// RedeliveryHorizon is how long after its sending the broker can still deliver a
	// message; 0 unknown, Unlimited for ever.
	RedeliveryHorizon time.Duration
	// Counting is what Delivery.Attempt is worth.
	Counting Counting
	// StableCoordinates: Delivery.Coordinates are the same on every delivery of a
	// message and of no other one.
	StableCoordinates bool
	// SettleBatch and SettleLinger advise how many settlements are worth one call and
	// how long to wait for them. 0 means no advice: settle at once what there is.
	SettleBatch  int
	SettleLinger time.Duration
}

// Status is what a broker says about a subscription.
type Status struct {
	Connected bool
	Lanes     []LaneStatus
}

// LaneStatus is what a broker says about one lane.
type LaneStatus struct {
	Name string
	// Lag is the number of messages not yet settled or, where the broker counts only
	// those, not yet handed over; -1 unknown.
	Lag int64
	// Oldest is the age of the oldest of them; -1 unknown.
	Oldest time.Duration
}

// Lag returns the sum over the lanes, or -1 when one is unknown or there is none.
func (s Status) Lag() int64 {
	if len(s.Lanes) == 0 {
		return -1
	}
	var n int64
	for _, l := range s.Lanes {
		if l.Lag < 0 {
			return -1
		}
		n += l.Lag
	}
	return n
}

// EventKind names an [Event].
type EventKind string

const (
	// EventConnected: the subscription is (again) receiving.
	EventConnected EventKind = "connected"
	// EventDisconnected: it is not; the Source tries again by itself.
	EventDisconnected EventKind = "disconnected"
	// EventThrottled: the broker asked to slow down.
	EventThrottled EventKind = "throttled"
	// EventGap: messages From..To of Lane are gone before they could be handed over.
	EventGap EventKind = "gap"
	// EventStalled: there is lag and nothing arrives; the Source starts afresh.
	EventStalled EventKind = "stalled"
	// EventSettleLost: a settlement came after its ownership was gone and was dropped.
	EventSettleLost EventKind = "settle-lost"
	// EventLaneAssigned and EventLaneRevoked: the lane came, or is gone.
	EventLaneAssigned EventKind = "lane-assigned"
	EventLaneRevoked  EventKind = "lane-revoked"
)

// Event is something that happened outside any call.
type Event struct {
	Kind EventKind
	Lane Lane
	// From and To bound an EventGap: the first missing position and the first present one.
	From, To int64
	// Count is the number of settlements of an EventSettleLost.
	Count int
	// Err is the cause, if there is one.
	Err error
}
