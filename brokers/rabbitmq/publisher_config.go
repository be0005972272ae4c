package rabbitmq

import (
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/twiceproof/twiceproof/brokers"
)

const (
	defaultWindow         = 500
	defaultConfirmTimeout = 30 * time.Second
	defaultMessageBytes   = 16 << 20
	defaultHeaderBytes    = 96 << 10
)

// PublisherConfig configures a [Publisher]. URL is required; every other zero value
// is ready and sends to the default exchange, which routes by queue name.
type PublisherConfig struct {
	// URL, MoreURLs, TLS, Dial, SASL and Heartbeat are as in [SourceConfig].
	URL       string
	MoreURLs  []string
	TLS       *tls.Config
	Dial      DialFunc
	SASL      []amqp.Authentication
	Heartbeat time.Duration
	// Name is shown by the broker as the connection's. Empty means "twiceproof publisher".
	Name string

	// Exchange is where messages go, with Message.Topic as routing key. Empty means the
	// default exchange: Topic is a queue's name.
	Exchange string
	// Route, if set, chooses exchange and routing key of each message instead. It must
	// be fast and safe for concurrent use.
	Route func(m *brokers.Message) (exchange, key string)
	// Topology says what is done about an exchange before its first use. The zero value
	// is Verify. Declare creates it, durable, as ExchangeKind.
	Topology Topology
	// ExchangeKind is the kind that Declare creates. Empty means "topic".
	ExchangeKind string

	// Window is the most messages in flight (sent and not confirmed) per exchange. 0
	// means 500.
	Window int
	// PerKeyInFlight is the most messages of one non-empty Key in flight in one Publish
	// call. 0 means 1: the next one is sent when the one before is confirmed, so that
	// within a call and a Key nothing is Accepted after something that was not. More
	// is faster for few keys and gives that promise up.
	PerKeyInFlight int
	// ConfirmTimeout bounds the wait for confirms of one Publish whose context has no
	// earlier deadline; what is not confirmed by then is Unknown. 0 means 30 s.
	ConfirmTimeout time.Duration
	// AllowUnroutable accepts messages that no queue gets: the broker drops them and
	// confirms. Default: false; they are Refused with brokers.ErrNoRoute.
	AllowUnroutable bool
	// Transient sends messages that do not survive a restart of the broker. Default:
	// false, they are persistent.
	Transient bool
	// AppID is the app_id property of messages that have no "amqp-app-id" header.
	AppID string
	// MaxMessageBytes is the largest payload; a larger one is Refused before it is sent,
	// since the broker would end the channel over it. 0 means 16 MiB, which is RabbitMQ
	// 4's own limit (max_message_size).
	MaxMessageBytes int64
	// MaxHeaderBytes is the same for the names and values of all headers, which must
	// fit into one frame (128 KiB by default). 0 means 96 KiB.
	MaxHeaderBytes int

	// Observer receives connects, disconnects and alarms. Nil means nobody does. It
	// must be safe for concurrent use and must not block.
	Observer func(brokers.Event)
	// Logger is where the Publisher logs. Nil means nowhere.
	Logger *slog.Logger
}

func (c PublisherConfig) withDefaults() (PublisherConfig, connConfig, error) {
	cc, errs := newConnConfig(c.URL, c.MoreURLs, c.TLS, c.Dial, c.SASL, c.Heartbeat)
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if c.Topology > None {
		bad("Topology %d is unknown: use Verify, Declare or None", c.Topology)
	}
	if len(c.Exchange) > maxShort {
		bad("Exchange has %d bytes; AMQP allows %d", len(c.Exchange), maxShort)
	}
	if len(c.AppID) > maxShort {
		bad("AppID has %d bytes; AMQP allows %d", len(c.AppID), maxShort)
	}
	if c.Window < 0 || c.PerKeyInFlight < 0 || c.ConfirmTimeout < 0 || c.MaxMessageBytes < 0 || c.MaxHeaderBytes < 0 {
		bad("Window, PerKeyInFlight, ConfirmTimeout, MaxMessageBytes and MaxHeaderBytes must not be negative")
	}
	setDefault(&c.Name, "twiceproof publisher")
	setDefault(&c.ExchangeKind, "topic")
	setDefault(&c.Window, defaultWindow)
	setDefault(&c.PerKeyInFlight, 1)
	setDefault(&c.ConfirmTimeout, defaultConfirmTimeout)
	setDefault(&c.MaxMessageBytes, defaultMessageBytes)
	setDefault(&c.MaxHeaderBytes, defaultHeaderBytes)
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	cc.name = c.Name
	if len(errs) > 0 {
		return c, cc, brokers.NewFatal("rabbitmq.PublisherConfig", errors.Join(errs...), "")
	}
	return c, cc, nil
}

func setDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}
