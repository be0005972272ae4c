package kafka

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"

	"github.com/twiceproof/twiceproof/brokers"
)

// retryPause is what a caller is asked to wait after a failure.
const retryPause = 250 * time.Millisecond

// isCode tells whether err carries one of Kafka's error codes.
func isCode(err error, codes ...kafka.Error) bool {
	var e kafka.Error
	return errors.As(err, &e) && slices.Contains(codes, e)
}

// hasCode tells whether err is a broker's answer.
func hasCode(err error) bool {
	var e kafka.Error
	return errors.As(err, &e)
}

// classify gives an error of a call its class. Kafka's codes and the types of network
// and TLS errors decide, never texts.
func classify(op string, err error) error {
	if err == nil {
		return nil
	}
	var be *brokers.Error
	if errors.As(err, &be) {
		return err
	}
	e := &brokers.Error{Op: op, Err: err}
	e.Class, e.Hint = classOf(err)
	if e.Class == brokers.Retryable || e.Class == brokers.Throttled {
		e.After = retryPause
	}
	return e
}

func classOf(err error) (brokers.Class, string) {
	var code kafka.Error
	if errors.As(err, &code) {
		return classOfCode(code)
	}
	var (
		authority x509.UnknownAuthorityError
		host      x509.HostnameError
		invalid   x509.CertificateInvalidError
		verify    *tls.CertificateVerificationError
		header    tls.RecordHeaderError
		alert     tls.AlertError
	)
	switch {
	case errors.As(err, &authority), errors.As(err, &host), errors.As(err, &invalid), errors.As(err, &verify):
		return brokers.Fatal, "the broker's certificate is not trusted: set Security.TLS.RootCAs and ServerName"
	case errors.As(err, &header):
		return brokers.Fatal, "the broker does not speak TLS on this port: use its TLS port, or leave Security.TLS nil"
	case errors.As(err, &alert):
		return brokers.Fatal, "the broker refuses the TLS connection: it may ask for a client certificate"
	}
	return brokers.Retryable, ""
}

func classOfCode(code kafka.Error) (brokers.Class, string) {
	switch code {
	case kafka.SASLAuthenticationFailed:
		return brokers.Fatal, "check the user, the password and the mechanism of Security.SASL"
	case kafka.UnsupportedSASLMechanism:
		return brokers.Fatal, "the broker has not enabled this mechanism of Security.SASL"
	case kafka.IllegalSASLState:
		return brokers.Fatal, "this port of the broker takes no SASL, or no requests without it: check the port and Security.SASL"
	case kafka.TopicAuthorizationFailed:
		return brokers.Fatal, "the user needs Describe and Read on the topic to consume, Describe and Write to publish"
	case kafka.GroupAuthorizationFailed:
		return brokers.Fatal, "the user needs Read on the group"
	case kafka.ClusterAuthorizationFailed, kafka.BrokerAuthorizationFailed:
		return brokers.Fatal, "the user lacks a permission on the cluster"
	case kafka.InvalidSessionTimeout:
		return brokers.Fatal, "SessionTimeout lies outside the broker's group.min.session.timeout.ms and group.max.session.timeout.ms"
	case kafka.InconsistentGroupProtocol:
		return brokers.Fatal, "the group's other members share neither the assignor range nor roundrobin: use another Group, or reconfigure them"
	case kafka.GroupMaxSizeReached:
		return brokers.Fatal, "the group has group.max.size members already"
	case kafka.InvalidGroupId, kafka.InvalidTopic, kafka.OffsetMetadataTooLarge, kafka.InvalidRequiredAcks, kafka.UnsupportedCompressionType:
		return brokers.Fatal, ""
	case kafka.UnsupportedVersion:
		return brokers.Fatal, "the broker is older than this package needs"
	case kafka.MessageSizeTooLarge, kafka.RecordListTooLarge, kafka.InvalidMessageSize:
		return brokers.Permanent, "the topic's max.message.bytes is smaller"
	case kafka.InvalidRecord:
		return brokers.Permanent, "a compacted topic takes no message without a key"
	case kafka.InvalidTimestamp:
		return brokers.Permanent, ""
	case kafka.ThrottlingQuotaExceeded:
		return brokers.Throttled, ""
	case kafka.IllegalGeneration, kafka.UnknownMemberId, kafka.RebalanceInProgress, kafka.FencedInstanceID:
		return brokers.Lost, ""
	}
	return brokers.Retryable, ""
}

// missingTopic is the error of topics that do not exist.
func missingTopic(class brokers.Class, op string, topics ...string) error {
	return &brokers.Error{
		Class: class, Op: op, After: retryPause,
		Err:  fmt.Errorf("%w: topic %q", brokers.ErrNoRoute, topics),
		Hint: "create the topic, or check its name and that the user may describe it; it is not created here",
	}
}

// unreached tells whether err says that no connection was made, so that nothing was sent.
func unreached(err error) bool {
	var op *net.OpError
	var dns *net.DNSError
	switch {
	case errors.As(err, &op) && op.Op == "dial", errors.As(err, &dns):
		return true
	// The transport's own words for "not in the cached layout of the cluster".
	case errors.Is(err, protocol.ErrNoTopic), errors.Is(err, protocol.ErrNoPartition), errors.Is(err, protocol.ErrNoLeader):
		return true
	}
	return false
}

// hang reports a connection that ended without a word: the way in which a port that
// expects TLS or SASL answers a client that speaks neither.
func hang(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
}

// causeOf returns the end of ctx in place of an error that comes from it.
func causeOf(ctx context.Context, err error) error {
	if err != nil && ctx.Err() != nil {
		return errors.Join(context.Cause(ctx), err)
	}
	return err
}
