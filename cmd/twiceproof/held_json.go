package main

import (
	"time"
	"unicode/utf8"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/inbox"
)

// heldJSON is a held message for scripts, and a line of an export: the whole message.
type heldJSON struct {
	Seq         int64        `json:"seq"`
	Consumer    string       `json:"consumer"`
	Reason      string       `json:"reason"`
	Dead        bool         `json:"dead"`
	Waiting     bool         `json:"waiting"`
	Attempts    int          `json:"attempts"`
	Starts      int          `json:"starts"`
	HeldFor     float64      `json:"held_seconds"`
	DueIn       *float64     `json:"due_in_seconds"`
	First       *failureJSON `json:"first_error"`
	Last        *failureJSON `json:"last_error"`
	Coordinates string       `json:"coordinates"`
	EditedFrom  string       `json:"edited_from,omitempty"`
	Fingerprint []byte       `json:"fingerprint"`
	Processed   []byte       `json:"processed_fingerprint,omitempty"`
	Message     messageJSON  `json:"message"`
}

type failureJSON struct {
	Class string `json:"class"`
	Text  string `json:"text"`
	Stack string `json:"stack,omitempty"`
}

// messageJSON is a message: text as it is, or base64 in the field beside it where it is
// no text.
type messageJSON struct {
	ID                string       `json:"id"`
	IDBase64          []byte       `json:"id_base64,omitempty"`
	Topic             string       `json:"topic"`
	TopicBase64       []byte       `json:"topic_base64,omitempty"`
	Key               string       `json:"key"`
	KeyBase64         []byte       `json:"key_base64,omitempty"`
	Type              string       `json:"type"`
	TypeBase64        []byte       `json:"type_base64,omitempty"`
	ContentType       string       `json:"content_type"`
	ContentTypeBase64 []byte       `json:"content_type_base64,omitempty"`
	Time              *time.Time   `json:"time"`
	Headers           []headerJSON `json:"headers"`
	Payload           *string      `json:"payload"` // null: a tombstone, or see payload_base64
	PayloadBase64     []byte       `json:"payload_base64,omitempty"`
}

type headerJSON struct {
	Key         string  `json:"key"`
	KeyBase64   []byte  `json:"key_base64,omitempty"`
	Value       *string `json:"value"` // null: none, or see value_base64
	ValueBase64 []byte  `json:"value_base64,omitempty"`
}

// orBase64 returns s as text, or as bytes where it is no text.
func orBase64(s string) (string, []byte) {
	if utf8.ValidString(s) {
		return s, nil
	}
	return "", []byte(s)
}

// bytesOrBase64 is orBase64 for what may be nil.
func bytesOrBase64(b []byte) (*string, []byte) {
	if b == nil {
		return nil, nil
	}
	text, raw := orBase64(string(b))
	if raw != nil {
		return nil, raw
	}
	return &text, nil
}

func messageOf(m *brokers.Message) messageJSON {
	j := messageJSON{Headers: []headerJSON{}}
	j.ID, j.IDBase64 = orBase64(m.ID)
	j.Topic, j.TopicBase64 = orBase64(m.Topic)
	j.Key, j.KeyBase64 = orBase64(m.Key)
	j.Type, j.TypeBase64 = orBase64(m.Type)
	j.ContentType, j.ContentTypeBase64 = orBase64(m.ContentType)
	if !m.Time.IsZero() {
		j.Time = &m.Time
	}
	for _, h := range m.Headers {
		var hj headerJSON
		hj.Key, hj.KeyBase64 = orBase64(h.Key)
		hj.Value, hj.ValueBase64 = bytesOrBase64(h.Value)
		j.Headers = append(j.Headers, hj)
	}
	j.Payload, j.PayloadBase64 = bytesOrBase64(m.Payload)
	return j
}

func jsonOf(h inbox.HeldMessage) heldJSON {
	failure := func(f inbox.Failure) *failureJSON {
		if f == (inbox.Failure{}) {
			return nil
		}
		return &failureJSON{f.Class, f.Text, f.Stack}
	}
	j := heldJSON{Seq: h.Seq, Consumer: h.Consumer, Reason: h.Reason, Dead: h.Dead, Waiting: h.Waiting, Attempts: h.Attempts, Starts: h.Starts,
		HeldFor: h.HeldFor.Seconds(), First: failure(h.First), Last: failure(h.Last), Coordinates: h.Coordinates, EditedFrom: h.EditedFrom,
		Fingerprint: h.Fingerprint, Processed: h.ProcessedFingerprint, Message: messageOf(h.Message)}
	if !h.Dead && !h.Waiting {
		due := h.DueIn.Seconds()
		j.DueIn = &due
	}
	return j
}
