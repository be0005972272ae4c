package kafka

import (
	"bytes"
	"errors"
	"fmt"
	"time"

	"github.com/segmentio/kafka-go/protocol"

	"github.com/twiceproof/twiceproof/brokers"
)

// recordOverhead is what a record takes beside its key, value and headers, generously.
const recordOverhead = 64

// timestampAge is how old a message's Time may be to become the record's timestamp.
const timestampAge = 24 * time.Hour

// messageOf makes a Message of a record. Everything is copied: the record's memory is
// used again. The error is a defect of the message, which is as complete as it can be.
func messageOf(topic string, r *protocol.Record) (brokers.Message, error) {
	m := brokers.Message{Topic: topic, Time: r.Time}
	key, err := copyOf(r.Key)
	if err != nil {
		return m, err
	}
	m.Key = string(key)
	if m.Payload, err = copyOf(r.Value); err != nil {
		return m, err
	}
	var defect error
	var seen [3]bool
	for _, h := range r.Headers {
		switch h.Key {
		case brokers.HeaderMessageID:
			if !first(&seen[0]) {
				if m.ID != string(h.Value) {
					defect = &brokers.Error{Class: brokers.Permanent, Op: "read " + h.Key, Err: brokers.ErrBadID}
				}
				continue
			}
			m.ID = string(h.Value)
			continue
		case brokers.HeaderType:
			if first(&seen[1]) {
				m.Type = string(h.Value)
				continue
			}
		case brokers.HeaderContentType:
			if first(&seen[2]) {
				m.ContentType = string(h.Value)
				continue
			}
		case brokers.HeaderTime:
			if t, err := time.Parse(time.RFC3339Nano, string(h.Value)); err == nil {
				m.Time = t
				continue
			}
		}
		if m.Headers == nil {
			m.Headers = make(brokers.Headers, 0, len(r.Headers))
		}
		m.Headers.Add(h.Key, nonNil(h.Value))
	}
	return m, defect
}

func first(seen *bool) bool {
	was := *seen
	*seen = true
	return !was
}

// copyOf keeps nil apart from empty.
func copyOf(b protocol.Bytes) ([]byte, error) {
	if b == nil {
		return nil, nil
	}
	defer b.Close() //nolint:errcheck // it only gives memory back
	p, err := protocol.ReadAll(b)
	return nonNil(p), err
}

func nonNil(b []byte) []byte {
	if b == nil {
		return []byte{}
	}
	return bytes.Clone(b)
}

// recordOf makes a record of a Message and says how large it is, before compression.
func recordOf(m *brokers.Message, now time.Time) (r protocol.Record, size int) {
	r = protocol.Record{Time: now}
	if m.Key != "" {
		r.Key = protocol.NewBytes([]byte(m.Key))
	}
	if m.Payload != nil {
		r.Value = protocol.NewBytes(m.Payload)
	}
	r.Headers = make([]protocol.Header, 0, len(m.Headers)+4)
	add := func(key, value string) {
		if value != "" {
			r.Headers = append(r.Headers, protocol.Header{Key: key, Value: []byte(value)})
		}
	}
	add(brokers.HeaderMessageID, m.ID)
	add(brokers.HeaderType, m.Type)
	add(brokers.HeaderContentType, m.ContentType)
	if !m.Time.IsZero() {
		add(brokers.HeaderTime, m.Time.UTC().Format(time.RFC3339Nano))
		if age := now.Sub(m.Time); age >= 0 && age <= timestampAge {
			r.Time = m.Time
		}
	}
	for _, h := range m.Headers {
		switch h.Key {
		case brokers.HeaderMessageID, brokers.HeaderType, brokers.HeaderContentType, brokers.HeaderTime:
			// Message has fields for these.
		default:
			r.Headers = append(r.Headers, protocol.Header{Key: h.Key, Value: h.Value})
		}
	}
	size = recordOverhead + len(m.Key) + len(m.Payload)
	for _, h := range r.Headers {
		size += len(h.Key) + len(h.Value) + 4
	}
	return r, size
}

// CloudEventsID is a [SourceConfig.ID] for events in CloudEvents' binary mode: the ID
// is unique within its source only, so both are joined (see brokers.JoinID). A message
// that has a "message-id" and no "ce_id" keeps it.
func CloudEventsID(m *brokers.Message) (string, error) {
	id, err := brokers.HeaderID(m.Headers, "ce_id")
	if err != nil {
		return "", err
	}
	source, err := brokers.HeaderID(m.Headers, "ce_source")
	switch {
	case err != nil:
		return "", err
	case id == "" && source == "":
		return m.ID, nil
	case id == "" || source == "":
		return "", fmt.Errorf("%w: a CloudEvent needs both ce_id and ce_source", errIncomplete)
	}
	return brokers.JoinID(source, id), nil
}

var errIncomplete = errors.New("incomplete event")

// identify sets the ID by the configured function. What it cannot tell is a defect of
// the message: the runner keeps it as dead.
func identify(m *brokers.Message, id func(*brokers.Message) (string, error)) (err error) {
	if id == nil {
		return nil
	}
	defer func() {
		// One odd message must not end the process again and again.
		if p := recover(); p != nil {
			err = &brokers.Error{Class: brokers.Permanent, Op: "read the message's ID", Err: errors.Join(brokers.ErrBadID, fmt.Errorf("the ID function panicked: %v", p))}
		}
	}()
	got, err := id(m)
	if err != nil {
		return &brokers.Error{Class: brokers.Permanent, Op: "read the message's ID", Err: err}
	}
	m.ID = got
	return nil
}
