package sqs

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/sqs/types"
	"github.com/google/uuid"

	"github.com/twiceproof/twiceproof/brokers"
)

const (
	// HeadersAttribute carries all headers of a message as JSON where attributes of
	// their own cannot.
	HeadersAttribute = "message-headers"
	// EncodingAttribute says how the body is encoded: "base64", or "empty" for an empty
	// payload, which SQS does not take.
	EncodingAttribute = "content-encoding"

	encodedBase64 = "base64"
	encodedEmpty  = "empty"

	// prefixUnkeyed begins the group of a message without a key: a group of its own.
	prefixUnkeyed = "unkeyed."
	// prefixHashed begins the group of a key that SQS does not take as one.
	prefixHashed = "sha256."

	maxAttributes = 10
	maxGroup      = 128

	headerMessageID = "sqs-message-id"
	headerDedupID   = "sqs-deduplication-id"
)

// attributes are a message's, in any order; they become headers sorted by name.
type attributes struct{ m map[string][]byte }

func (a *attributes) set(name string, v []byte) {
	if a.m == nil {
		a.m = map[string][]byte{}
	}
	a.m[name] = v
}

// take removes an attribute and returns it as text.
func (a *attributes) take(name string) string {
	v := a.m[name]
	delete(a.m, name)
	return string(v)
}

// isText tells what SQS takes as text: the characters of XML 1.0.
func isText[T string | []byte](v T) bool {
	s := string(v)
	if !utf8.ValidString(s) {
		return false
	}
	for _, r := range s {
		if r < 0x20 && r != '\t' && r != '\n' && r != '\r' || r == 0xFFFE || r == 0xFFFF {
			return false
		}
	}
	return true
}

// decode makes the Message of what was received. The error is the delivery's Defect;
// everything that could be read is in the message.
func (c *SourceConfig) decode(in *types.Message, fifo bool) (brokers.Message, error) {
	m := brokers.Message{Topic: nameOf(c.Queue), Payload: []byte(aws.ToString(in.Body))}
	var attrs attributes
	for name, v := range in.MessageAttributes {
		if v.BinaryValue != nil {
			attrs.set(name, slices.Clone(v.BinaryValue))
		} else {
			attrs.set(name, []byte(aws.ToString(v.StringValue)))
		}
	}
	if ms, err := strconv.ParseInt(in.Attributes["SentTimestamp"], 10, 64); err == nil {
		m.Time = time.UnixMilli(ms).UTC()
	}
	var defects []error
	if err := c.Envelope.unwrap(&m, &attrs); err != nil {
		defects = append(defects, err)
	}
	defects = append(defects, decodeBody(&m, &attrs), decodeFields(&m, &attrs))
	if group := in.Attributes["MessageGroupId"]; fifo && m.Key == "" && !strings.HasPrefix(group, prefixUnkeyed) {
		m.Key = group
	}
	if err := c.identify(&m, in); err != nil {
		defects = append(defects, err)
	}
	if err := errors.Join(defects...); err != nil {
		return m, &brokers.Error{Class: brokers.Permanent, Op: "decode " + aws.ToString(in.MessageId), Err: err}
	}
	return m, nil
}

// identify lets the user's function find the ID.
func (c *SourceConfig) identify(m *brokers.Message, in *types.Message) error {
	if c.ID == nil {
		return nil
	}
	asked := *m
	asked.Headers = slices.Clone(m.Headers)
	asked.Headers.Add(headerMessageID, []byte(aws.ToString(in.MessageId)))
	if dedup := in.Attributes["MessageDeduplicationId"]; dedup != "" {
		asked.Headers.Add(headerDedupID, []byte(dedup))
	}
	id, err := c.ID(&asked)
	if err != nil {
		return fmt.Errorf("find the message's id: %w", err)
	}
	m.ID = id
	return nil
}

func decodeBody(m *brokers.Message, attrs *attributes) error {
	switch enc := string(attrs.m[EncodingAttribute]); enc {
	case encodedEmpty:
		m.Payload = []byte{}
	case encodedBase64:
		raw, err := base64.StdEncoding.DecodeString(string(m.Payload))
		if err != nil {
			return fmt.Errorf("the body says that it is base64: %w", err)
		}
		m.Payload = raw
	default: // a producer's own, which is no business of ours
		return nil
	}
	delete(attrs.m, EncodingAttribute)
	return nil
}

