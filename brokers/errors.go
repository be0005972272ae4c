package brokers

import (
	"context"
	"errors"
	"strconv"
	"time"
)

// Errors that callers branch on. Adapters wrap them in an [Error] with the
// vendor's own error beside them, which stays reachable through errors.As.
var (
	// ErrOwnershipLost: the broker may have given the message to somebody else.
	ErrOwnershipLost = errors.New("ownership of the message is lost: the broker may have given it to another consumer")
	// ErrClosed: the Source or Publisher is closed.
	ErrClosed = errors.New("closed")
	// ErrAlreadySettled: the delivery was settled before.
	ErrAlreadySettled = errors.New("delivery is settled already")
	// ErrUnsupported: the broker has no such verb; see Capabilities.
	ErrUnsupported = errors.New("not supported by this broker")
	// ErrNoRoute: there is no such topic, queue, exchange or binding.
	ErrNoRoute = errors.New("no such destination")
	// ErrKeyStopped: an earlier message of the same Key was not accepted.
	ErrKeyStopped = errors.New("not sent: an earlier message of the same key was not accepted")
	// ErrUnknownOutcome: the message may have been sent or not.
	ErrUnknownOutcome = errors.New("unknown outcome: it may have been sent")
	// ErrBadID: the message carries an ID that cannot be used.
	ErrBadID = errors.New("unusable message id: two different ones on one message")
)

// Class says what to do about an error.
type Class uint8

const (
	// Retryable: try again with backoff. The class of every error that says nothing
	// else.
	Retryable Class = iota
	// Throttled: wait (RetryAfterOf) and do less.
	Throttled
	// Permanent: this message will never pass.
	Permanent
	// Lost: ownership is gone; forget the delivery.
	Lost
	// Fatal: the configuration is wrong; stop and tell a person.
	Fatal
)

// String returns the class's name in lower case.
func (c Class) String() string {
	switch c {
	case Retryable:
		return "retryable"
	case Throttled:
		return "throttled"
	case Permanent:
		return "permanent"
	case Lost:
		return "lost"
	case Fatal:
		return "fatal"
	}
	return "class(" + strconv.Itoa(int(c)) + ")"
}

// Error is an error with its class.
type Error struct {
	Class Class
	// Op is what was being done, for example `consume "orders"`.
	Op string
	// After is how long to wait before another try; 0 means the caller decides.
	After time.Duration
	// Err is the cause; Hint, if set, says what to do about it.
	Err  error
	Hint string
}

// Error implements error.
func (e *Error) Error() string {
	s := ""
	if e.Op != "" {
		s = e.Op + ": "
	}
	if e.Err != nil {
		s += e.Err.Error()
	} else {
		s += e.Class.String()
	}
	if e.Hint != "" {
		s += " (" + e.Hint + ")"
	}
	return s
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// ClassOf returns the class of the first [Error] in err's tree. ErrOwnershipLost is
// Lost by itself; anything else is Retryable, nil included.
func ClassOf(err error) Class {
	if e, ok := asError(err); ok {
		return e.Class
	}
	if errors.Is(err, ErrOwnershipLost) {
		return Lost
	}
	return Retryable
}

// NewFatal returns an error of class Fatal for op with a hint that says what to do.
func NewFatal(op string, err error, hint string) error {
	return &Error{Class: Fatal, Op: op, Err: err, Hint: hint}
}

func asError(err error) (*Error, bool) {
	var e *Error
	ok := errors.As(err, &e)
	return e, ok
}

func isUnknown(err error) bool {
	return errors.Is(err, ErrUnknownOutcome) || errors.Is(err, context.DeadlineExceeded)
}
