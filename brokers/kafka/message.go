package kafka

import (
	"errors"
	"fmt"
	"time"
	"unsafe"

	"github.com/segmentio/kafka-go/protocol"

	"github.com/twiceproof/twiceproof/brokers"
)

// recordOverhead is what a record takes beside its key, value and headers, generously.
const recordOverhead = 64

// timestampAge is how old a message's Time may be to become the record's timestamp.
const timestampAge = 24 * time.Hour

// messageOf makes a Message of a record. It keeps the record's memory, which nobody
// writes to: of one batch, all messages that live keep its one buffer. The error is a
// defect of the message, which is as complete as it can be.
func messageOf(topic string, r *rec) (brokers.Message, error) {
	m := brokers.Message{Topic: topic, Time: r.time, Key: text(r.key), Payload: r.value}
	var defect error
	var haveID, haveType, haveContentType bool
	for i := range r.count {
		name, value := r.header()
		switch string(name) {
		case brokers.HeaderMessageID:
			if haveID && m.ID != text(value) {
				defect = &brokers.Error{Class: brokers.Permanent, Op: "read " + brokers.HeaderMessageID, Err: brokers.ErrBadID}
			}
			if !haveID {
				m.ID, haveID = text(value), true
			}
			continue
		case brokers.HeaderType:
			if !haveType {
				m.Type, haveType = text(value), true
				continue
			}
		case brokers.HeaderContentType:
			if !haveContentType {
				m.ContentType, haveContentType = text(value), true
				continue
			}
		case brokers.HeaderTime:
			if t, err := time.Parse(time.RFC3339Nano, string(value)); err == nil {
				m.Time = t
				continue
			}
		}
		if m.Headers == nil {
			m.Headers = make(brokers.Headers, 0, r.count-i)
		}
		if value == nil {
			value = []byte{}
		}
		m.Headers.Add(string(name), value)
	}
	return m, defect
}

// text is a string in the bytes' own memory.
func text(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }

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