// decodeFields moves the attributes to where they belong.
func decodeFields(m *brokers.Message, attrs *attributes) error {
	m.ID, m.Key = attrs.take(brokers.HeaderMessageID), attrs.take(brokers.HeaderKey)
	if t := attrs.take(brokers.HeaderType); t != "" {
		m.Type = t
	}
	if t := attrs.take(brokers.HeaderContentType); t != "" {
		m.ContentType = t
	}
	var errs []error
	if v := attrs.take(brokers.HeaderTime); v != "" {
		if t, err := time.Parse(time.RFC3339Nano, v); err == nil {
			m.Time = t
		} else {
			errs = append(errs, fmt.Errorf("attribute %s: %w", brokers.HeaderTime, err))
		}
	}
	folded := attrs.take(HeadersAttribute)
	for _, name := range slices.Sorted(maps.Keys(attrs.m)) {
		m.Headers.Add(name, attrs.m[name])
	}
	if folded != "" {
		hs, err := unfold(folded)
		m.Headers = append(m.Headers, hs...)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// foldedHeader is one header in HeadersAttribute: a text, or bytes as base64.
type foldedHeader struct {
	Key   string  `json:"k"`
	Text  *string `json:"v,omitempty"`
	Bytes []byte  `json:"b,omitempty"`
}

func fold(hs brokers.Headers) (string, error) {
	out := make([]foldedHeader, len(hs))
	for i, h := range hs {
		out[i].Key = h.Key
		if isText(h.Value) {
			out[i].Text = aws.String(string(h.Value))
		} else {
			out[i].Bytes = h.Value
		}
	}
	b, err := json.Marshal(out)
	return string(b), err
}

func unfold(s string) (brokers.Headers, error) {
	var in []foldedHeader
	if err := json.Unmarshal([]byte(s), &in); err != nil {
		return nil, fmt.Errorf("attribute %s: %w", HeadersAttribute, err)
	}
	hs := make(brokers.Headers, len(in))
	for i, h := range in {
		v := h.Bytes
		if h.Text != nil {
			v = []byte(*h.Text)
		}
		hs[i] = brokers.Header{Key: h.Key, Value: v}
	}
	return hs, nil
}

// encode makes the entry of a message. An error is Permanent: it will never pass.
func (c *PublisherConfig) encode(m *brokers.Message, fifo bool) (types.SendMessageBatchRequestEntry, error) {
	var e types.SendMessageBatchRequestEntry
	attrs := map[string]types.MessageAttributeValue{}
	body := string(m.Payload)
	switch {
	case body == "":
		body = "-"
		attrs[EncodingAttribute] = text(encodedEmpty)
	case isText(m.Payload):
	case c.TextOnly:
		return e, errors.New("the payload has characters that SQS does not take, and TextOnly is set")
	default:
		body = base64.StdEncoding.EncodeToString(m.Payload)
		attrs[EncodingAttribute] = text(encodedBase64)
	}
	e.MessageBody = aws.String(body)
	if fifo {
		e.MessageGroupId = aws.String(groupOf(m))
		dedup := m.ID
		if c.DedupID != nil {
			dedup = c.DedupID(m)
		}
		e.MessageDeduplicationId = aws.String(dedupOf(dedup))
	}
	if m.Key != "" && aws.ToString(e.MessageGroupId) != m.Key {
		attrs[brokers.HeaderKey] = value([]byte(m.Key))
	}
	for name, v := range map[string]string{brokers.HeaderMessageID: m.ID, brokers.HeaderType: m.Type, brokers.HeaderContentType: m.ContentType} {
		if v != "" {
			attrs[name] = value([]byte(v))
		}
	}
	if !m.Time.IsZero() {
		attrs[brokers.HeaderTime] = text(m.Time.UTC().Format(time.RFC3339Nano))
	}
	if err := addHeaders(attrs, m.Headers); err != nil {
		return e, err
	}
	e.MessageAttributes = attrs
	return e, nil
}

func addHeaders(attrs map[string]types.MessageAttributeValue, hs brokers.Headers) error {
	if len(hs) == 0 {
		return nil
	}
	folding := len(attrs)+len(hs) > maxAttributes
	seen := map[string]bool{}
	for _, h := range hs {
		folding = folding || seen[h.Key] || !attributeName(h.Key) || len(h.Value) == 0
		seen[h.Key] = true
	}
	if !folding {
		for _, h := range hs {
			attrs[h.Key] = value(h.Value)
		}
		return nil
	}
	s, err := fold(hs)
	if err != nil {
		return err
	}
	attrs[HeadersAttribute] = text(s)
	return nil
}

// attributeName tells a name that SQS takes and that is not ours.
func attributeName(s string) bool {
	switch s {
	case brokers.HeaderMessageID, brokers.HeaderType, brokers.HeaderContentType, brokers.HeaderKey, brokers.HeaderTime, HeadersAttribute, EncodingAttribute:
		return false
	}
	low := strings.ToLower(s)
	if s == "" || len(s) > 256 || strings.HasPrefix(low, "aws.") || strings.HasPrefix(low, "amazon.") ||
		s[0] == '.' || s[len(s)-1] == '.' || strings.Contains(s, "..") {
		return false
	}
	return !strings.ContainsFunc(s, func(r rune) bool {
		return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '_' || r == '-' || r == '.')
	})
}

func text(s string) types.MessageAttributeValue {
	return types.MessageAttributeValue{DataType: aws.String("String"), StringValue: aws.String(s)}
}

// value is text where SQS takes it as text, and bytes otherwise.
func value(v []byte) types.MessageAttributeValue {
	if isText(v) {
		return text(string(v))
	}
	return types.MessageAttributeValue{DataType: aws.String("Binary"), BinaryValue: slices.Clone(v)}
}

// groupOf returns the message group of a key.
func groupOf(m *brokers.Message) string {
	switch {
	case m.Key == "":
		return prefixUnkeyed + hashed(orRandom(m.ID))[:32]
	case len(m.Key) > maxGroup, !punctual(m.Key), strings.HasPrefix(m.Key, prefixUnkeyed), strings.HasPrefix(m.Key, prefixHashed):
		return prefixHashed + hashed(m.Key)
	}
	return m.Key
}

func dedupOf(id string) string {
	id = orRandom(id)
	if len(id) > maxGroup || !punctual(id) {
		return hashed(id)
	}
	return id
}

func orRandom(id string) string {
	if id == "" {
		return uuid.NewString()
	}
	return id
}

func hashed(s string) string {
	h := sha256.Sum256([]byte(s))
	return hex.EncodeToString(h[:])
}

// punctual tells the characters that SQS takes in group and deduplication IDs.
func punctual(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r > '~' })
}

// sizeOf counts a message as SQS does: body and attributes with names and types.
func sizeOf(e *types.SendMessageBatchRequestEntry) int64 {
	n := len(aws.ToString(e.MessageBody))
	for name, v := range e.MessageAttributes {
		n += len(name) + len(aws.ToString(v.DataType)) + len(aws.ToString(v.StringValue)) + len(v.BinaryValue)
	}
	return int64(n)
}
