package brokers

import (
	"context"
	"strconv"
	"time"
)

// Publisher sends messages to a broker. It is safe for concurrent use.
type Publisher interface {
	// Publish sends the messages and returns one Result each, in the same order.
	// Within one call and one non-empty Key nothing is Accepted after something
	// that was not. When ctx ends, what may have been sent is Unknown and the rest
	// NotSent. The messages must not be changed until Publish returns and are not
	// kept afterwards.
	Publish(ctx context.Context, ms ...*Message) []Result
	// Limits says what a single call and a single message may have.
	Limits() PublishLimits
	// Close frees everything and never hangs past ctx.
	Close(ctx context.Context) error
}

// Outcome is what became of one message in a Publish.
type Outcome uint8

const (
	// NotSent: nothing of it left this process; worth another try.
	NotSent Outcome = iota
	// Accepted: the broker has stored it.
	Accepted
	// Refused: the broker said no and has not stored it; Err's class tells whether
	// another try makes sense.
	Refused
	// Unknown: it may be stored or not. Send it again with the same ID; consumers
	// deduplicate.
	Unknown
)

// String returns the outcome's name.
func (o Outcome) String() string {
	switch o {
	case NotSent:
		return "not sent"
	case Accepted:
		return "accepted"
	case Refused:
		return "refused"
	case Unknown:
		return "unknown"
	}
	return "outcome(" + strconv.Itoa(int(o)) + ")"
}

// Result is the answer to one message of a Publish.
type Result struct {
	Outcome Outcome
	// Err says why it is not Accepted; nil if and only if it is. Use [ClassOf].
	Err error
}

// PublishLimits bounds what a Publisher takes. Zero values mean no limit.
type PublishLimits struct {
	// Messages and Bytes are the most that one Publish call handles as one unit; a
	// larger call is split by the Publisher itself.
	Messages int
	Bytes    int64
	// MessageBytes is the most that one message may have.
	MessageBytes int64
	// Headers is the most headers that one message may have.
	Headers int
}

// PublisherFunc makes a Publisher of a function that sends one message: mail,
// webhooks, effects that leave through the outbox without a broker. A nil error
// is Accepted. An error is Refused with the class [ClassOf] gives it, which is
// Retryable unless it says otherwise; an error that wraps [ErrUnknownOutcome], or
// the end of ctx during the call, is Unknown. Messages are sent one after the
// other; after the first of a Key that is not accepted its later ones are NotSent.
type PublisherFunc func(ctx context.Context, m *Message) error

// Publish implements [Publisher].
func (f PublisherFunc) Publish(ctx context.Context, ms ...*Message) []Result {
	rs := make([]Result, len(ms))
	stopped := map[string]bool{}
	for i, m := range ms {
		if err := context.Cause(ctx); err != nil {
			rs[i] = Result{NotSent, err}
			continue
		}
		if m.Key != "" && stopped[m.Key] {
			rs[i] = Result{NotSent, ErrKeyStopped}
			continue
		}
		rs[i] = resultOf(ctx, f(ctx, m))
		if rs[i].Outcome != Accepted && m.Key != "" {
			stopped[m.Key] = true
		}
	}
	return rs
}

// Limits implements [Publisher]: there are none.
func (f PublisherFunc) Limits() PublishLimits { return PublishLimits{} }

// Close implements [Publisher] and does nothing.
func (f PublisherFunc) Close(context.Context) error { return nil }

func resultOf(ctx context.Context, err error) Result {
	switch {
	case err == nil:
		return Result{Outcome: Accepted}
	case ctx.Err() != nil, isUnknown(err):
		return Result{Unknown, err}
	default:
		return Result{Refused, err}
	}
}

// RetryAfterOf returns how long err asks to wait, or 0.
func RetryAfterOf(err error) time.Duration {
	if e, ok := asError(err); ok {
		return e.After
	}
	return 0
}
