package brokertest

import (
	"bytes"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
)

func messageCases() []testCase {
	return []testCase{
		{name: "message/round-trip", run: roundTrip},
		{name: "message/headers-binary", run: headersBinary},
		{name: "message/headers-repeated", run: headersRepeated},
		{name: "message/text-beyond-ascii", run: textBeyondASCII},
		{name: "message/payload-empty", run: payloadEmpty},
		{name: "message/payload-nil-is-no-empty-payload", run: payloadNil},
		{name: "message/payload-big", run: payloadBig},
		{name: "message/time-unknown", run: timeUnknown},
		{name: "message/no-key-type-or-headers", run: bare},
		{name: "message/no-id", run: noID},
		{name: "message/two-ids-are-a-defect", run: twoIDs, not: needsHook(func(f Fixture) bool { return f.PublishIDs != nil }, "PublishIDs")},
		{name: "message/equal-ids-collapse", run: equalIDs, not: needsHook(func(f Fixture) bool { return f.PublishIDs != nil }, "PublishIDs")},
		{name: "message/shares-no-memory", run: sharesNoMemory},
	}
}

// trip publishes m and receives it.
func (e *env) trip(m *brokers.Message) *brokers.Delivery {
	e.Helper()
	src := e.open(10)
	e.publish(m)
	d := e.receive(src, 1)[0]
	e.done(src, d)
	return d
}

func (e *env) equal(what string, got, want any) {
	e.Helper()
	if got != want {
		e.Errorf("%s: got %q, want %q", what, got, want)
	}
}

func roundTrip(e *env) {
	payload := make([]byte, 256)
	for i := range payload {
		payload[i] = byte(i)
	}
	m := &brokers.Message{
		ID: "order-1/placed", Topic: e.f.Destination, Key: "customer-7", Type: "order.placed",
		ContentType: "application/json", Time: time.Date(2024, 2, 29, 23, 59, 58, 123e6, time.UTC),
		Headers: brokers.Headers{{Key: "trace", Value: []byte("abc")}, {Key: "tenant", Value: []byte("t1")}},
		Payload: payload,
	}
	want := m.Clone()
	d := e.trip(m)
	e.equal("ID", d.ID, want.ID)
	e.equal("Topic", d.Topic, want.Topic)
	e.equal("Key", d.Key, want.Key)
	e.equal("Type", d.Type, want.Type)
	e.equal("ContentType", d.ContentType, want.ContentType)
	if !d.Time.Truncate(time.Millisecond).Equal(want.Time) {
		e.Errorf("Time: got %v, want %v", d.Time, want.Time)
	}
	if !bytes.Equal(d.Payload, want.Payload) {
		e.Errorf("Payload: got %x, want %x", d.Payload, want.Payload)
	}
	for _, h := range want.Headers {
		if v, ok := d.Headers.Get(h.Key); !ok || !bytes.Equal(v, h.Value) {
			e.Errorf("header %s: got %q, want %q", h.Key, v, h.Value)
		}
	}
	if d.Defect != nil {
		e.Errorf("Defect: %v", d.Defect)
	}
	e.atLeast(d, 1)
}

func headersBinary(e *env) {
	m := e.message(1)
	m.Headers.Add("bytes", []byte{0, 1, 0xfe, 0xff, '\n', 'x'})
	d := e.trip(m)
	if v, _ := d.Headers.Get("bytes"); !bytes.Equal(v, []byte{0, 1, 0xfe, 0xff, '\n', 'x'}) {
		e.Errorf("got %x", v)
	}
}

func headersRepeated(e *env) {
	m := e.message(1)
	m.Headers = brokers.Headers{{Key: "a", Value: []byte("1")}, {Key: "b", Value: []byte("2")}, {Key: "a", Value: []byte("3")}}
	d := e.trip(m)
	var got []string
	for _, h := range d.Headers {
		if h.Key == "a" || h.Key == "b" {
			got = append(got, h.Key+"="+string(h.Value))
		}
	}
	if !slices.Equal(got, []string{"a=1", "b=2", "a=3"}) {
		e.Errorf("got %v, want the three in order", got)
	}
}

