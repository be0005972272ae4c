package rabbitmq

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"
	"unicode/utf8"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/twiceproof/twiceproof/brokers"
)

// Headers that stand for AMQP properties which a brokers.Message has no field for.
// A Source adds those that are set; a Publisher sets the properties from them and
// does not send them as headers.
const (
	PropertyCorrelationID   = "amqp-correlation-id"
	PropertyReplyTo         = "amqp-reply-to"
	PropertyAppID           = "amqp-app-id"
	PropertyUserID          = "amqp-user-id"
	PropertyContentEncoding = "amqp-content-encoding"
	PropertyExpiration      = "amqp-expiration"
	PropertyPriority        = "amqp-priority"
)

// HeaderExchange is the header in which a Source says which exchange a message came
// through. A Publisher does not send it: see [PublisherConfig.Route].
const HeaderExchange = "amqp-exchange"

// maxShort is the longest short string of AMQP, in bytes. The library ends the
// whole connection over a longer one, so that they are refused before.
const maxShort = 255

// messageOf makes a Message of a delivery. Everything is copied or owned by it.
func messageOf(d *amqp.Delivery) brokers.Message {
	m := brokers.Message{
		ID: d.MessageId, Topic: d.RoutingKey, Type: d.Type, ContentType: d.ContentType,
		Time: d.Timestamp, Payload: d.Body,
	}
	if m.Payload == nil {
		m.Payload = []byte{}
	}
	names := make([]string, 0, len(d.Headers))
	for name := range d.Headers {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		switch v := d.Headers[name]; name {
		case brokers.HeaderKey:
			m.Key = string(headerBytes(v))
		case brokers.HeaderTime:
			if t, err := time.Parse(time.RFC3339Nano, string(headerBytes(v))); err == nil {
				m.Time = t
			} else {
				m.Headers.Add(name, headerBytes(v))
			}
		default:
			addHeader(&m.Headers, name, v)
		}
	}
	for _, p := range []struct{ name, value string }{
		{HeaderExchange, d.Exchange}, {PropertyCorrelationID, d.CorrelationId}, {PropertyReplyTo, d.ReplyTo},
		{PropertyAppID, d.AppId}, {PropertyUserID, d.UserId}, {PropertyContentEncoding, d.ContentEncoding},
		{PropertyExpiration, d.Expiration},
	} {
		if p.value != "" {
			m.Headers.Set(p.name, []byte(p.value))
		}
	}
	if d.Priority > 0 {
		m.Headers.Set(PropertyPriority, strconv.AppendUint(nil, uint64(d.Priority), 10))
	}
	return m
}

// addHeader adds one value, or each value of an array of simple ones.
func addHeader(hs *brokers.Headers, name string, v any) {
	if list, ok := v.([]any); ok && !slices.ContainsFunc(list, nested) {
		for _, e := range list {
			hs.Add(name, headerBytes(e))
		}
		return
	}
	hs.Add(name, headerBytes(v))
}

func nested(v any) bool {
	switch v.(type) {
	case []any, amqp.Table:
		return true
	}
	return false
}

// headerBytes maps a typed AMQP value to bytes; see the package documentation.
func headerBytes(v any) []byte {
	switch v := v.(type) {
	case nil:
		return []byte{}
	case string:
		return []byte(v)
	case []byte:
		return v
	case time.Time:
		return []byte(v.UTC().Format(time.RFC3339))
	case amqp.Decimal:
		return strconv.AppendFloat(nil, float64(v.Value)/pow10(v.Scale), 'f', int(v.Scale), 64)
	case float32:
		return strconv.AppendFloat(nil, float64(v), 'g', -1, 32)
	case float64:
		return strconv.AppendFloat(nil, v, 'g', -1, 64)
	case amqp.Table, []any:
		b, err := json.Marshal(jsonValue(v))
		if err != nil { // a NaN, for example
			return []byte(fmt.Sprint(v))
		}
		return b
	default: // booleans and integers
		return []byte(fmt.Sprint(v))
	}
}

func pow10(n uint8) float64 {
	p := 1.0
	for range n {
		p *= 10
	}
	return p
}

// jsonValue replaces what JSON would write otherwise than headerBytes does.
func jsonValue(v any) any {
	switch v := v.(type) {
	case amqp.Table:
		out := make(map[string]any, len(v))
		for k, e := range v {
			out[k] = jsonValue(e)
		}
		return out
	case []any:
		out := make([]any, len(v))
		for i, e := range v {
			out[i] = jsonValue(e)
		}
		return out
	case []byte:
		if utf8.Valid(v) {
			return string(v)
		}
		return base64.StdEncoding.EncodeToString(v)
	case time.Time:
		return v.UTC().Format(time.RFC3339)
	}
	return v
}

// headerValue is text where it can be, because other clients expect text, and a
// byte array otherwise.
func headerValue(b []byte) any {
	if utf8.Valid(b) {
		return string(b)
	}
	return b
}

