package consumer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
)

// Message is what a handler gets.
type Message struct {
	*brokers.Message
	// Consumer is the runner's name, Coordinates where the message lay on the broker.
	Consumer, Coordinates string
	// Attempt is the number of this run, counted from 1 over first deliveries and
	// retries.
	Attempt int
	// Replayed: the message was held and is run again.
	Replayed bool
}

// Event is a message with its decoded body.
type Event[T any] struct {
	Message
	Body T
}

// Handler does the work of one message in tx. Its result decides what becomes of
// the message: nil commits; [Permanent], [RetryAfter] and [Discard] say so; any
// other error is tried again.
type Handler[Tx any] func(ctx context.Context, tx Tx, m *Message) error

// JSON makes a Handler of a function that wants the payload decoded from JSON. A
// payload that cannot be decoded is Permanent.
func JSON[T, Tx any](h func(ctx context.Context, tx Tx, e Event[T]) error) Handler[Tx] {
	return func(ctx context.Context, tx Tx, m *Message) error {
		e := Event[T]{Message: *m}
		if err := json.Unmarshal(m.Payload, &e.Body); err != nil {
			return Permanent(fmt.Errorf("decode payload into %T: %w", e.Body, err))
		}
		return h(ctx, tx, e)
	}
}

// ErrUnknownType is what a [Mux] returns for a type that nobody handles. Such a
// message is held and tried again for Config.UnknownTypeFor: a newer instance may
// know it.
var ErrUnknownType = errors.New("no handler for this message type")

// Mux calls handlers by Message.Type. Handlers are added before the first message.
type Mux[Tx any] struct{ handlers map[string]Handler[Tx] }

// Handle adds the handler of a type. A second one for the same type panics.
func (x *Mux[Tx]) Handle(typ string, h Handler[Tx]) {
	if x.handlers == nil {
		x.handlers = map[string]Handler[Tx]{}
	}
	if _, ok := x.handlers[typ]; ok {
		panic("consumer: two handlers for message type " + typ)
	}
	x.handlers[typ] = h
}

// Serve is a [Handler].
func (x *Mux[Tx]) Serve(ctx context.Context, tx Tx, m *Message) error {
	h, ok := x.handlers[m.Type]
	if !ok {
		return fmt.Errorf("%w: %q", ErrUnknownType, m.Type)
	}
	return h(ctx, tx, m)
}

type permanentError struct{ error }
type discardError struct{ error }
type retryAfterError struct {
	error
	after time.Duration
}

func (e permanentError) Unwrap() error  { return e.error }
func (e discardError) Unwrap() error    { return e.error }
func (e retryAfterError) Unwrap() error { return e.error }

// Permanent says that the message will never pass: it is held as dead at once.
func Permanent(err error) error { return permanentError{orUnsaid(err)} }

// Discard says that the message needs no work: what the handler wrote is rolled
// back, and the claim is kept with the reason.
func Discard(err error) error { return discardError{orUnsaid(err)} }

// RetryAfter says when the message is worth another run: it is held until then. The
// run counts as failed.
func RetryAfter(d time.Duration, err error) error { return retryAfterError{orUnsaid(err), d} }

func orUnsaid(err error) error {
	if err == nil {
		return errors.New("no reason given")
	}
	return err
}
