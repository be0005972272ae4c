package rabbitmq

import (
	"context"
	"fmt"
	"net/url"
	"sync"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const patience = 20 * time.Second

// rig is a queue of one test, with a plain client beside the code under test.
type rig struct {
	t     *testing.T
	url   string
	queue string
	admin *amqp.Connection
}

func newRig(t *testing.T) *rig { t.Helper(); return newRigOn(t, devtest.RabbitMQURL(t)) }

func newRigOn(t *testing.T, url string) *rig {
	t.Helper()
	r := &rig{t: t, url: url, queue: devtest.Name("q")}
	r.reconnect()
	t.Cleanup(func() {
		r.do(func(ch *amqp.Channel) error { _, err := ch.QueueDelete(r.queue, false, false, false); return err })
		r.do(func(ch *amqp.Channel) error {
			_, err := ch.QueueDelete(r.queue+".dead", false, false, false)
			return err
		})
		_ = r.admin.Close()
	})
	return r
}

func (r *rig) reconnect() {
	c, err := amqp.Dial(r.url)
	require.NoError(r.t, err)
	r.admin = c
}

// addr is the broker's host and port, for a proxy.
func (r *rig) addr() string {
	u, err := url.Parse(r.url)
	require.NoError(r.t, err)
	return u.Host
}

func (r *rig) do(fn func(ch *amqp.Channel) error) {
	r.t.Helper()
	require.NoError(r.t, r.try(fn))
}

func (r *rig) try(fn func(ch *amqp.Channel) error) error {
	ch, err := r.admin.Channel()
	if err != nil {
		return err
	}
	defer ch.Close() //nolint:errcheck // a refusal has closed it
	return fn(ch)
}

// declare declares the rig's queue; "x-queue-type" is quorum unless args say otherwise.
func (r *rig) declare(args amqp.Table) {
	r.t.Helper()
	all := amqp.Table{"x-queue-type": "quorum"}
	for k, v := range args {
		all[k] = v
	}
	r.do(func(ch *amqp.Channel) error {
		_, err := ch.QueueDeclare(r.queue, true, false, false, false, all)
		return err
	})
}

// put publishes messages with the IDs from..to-1, confirmed.
func (r *rig) put(from, to int) {
	r.t.Helper()
	r.do(func(ch *amqp.Channel) error {
		if err := ch.Confirm(false); err != nil {
			return err
		}
		var last []*amqp.DeferredConfirmation
		for i := from; i < to; i++ {
			dc, err := ch.PublishWithDeferredConfirm("", r.queue, true, false, amqp.Publishing{
				MessageId: id(i), DeliveryMode: amqp.Persistent, Body: []byte(id(i)),
			})
			if err != nil {
				return err
			}
			last = append(last, dc)
		}
		for _, dc := range last {
			if !dc.Wait() {
				return fmt.Errorf("not confirmed")
			}
		}
		return nil
	})
}

func id(i int) string { return fmt.Sprintf("m%05d", i) }

// count returns the ready messages and consumers of a queue, or -1.
func (r *rig) count(queue string) (messages, consumers int) {
	err := r.try(func(ch *amqp.Channel) error {
		q, err := ch.QueueDeclarePassive(queue, true, false, false, false, nil)
		messages, consumers = q.Messages, q.Consumers
		return err
	})
	if err != nil {
		return -1, -1
	}
	return messages, consumers
}

// ready waits for a number of ready messages.
func (r *rig) ready(queue string, n int) {
	r.t.Helper()
	got := 0
	ok := func() bool { got, _ = r.count(queue); return got == n }
	if !assert.Eventually(r.t, ok, patience, 20*time.Millisecond) {
		require.FailNow(r.t, "ready messages", "%s has %d, %d are expected", queue, got, n)
	}
}

// get takes everything out of a queue and returns the IDs in order.
func (r *rig) get(queue string) []string {
	r.t.Helper()
	var ids []string
	r.do(func(ch *amqp.Channel) error {
		for {
			d, ok, err := ch.Get(queue, true)
			if err != nil || !ok {
				return err
			}
			ids = append(ids, d.MessageId)
		}
	})
	return ids
}

// events collects what a Source or Publisher observes.
type events struct {
	mu  sync.Mutex
	all []brokers.Event
}

func (e *events) observe(ev brokers.Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.all = append(e.all, ev)
}

func (e *events) of(kind brokers.EventKind) []brokers.Event {
	e.mu.Lock()
	defer e.mu.Unlock()
	var out []brokers.Event
	for _, ev := range e.all {
		if ev.Kind == kind {
			out = append(out, ev)
		}
	}
	return out
}

func (e *events) wait(t *testing.T, kind brokers.EventKind, n int) []brokers.Event {
	t.Helper()
	require.Eventually(t, func() bool { return len(e.of(kind)) >= n }, patience, 10*time.Millisecond, "%d events %q", n, kind)
	return e.of(kind)
}

// source opens a Source on the rig's queue and closes it with the test.
func (r *rig) source(room int, edit ...func(*SourceConfig)) (*Source, brokers.Capabilities, *events) {
	r.t.Helper()
	cfg := SourceConfig{URL: r.url, Queue: r.queue}
	for _, e := range edit {
		e(&cfg)
	}
	s, err := NewSource(cfg)
	require.NoError(r.t, err)
	ev := &events{}
	caps, err := s.Open(r.t.Context(), brokers.OpenOptions{Consumer: r.t.Name(), Room: room, Observer: ev.observe})
	require.NoError(r.t, err)
	r.t.Cleanup(func() { closeWithin(r.t, s.Close) })
	return s, caps, ev
}

func (r *rig) publisher(edit ...func(*PublisherConfig)) (*Publisher, *events) {
	r.t.Helper()
	ev := &events{}
	cfg := PublisherConfig{URL: r.url, Observer: ev.observe}
	for _, e := range edit {
		e(&cfg)
	}
	p, err := NewPublisher(cfg)
	require.NoError(r.t, err)
	r.t.Cleanup(func() { closeWithin(r.t, p.Close) })
	return p, ev
}

func closeWithin(t *testing.T, fn func(context.Context) error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := fn(ctx); err != nil {
		t.Errorf("close: %v", err)
	}
}

// receive collects exactly n deliveries.
func receive(t *testing.T, s brokers.Source, n int) []*brokers.Delivery {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var all []*brokers.Delivery
	for len(all) < n {
		ds, err := s.Receive(ctx, n-len(all))
		require.NoError(t, err, "%d of %d received", len(all), n)
		all = append(all, ds...)
	}
	return all
}

func ids(ds []*brokers.Delivery) []string {
	out := make([]string, len(ds))
	for i, d := range ds {
		out[i] = d.ID
	}
	return out
}

func settlements(v brokers.Verb, ds ...*brokers.Delivery) []brokers.Settlement {
	out := make([]brokers.Settlement, len(ds))
	for i, d := range ds {
		out[i] = brokers.Settlement{Delivery: d, Verb: v}
	}
	return out
}

// settle settles and requires every answer to be nil.
func settle(t *testing.T, s brokers.Source, v brokers.Verb, ds ...*brokers.Delivery) {
	t.Helper()
	for i, err := range s.Settle(t.Context(), settlements(v, ds...)...) {
		require.NoError(t, err, "settle %s as %s", ds[i].ID, v)
	}
}

// message makes a message for the rig's queue.
func (r *rig) message(i int, key string) *brokers.Message {
	return &brokers.Message{ID: id(i), Topic: r.queue, Key: key, Payload: []byte(id(i))}
}

func (r *rig) messages(n int, key string) []*brokers.Message {
	ms := make([]*brokers.Message, n)
	for i := range ms {
		ms[i] = r.message(i, key)
	}
	return ms
}

func outcomes(rs []brokers.Result) map[brokers.Outcome]int {
	n := map[brokers.Outcome]int{}
	for _, r := range rs {
		n[r.Outcome]++
	}
	return n
}
