package kafka

import (
	"context"
	"crypto/tls"
	"net"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/sasl"

	"github.com/twiceproof/twiceproof/brokers"
)

// callTimeout bounds one request to a broker.
const callTimeout = 10 * time.Second

// Security says how connections are made. kafka-go makes those of the group and those
// of the data in two different ways; both follow this. The zero value is plain TCP
// without credentials.
type Security struct {
	// TLS encrypts the connections. Nil means plain TCP; &tls.Config{} trusts the
	// system's authorities. It stays yours and is not changed.
	TLS *tls.Config
	// SASL authenticates: plain.Mechanism{Username, Password} or scram.Mechanism(
	// scram.SHA512, user, password), of kafka-go's packages sasl/plain and sasl/scram.
	// Without TLS the password of PLAIN is readable on the wire.
	SASL sasl.Mechanism
	// Dial opens network connections, for example through a proxy. Nil means a
	// net.Dialer with a timeout of 5 s.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// Transport is used for the data instead of one of the Source's or Publisher's own.
	// It stays yours: Close does not touch it. Where TLS, SASL and Dial are not set,
	// they are the Transport's.
	Transport *kafka.Transport
}

func (p *problems) check(s Security) {
	if t := s.Transport; t != nil {
		if s.TLS != nil && t.TLS != s.TLS {
			p.add("Security.TLS is not that of Security.Transport: set only the Transport's")
		}
		if s.SASL != nil && t.SASL != nil && s.SASL.Name() != t.SASL.Name() {
			p.add("Security.SASL is not that of Security.Transport: set only the Transport's")
		}
	}
}

// client is what both halves of kafka-go's API need, made of one configuration.
type client struct {
	*kafka.Client
	rt     *kafka.Transport
	dialer *kafka.Dialer
	addrs  []string
	// free closes the connections of a transport of ours.
	free func()
}

// newClient connects to nothing. topics bounds what the transport asks the cluster
// about; nil means all topics.
func newClient(addrs []string, sec Security, id string, topics []string) *client {
	rt, free := sec.Transport, func() {}
	if rt != nil {
		if sec.TLS == nil {
			sec.TLS = rt.TLS
		}
		if sec.SASL == nil {
			sec.SASL = rt.SASL
		}
		if sec.Dial == nil {
			sec.Dial = rt.Dial
		}
	}
	if sec.Dial == nil {
		sec.Dial = (&net.Dialer{Timeout: 5 * time.Second}).DialContext
	}
	if rt == nil {
		rt = &kafka.Transport{
			Dial: sec.Dial, DialTimeout: 5 * time.Second, TLS: sec.TLS, SASL: sec.SASL, ClientID: id,
			// A moved leader is noticed by the clock alone.
			MetadataTTL: 2 * time.Second, MetadataTopics: topics,
		}
		free = rt.CloseIdleConnections
	}
	return &client{
		Client: &kafka.Client{Addr: kafka.TCP(addrs...), Timeout: callTimeout, Transport: rt},
		rt:     rt, free: free, addrs: addrs,
		dialer: &kafka.Dialer{ClientID: id, DialFunc: sec.Dial, Timeout: 5 * time.Second, TLS: sec.TLS, SASLMechanism: sec.SASL},
	}
}

// partitions returns the number of partitions of each topic, without creating any.
// What is missing is not in the map; another error of a topic is the error.
func (c *client) partitions(ctx context.Context, topics []string) (map[string]int, error) {
	res, err := c.Metadata(ctx, &kafka.MetadataRequest{Topics: topics})
	if err != nil {
		return nil, err
	}
	n := make(map[string]int, len(topics))
	for _, t := range res.Topics {
		switch {
		case isCode(t.Error, kafka.UnknownTopicOrPartition):
		case t.Error != nil:
			return nil, t.Error
		case len(t.Partitions) > 0:
			n[t.Name] = len(t.Partitions)
		}
	}
	return n, nil
}

// explain returns a better error for a connection that ended without a word, if there
// is one: kafka-go's dialer, which the group uses, passes on what its transport loses
// of a refused login.
func (c *client) explain(ctx context.Context, err error) error {
	if !hang(err) {
		return err
	}
	for _, addr := range c.addrs {
		conn, derr := c.dialer.DialContext(ctx, "tcp", addr)
		if derr == nil {
			_ = conn.Close()
			return err
		}
		if class, _ := classOf(derr); class == brokers.Fatal {
			return derr
		}
	}
	return err
}
