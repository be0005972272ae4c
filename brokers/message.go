package brokers

import (
	"bytes"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Names of the headers (Kafka), message attributes (SQS) and properties that
// carry the fields of a [Message] where a broker has no place of its own for
// them.
const (
	HeaderMessageID   = "message-id"
	HeaderType        = "message-type"
	HeaderContentType = "content-type"
	HeaderKey         = "message-key"
	// HeaderTime carries Message.Time in RFC 3339 with nanoseconds, for brokers
	// whose own timestamp is coarser (AMQP: whole seconds).
	HeaderTime = "message-time"
)

// Message is what the producer wrote. It is the same on every delivery.
type Message struct {
	// ID is assigned by the producer and never changes: it is the deduplication
	// key. IDs are compared byte for byte. Empty means that the message carries
	// none; such a message is held, never processed without protection.
	ID string
	// Topic is where the message is published to or came from: the Kafka topic,
	// the SQS queue, the RabbitMQ routing key (the exchange is the publisher's
	// configuration).
	Topic string
	// Key: messages with one Key are handled in order. Empty means no order.
	Key string
	// Type is the event type, for example "order.placed". May be empty.
	Type string
	// ContentType is the media type of Payload. May be empty.
	ContentType string
	// Time is the producer's time; the zero Time means unknown.
	Time time.Time
	// Headers is everything else that travels beside the payload, in order.
	Headers Headers
	// Payload is the body. A nil Payload is a tombstone where the broker can tell
	// one from an empty body (Kafka, memory); other brokers deliver an empty,
	// non-nil Payload.
	Payload []byte
}

// Clone returns a deep copy of m.
func (m *Message) Clone() *Message {
	c := *m
	c.Headers = m.Headers.Clone()
	c.Payload = bytes.Clone(m.Payload)
	return &c
}

// Size is the number of bytes that m is accounted with against
// [OpenOptions.RoomBytes]: its payload, headers and identifiers.
func (m *Message) Size() int64 {
	n := len(m.ID) + len(m.Topic) + len(m.Key) + len(m.Type) + len(m.ContentType) + len(m.Payload)
	for _, h := range m.Headers {
		n += len(h.Key) + len(h.Value)
	}
	return int64(n)
}

// Header is one key and value.
type Header struct {
	Key   string
	Value []byte
}

// Headers is an ordered multi-map: Kafka repeats keys, and their order counts.
type Headers []Header

// Get returns the value of the first header with the key.
func (hs Headers) Get(key string) (value []byte, ok bool) {
	for _, h := range hs {
		if h.Key == key {
			return h.Value, true
		}
	}
	return nil, false
}

// Values returns the values of all headers with the key, in order.
func (hs Headers) Values(key string) [][]byte {
	var vs [][]byte
	for _, h := range hs {
		if h.Key == key {
			vs = append(vs, h.Value)
		}
	}
	return vs
}

// Add appends a header.
func (hs *Headers) Add(key string, value []byte) { *hs = append(*hs, Header{key, value}) }

// Set replaces all headers with the key by one at the place of the first, or
// appends it.
func (hs *Headers) Set(key string, value []byte) {
	at := slices.IndexFunc(*hs, func(h Header) bool { return h.Key == key })
	if at < 0 {
		hs.Add(key, value)
		return
	}
	(*hs)[at].Value = value
	rest := slices.DeleteFunc((*hs)[at+1:], func(h Header) bool { return h.Key == key })
	*hs = (*hs)[:at+1+len(rest)]
}

// Del removes all headers with the key.
func (hs *Headers) Del(key string) {
	*hs = slices.DeleteFunc(*hs, func(h Header) bool { return h.Key == key })
}

// Clone returns a deep copy.
func (hs Headers) Clone() Headers {
	if hs == nil {
		return nil
	}
	c := make(Headers, len(hs))
	for i, h := range hs {
		c[i] = Header{h.Key, bytes.Clone(h.Value)}
	}
	return c
}

// JoinID joins parts to one message ID that no other list of parts joins to: each
// part is preceded by its length. Use it where IDs are unique per producer only:
//
//	ID: func(m *brokers.Message) (string, error) {
//		producer, _ := m.Headers.Get("producer")
//		return brokers.JoinID(string(producer), m.ID), nil
//	}
func JoinID(parts ...string) string {
	var b strings.Builder
	for _, p := range parts {
		b.WriteString(strconv.Itoa(len(p)))
		b.WriteByte(':')
		b.WriteString(p)
	}
	return b.String()
}

// HeaderID returns the one message ID that the headers named key carry. Equal
// values collapse; two different ones are an error that wraps [ErrBadID]; none is
// "" without an error.
func HeaderID(hs Headers, key string) (string, error) {
	vs := hs.Values(key)
	if len(vs) == 0 {
		return "", nil
	}
	for _, v := range vs[1:] {
		if !bytes.Equal(v, vs[0]) {
			return "", &Error{Class: Permanent, Op: "read " + key, Err: ErrBadID}
		}
	}
	return string(vs[0]), nil
}
