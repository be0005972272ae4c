package rabbitmq

import (
	"crypto/tls"
	"errors"
	"strings"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/twiceproof/twiceproof/brokers"
)

// retryPause is what a publisher's caller is asked to wait after a failure.
const retryPause = 500 * time.Millisecond

// classifyConnect gives an error of connecting its class.
func classifyConnect(op string, err error) error {
	var ae *amqp.Error
	var certificate *tls.CertificateVerificationError
	var plain tls.RecordHeaderError
	switch {
	case errors.As(err, &certificate):
		return brokers.NewFatal(op, err, "the broker's certificate is not trusted: set TLS with its CA in RootCAs, and the name it is issued for")
	case errors.As(err, &plain):
		return brokers.NewFatal(op, err, "the broker does not speak TLS on this port: 5671 is the usual one for amqps://, 5672 for amqp://")
	case !errors.As(err, &ae):
	case limitReached(ae):
		return &brokers.Error{Class: brokers.Throttled, Op: op, Err: err, After: retryPause, Hint: "a limit of connections is reached on the broker"}
	case ae.Server && ae.Code == amqp.AccessRefused, errors.Is(err, amqp.ErrSASL):
		return brokers.NewFatal(op, err, `check user name and password; the user "guest" may connect from the broker's own host only`)
	case ae.Server && ae.Code == amqp.NotAllowed:
		return brokers.NewFatal(op, err, "check that the vhost exists and that the user has permissions on it")
	}
	return &brokers.Error{Class: brokers.Retryable, Op: op, Err: err, After: retryPause}
}

func limitReached(ae *amqp.Error) bool {
	return ae.Server && (ae.Code == amqp.NotAllowed || ae.Code == amqp.AccessRefused) && strings.Contains(ae.Reason, "limit")
}

// classify gives an error of a channel its class. The library's Recoverable is no
// guide: it is true for a missing queue and false for a broken connection.
func classify(op string, err error) error {
	if err == nil {
		return nil
	}
	if be := (*brokers.Error)(nil); errors.As(err, &be) {
		return err
	}
	e := &brokers.Error{Class: brokers.Retryable, Op: op, Err: err, After: retryPause}
	var ae *amqp.Error
	if !errors.As(err, &ae) {
		return e
	}
	switch ae.Code {
	case amqp.NotFound:
		e.Class, e.Err = brokers.Fatal, errors.Join(brokers.ErrNoRoute, err)
		e.Hint = "create it, check the name and the vhost, or set Topology to Declare"
	case amqp.AccessRefused:
		if strings.Contains(ae.Reason, "exclusive use") { // another consumer is exclusive
			e.Hint = "another consumer has the queue for itself; this one waits"
			break
		}
		e.Class, e.Hint = brokers.Fatal, "the user lacks a permission: see `rabbitmqctl list_permissions`"
	case amqp.NotAllowed, amqp.NotImplemented:
		e.Class = brokers.Fatal
	case amqp.ResourceLocked:
		e.Hint = "the queue is exclusive to another connection"
	case amqp.PreconditionFailed:
		classifyPrecondition(e, ae)
	}
	return e
}

func classifyPrecondition(e *brokers.Error, ae *amqp.Error) {
	switch {
	case strings.Contains(ae.Reason, "inequivalent arg"):
		e.Class = brokers.Fatal
		e.Hint = "it exists with other arguments, which cannot be changed: make the configuration equal, delete or rename the old one, or set Topology to Verify"
	case isConsumerTimeout(ae):
		e.Hint = "a delivery was not answered within the broker's consumer_timeout: raise it, or lower MaxHold below it"
	case strings.Contains(ae.Reason, "unknown delivery tag"):
		e.Hint = "this is a bug in brokers/rabbitmq; please report it"
	case strings.Contains(ae.Reason, "message size"):
		e.Hint = "raise max_message_size on the broker or lower MaxMessageBytes"
	default: // invalid arguments
		e.Class = brokers.Fatal
	}
}

func isConsumerTimeout(ae *amqp.Error) bool {
	return ae.Code == amqp.PreconditionFailed && strings.Contains(ae.Reason, "timed out")
}

// isNoQueue tells a missing queue or exchange.
func isNoQueue(err error) bool { return errors.Is(err, brokers.ErrNoRoute) }