// publishingOf makes a Publishing of a Message, or says why it cannot be one: a
// permanent error, found before a single byte is sent.
func publishingOf(m *brokers.Message, exchange, key string, cfg *PublisherConfig) (amqp.Publishing, error) {
	p := amqp.Publishing{
		MessageId: m.ID, Type: m.Type, ContentType: m.ContentType, AppId: cfg.AppID,
		DeliveryMode: amqp.Persistent, Body: m.Payload, Headers: amqp.Table{},
	}
	if cfg.Transient {
		p.DeliveryMode = amqp.Transient
	}
	if m.Key != "" {
		p.Headers[brokers.HeaderKey] = headerValue([]byte(m.Key))
	}
	if !m.Time.IsZero() {
		p.Timestamp = m.Time
		p.Headers[brokers.HeaderTime] = m.Time.UTC().Format(time.RFC3339Nano)
	}
	size := 0
	for _, h := range m.Headers {
		size += len(h.Key) + len(h.Value) + 6
		done, err := setProperty(&p, h)
		if err != nil {
			return p, err
		}
		if !done {
			addTableValue(p.Headers, h)
		}
	}
	return p, checkLimits(m, &p, exchange, key, size, cfg)
}

// setProperty sets the property that a header stands for, if it does.
func setProperty(p *amqp.Publishing, h brokers.Header) (bool, error) {
	v := string(h.Value)
	switch h.Key {
	case PropertyCorrelationID:
		p.CorrelationId = v
	case PropertyReplyTo:
		p.ReplyTo = v
	case PropertyAppID:
		p.AppId = v
	case PropertyContentEncoding:
		p.ContentEncoding = v
	case PropertyExpiration:
		p.Expiration = v
	case PropertyPriority:
		n, err := strconv.ParseUint(v, 10, 8)
		if err != nil {
			return true, permanent(fmt.Errorf("header %s is %q: it must be 0 to 255", PropertyPriority, v))
		}
		p.Priority = uint8(n)
	case PropertyUserID, HeaderExchange:
		// The broker refuses another user than the connection's, and the exchange is
		// chosen by Route: both only say where a message came from.
	case brokers.HeaderKey, brokers.HeaderTime:
		// Message has fields for these.
	case "x-death", "x-delivery-count", "x-acquired-count":
		// The broker's own bookkeeping about an earlier life of the message. Sent back
		// as text it would be counted on, or break the dead-lettering of the copy.
	default:
		return false, nil
	}
	return true, nil
}

// addTableValue adds a header; a key that repeats becomes an array.
func addTableValue(t amqp.Table, h brokers.Header) {
	v := headerValue(h.Value)
	switch old := t[h.Key].(type) {
	case nil:
		t[h.Key] = v
	case []any:
		t[h.Key] = append(old, v)
	default:
		t[h.Key] = []any{old, v}
	}
}

func checkLimits(m *brokers.Message, p *amqp.Publishing, exchange, key string, headerBytes int, cfg *PublisherConfig) error {
	for _, s := range []struct{ what, value string }{
		{"message id", p.MessageId}, {"type", p.Type}, {"content type", p.ContentType}, {"exchange", exchange},
		{"routing key", key}, {PropertyAppID, p.AppId}, {PropertyCorrelationID, p.CorrelationId}, {PropertyReplyTo, p.ReplyTo},
		{PropertyContentEncoding, p.ContentEncoding}, {PropertyExpiration, p.Expiration},
	} {
		if len(s.value) > maxShort {
			return permanent(fmt.Errorf("%s has %d bytes; AMQP allows %d", s.what, len(s.value), maxShort))
		}
	}
	for name := range p.Headers {
		if len(name) > maxShort {
			return permanent(fmt.Errorf("a header's name has %d bytes; AMQP allows %d", len(name), maxShort))
		}
	}
	// The properties of a message must fit into one frame.
	if limit := cfg.MaxHeaderBytes; headerBytes+len(m.Key) > limit {
		return permanent(fmt.Errorf("the headers have %d bytes; the limit is %d", headerBytes+len(m.Key), limit))
	}
	if int64(len(m.Payload)) > cfg.MaxMessageBytes {
		return permanent(fmt.Errorf("the payload has %d bytes; MaxMessageBytes is %d", len(m.Payload), cfg.MaxMessageBytes))
	}
	return nil
}

func permanent(err error) error {
	return &brokers.Error{Class: brokers.Permanent, Op: "publish", Err: err}
}

// attemptOf returns the number of hand-overs, this one included, or a lower bound.
func attemptOf(d *amqp.Delivery, q QueueType) int {
	if !d.Redelivered {
		return 1
	}
	if q == Classic {
		return 2 // a counting header would be of the message's life in another queue
	}
	// Quorum queues count: x-delivery-count the returns that the limit limits, and
	// since 4.3 x-acquired-count the hand-overs.
	n := max(integer(d.Headers["x-delivery-count"])+1, integer(d.Headers["x-acquired-count"]))
	return int(max(n, 2))
}

func integer(v any) int64 {
	switch v := v.(type) {
	case int64:
		return v
	case int32:
		return int64(v)
	case int16:
		return int64(v)
	case int8:
		return int64(v)
	case uint8:
		return int64(v)
	case uint16:
		return int64(v)
	case uint32:
		return int64(v)
	}
	return 0
}

// identify sets the ID by the configured function. What it cannot tell is a defect
// of the message: the runner keeps it as dead.
func identify(m *brokers.Message, id func(*brokers.Message) (string, error)) error {
	if id == nil {
		return nil
	}
	got, err := callID(m, id)
	if err != nil {
		return &brokers.Error{Class: brokers.Permanent, Op: "read the message's ID", Err: err}
	}
	m.ID = got
	return nil
}

// callID turns a panic of the user's function into an error: one odd message must
// not end the process again and again.
func callID(m *brokers.Message, id func(*brokers.Message) (string, error)) (got string, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = errors.Join(brokers.ErrBadID, fmt.Errorf("the ID function panicked: %v", p))
		}
	}()
	return id(m)
}