func textBeyondASCII(e *env) {
	m := e.message(1)
	m.ID = "żółć 注文 🧾 \"'\\ & <b> " + strings.Repeat("x", 150)
	m.Key, m.Type = "ключ 7", "заказ.создан"
	d := e.trip(m)
	e.equal("ID", d.ID, m.ID)
	e.equal("Key", d.Key, m.Key)
	e.equal("Type", d.Type, m.Type)
}

func payloadEmpty(e *env) {
	m := e.message(1)
	m.Payload = []byte{}
	d := e.trip(m)
	if d.Payload == nil || len(d.Payload) != 0 {
		e.Errorf("got %#v, want an empty, non-nil payload", d.Payload)
	}
}

func payloadNil(e *env) {
	m := e.message(1)
	m.Payload = nil
	if d := e.trip(m); d.Payload != nil {
		e.Errorf("got %#v, want nil", d.Payload)
	}
}

func payloadBig(e *env) {
	m := e.message(1)
	m.Payload = make([]byte, e.BigPayload)
	for i := range m.Payload {
		m.Payload[i] = byte(i * 7)
	}
	want := bytes.Clone(m.Payload)
	if d := e.trip(m); !bytes.Equal(d.Payload, want) {
		e.Errorf("%d bytes came back as other %d bytes", len(want), len(d.Payload))
	}
}

func timeUnknown(e *env) {
	m := e.message(1)
	m.Time = time.Time{}
	before := time.Now()
	d := e.trip(m)
	// The broker's own time is as good; a made-up one (1970) is not.
	if !d.Time.IsZero() && d.Time.Before(before.Add(-time.Hour)) {
		e.Errorf("an unknown time came back as %v", d.Time)
	}
}

func bare(e *env) {
	d := e.trip(&brokers.Message{ID: "x", Topic: e.f.Destination, Payload: []byte("p")})
	e.equal("ID", d.ID, "x")
	e.equal("Key", d.Key, "")
	e.equal("Type", d.Type, "")
	e.equal("payload", string(d.Payload), "p")
}

func noID(e *env) {
	d := e.trip(&brokers.Message{Topic: e.f.Destination, Payload: []byte("p")})
	e.equal("ID", d.ID, "") // an ID made up here would be another one on the next delivery
	e.equal("payload", string(d.Payload), "p")
}

func twoIDs(e *env) {
	src := e.open(10)
	e.f.PublishIDs("one", "two")
	d := e.receive(src, 1)[0]
	if !errors.Is(d.Defect, brokers.ErrBadID) {
		e.Errorf("Defect is %v, want ErrBadID", d.Defect)
	}
	e.done(src, d)
}

func equalIDs(e *env) {
	src := e.open(10)
	e.f.PublishIDs("same", "same")
	d := e.receive(src, 1)[0]
	e.equal("ID", d.ID, "same")
	if d.Defect != nil {
		e.Errorf("Defect: %v", d.Defect)
	}
	e.done(src, d)
}

func sharesNoMemory(e *env) {
	src := e.open(10)
	m := e.message(1)
	m.Headers.Add("h", []byte("value"))
	want := m.Clone()
	e.publish(m)
	m.Payload[0], m.Headers[0].Value[0] = '!', '!' // it is the caller's again
	d := e.receive(src, 1)[0]
	check := func(d *brokers.Delivery) {
		e.Helper()
		if v, _ := d.Headers.Get("h"); !bytes.Equal(d.Payload, want.Payload) || !bytes.Equal(v, []byte("value")) {
			e.Errorf("got payload %q and header %q", d.Payload, v)
		}
	}
	check(d)
	d.Payload[0] = '?' // a careless handler
	for i := range d.Headers {
		if d.Headers[i].Key == "h" {
			d.Headers[i].Value[0] = '?'
		}
	}
	e.close(src)
	next := e.open(10)
	d = e.receive(next, 1)[0]
	check(d)
	e.done(next, d)
}
