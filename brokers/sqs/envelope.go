package sqs

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
)

// Envelope says what a queue's messages are wrapped in.
type Envelope uint8

const (
	// NoEnvelope: the body is the producer's, as from [Publisher], SendMessage, or SNS
	// with raw message delivery.
	NoEnvelope Envelope = iota
	// SNS: the JSON that SNS wraps around a message without raw delivery. Its message
	// attributes become the message's, so that "message-id" works as without SNS.
	SNS
	// EventBridge: the JSON of an event, straight from a rule or through SNS. The payload
	// is "detail", the type "detail-type"; the ID is the event's "id" only if
	// [SourceConfig.ID] takes it from the header "event-id": a producer that repeats
	// PutEvents gets another one. Prefer an ID in the detail.
	EventBridge
	// AutoEnvelope takes off what is recognised, and leaves anything else as it is.
	AutoEnvelope
)

// errEnvelope: the body is not what the configuration says.
var errEnvelope = errors.New("the body is not in the configured envelope")

type snsEnvelope struct {
	Type, TopicArn, MessageId, Subject, Timestamp string
	Message                                       *string
	MessageAttributes                             map[string]struct{ Type, Value string }
}

type eventEnvelope struct {
	Version    string          `json:"version"`
	ID         string          `json:"id"`
	DetailType string          `json:"detail-type"`
	Source     string          `json:"source"`
	Account    string          `json:"account"`
	Region     string          `json:"region"`
	Time       string          `json:"time"`
	Detail     json.RawMessage `json:"detail"`
}

// unwrap takes the envelopes off m. An error leaves m as it was.
func (e Envelope) unwrap(m *brokers.Message, attrs *attributes) error {
	if e == NoEnvelope {
		return nil
	}
	sns, isSNS := parseSNS(m.Payload)
	if isSNS {
		if err := sns.open(m, attrs); err != nil {
			return err
		}
	}
	switch {
	case e == SNS && !isSNS:
		return fmt.Errorf("%w: no SNS notification; with raw message delivery set NoEnvelope", errEnvelope)
	case e == SNS:
		return nil
	}
	event, ok := parseEvent(m.Payload)
	if ok {
		event.open(m)
	} else if e == EventBridge {
		return fmt.Errorf("%w: no EventBridge event", errEnvelope)
	}
	return nil
}

func isObject(body []byte) bool {
	return bytes.HasPrefix(bytes.TrimLeft(body, " \t\r\n"), []byte("{"))
}

func parseSNS(body []byte) (*snsEnvelope, bool) {
	var s snsEnvelope
	if !isObject(body) || json.Unmarshal(body, &s) != nil {
		return nil, false
	}
	return &s, s.Type == "Notification" && s.TopicArn != "" && s.MessageId != "" && s.Message != nil
}

func (s *snsEnvelope) open(m *brokers.Message, attrs *attributes) error {
	values := make(map[string][]byte, len(s.MessageAttributes))
	for name, a := range s.MessageAttributes {
		values[name] = []byte(a.Value)
		if a.Type == "Binary" {
			v, err := base64.StdEncoding.DecodeString(a.Value)
			if err != nil {
				return fmt.Errorf("%w: attribute %q is no base64", errEnvelope, name)
			}
			values[name] = v
		}
	}
	for name, v := range values {
		attrs.set(name, v)
	}
	m.Payload = []byte(*s.Message)
	attrs.set("sns-message-id", []byte(s.MessageId))
	attrs.set("sns-topic-arn", []byte(s.TopicArn))
	if s.Subject != "" {
		attrs.set("sns-subject", []byte(s.Subject))
	}
	if t, err := time.Parse(time.RFC3339Nano, s.Timestamp); err == nil {
		m.Time = t
	}
	return nil
}

func parseEvent(body []byte) (*eventEnvelope, bool) {
	var e eventEnvelope
	if !isObject(body) || json.Unmarshal(body, &e) != nil {
		return nil, false
	}
	return &e, e.Version != "" && e.ID != "" && e.DetailType != "" && e.Source != "" && len(e.Detail) > 0
}

func (e *eventEnvelope) open(m *brokers.Message) {
	m.Payload, m.Type, m.ContentType = slices.Clone([]byte(e.Detail)), e.DetailType, "application/json"
	for _, h := range [][2]string{{"event-id", e.ID}, {"event-source", e.Source}, {"event-account", e.Account}, {"event-region", e.Region}} {
		if h[1] != "" {
			m.Headers.Set(h[0], []byte(h[1]))
		}
	}
	if t, err := time.Parse(time.RFC3339Nano, e.Time); err == nil {
		m.Time = t
	}
}
