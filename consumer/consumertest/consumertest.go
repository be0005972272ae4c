// Package consumertest is a kit for tests of handlers: it builds the messages that a
// runner would give them, and runs them through a real runner that delivers every
// message twice.
//
// It guarantees that what [Deliver] reports has been through claim, handler, commit
// and settle as in production, on the store that the test gives. It does not test
// the broker: the deliveries come from the memory broker.
package consumertest

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/brokers/memory"
	"github.com/twiceproof/twiceproof/consumer"
	"github.com/twiceproof/twiceproof/inbox"
)

// Topic is where the messages of this package come from.
const Topic = "consumertest"

// NewMessage returns a message as a handler gets it on its first run, with body as
// JSON; a []byte is taken as it is.
func NewMessage(t testing.TB, id string, body any) *consumer.Message {
	t.Helper()
	payload, ok := body.([]byte)
	if !ok {
		var err error
		if payload, err = json.Marshal(body); err != nil {
			t.Fatalf("consumertest: body of message %q: %v", id, err)
		}
	}
	return &consumer.Message{Message: &brokers.Message{ID: id, Topic: Topic, Payload: payload, Time: time.Now()},
		Consumer: t.Name(), Coordinates: Topic + "/" + id, Attempt: 1}
}

// NewEvent returns an event with its body, as [consumer.JSON] gives it.
func NewEvent[T any](t testing.TB, id string, body T) consumer.Event[T] {
	t.Helper()
	return consumer.Event[T]{Message: *NewMessage(t, id, body), Body: body}
}

// Deliver runs the messages through h in the order given, each delivered twice, and
// returns the runner's counts once every delivery is settled: with a handler that is
// content, Processed and Duplicates are the number of messages each. A message that
// fails is held after one run and not tried again. The test fails if that takes
// longer than 30 s. Message.Topic is set to [Topic].
func Deliver[Tx any](t testing.TB, s inbox.Store[Tx], h consumer.Handler[Tx], ms ...*brokers.Message) consumer.Stats {
	t.Helper()
	b := memory.New(memory.Config{})
	b.Topic(Topic, memory.TopicConfig{Partitions: 1})
	for range 2 {
		for _, m := range ms {
			m := m.Clone()
			m.Topic = Topic
			if r := b.Publisher().Publish(context.Background(), m)[0]; r.Err != nil {
				t.Fatalf("consumertest: message %q: %v", m.ID, r.Err)
			}
		}
	}
	r, err := consumer.New(s, b.Source(Topic, memory.Group(t.Name())), h, consumer.Config{Name: t.Name(), Tries: 1,
		Backoff: time.Hour, MaxBackoff: time.Hour})
	if err != nil {
		t.Fatalf("consumertest: %v", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	for b.Committed(Topic, t.Name(), 0) < int64(2*len(ms)) {
		select {
		case err := <-done:
			t.Fatalf("consumertest: not every delivery was settled: %v, %+v", err, r.Stats())
		case <-time.After(5 * time.Millisecond):
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Fatalf("consumertest: %v", err)
	}
	return r.Stats()
}
