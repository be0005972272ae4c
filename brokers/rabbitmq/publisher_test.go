package rabbitmq

import (
	"context"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
)

func TestPublishedMessageArrivesWhole(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.declare(nil)
	p, _ := r.publisher(func(c *PublisherConfig) { c.AppID = "billing" })
	m := &brokers.Message{
		ID: "id-1", Topic: r.queue, Key: "k\xff\x00", Type: "order.placed", ContentType: "application/json",
		Time:    time.Date(2026, 3, 1, 12, 0, 0, 123456789, time.UTC),
		Payload: []byte("\x00binary\xff"),
		Headers: brokers.Headers{
			{Key: "a", Value: []byte("one")}, {Key: "a", Value: []byte("two")}, {Key: "bin", Value: []byte{0xff, 0}},
			{Key: "empty", Value: []byte{}}, {Key: PropertyContentEncoding, Value: []byte("gzip")},
			{Key: PropertyCorrelationID, Value: []byte("c-1")}, {Key: PropertyPriority, Value: []byte("3")},
			{Key: "x-death", Value: []byte("of an earlier life")},
		},
	}
	rs := p.Publish(t.Context(), m, &brokers.Message{ID: "id-2", Topic: r.queue})
	for _, res := range rs {
		require.Equal(t, brokers.Accepted, res.Outcome, res.Err)
		require.NoError(t, res.Err)
	}
	s, _, _ := r.source(10)
	ds := receive(t, s, 2)
	got := ds[0].Message
	assert.Equal(t, m.ID, got.ID)
	assert.Equal(t, m.Topic, got.Topic)
	assert.Equal(t, m.Key, got.Key)
	assert.Equal(t, m.Type, got.Type)
	assert.Equal(t, m.ContentType, got.ContentType)
	assert.True(t, m.Time.Equal(got.Time), got.Time)
	assert.Equal(t, m.Payload, got.Payload)
	assert.Equal(t, brokers.Headers{
		{Key: "a", Value: []byte("one")}, {Key: "a", Value: []byte("two")}, {Key: "bin", Value: []byte{0xff, 0}},
		{Key: "empty", Value: []byte{}}, {Key: PropertyCorrelationID, Value: []byte("c-1")}, {Key: PropertyAppID, Value: []byte("billing")},
		{Key: PropertyContentEncoding, Value: []byte("gzip")}, {Key: PropertyPriority, Value: []byte("3")},
	}, got.Headers)
	assert.Equal(t, []byte{}, ds[1].Payload, "an empty body is empty, not nil")
	assert.Empty(t, ds[1].Key)
	assert.True(t, ds[1].Time.IsZero())
	settle(t, s, brokers.Done, ds...)
}

func TestForeignHeadersOfEveryTypeBecomeBytes(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.declare(nil)
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	r.do(func(ch *amqp.Channel) error {
		return ch.PublishWithContext(t.Context(), "", r.queue, true, false, amqp.Publishing{
			MessageId: "x", Timestamp: at, Body: []byte("b"), Headers: amqp.Table{
				"bool": true, "int": int64(-7), "float": 1.5, "nil": nil, "time": at, "decimal": amqp.Decimal{Scale: 2, Value: 1234},
				"table": amqp.Table{"k": []any{int32(1), "v", []byte{0xff}}}, "list": []any{int32(1), "two"}, "bytes": []byte{1},
				brokers.HeaderKey: int64(42), brokers.HeaderTime: "no time",
			},
		})
	})
	s, _, _ := r.source(10)
	d := receive(t, s, 1)[0]
	assert.Equal(t, "42", d.Key)
	assert.True(t, at.Equal(d.Time))
	want := map[string]string{
		"bool": "true", "int": "-7", "float": "1.5", "nil": "", "time": "2026-01-02T03:04:05Z", "decimal": "12.34",
		"table": `{"k":[1,"v","/w=="]}`, "bytes": "\x01", brokers.HeaderTime: "no time",
	}
	for k, v := range want {
		got, ok := d.Headers.Get(k)
		assert.True(t, ok, k)
		assert.Equal(t, v, string(got), k)
	}
	assert.Equal(t, [][]byte{[]byte("1"), []byte("two")}, d.Headers.Values("list"))
	settle(t, s, brokers.Done, d)
}

// A field that AMQP cannot hold is refused before a byte is sent: the library would
// end the connection over it, and with it the fate of every neighbour in flight.
func TestMessageThatAMQPCannotHoldIsRefusedAlone(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.declare(nil)
	p, ev := r.publisher(func(c *PublisherConfig) { c.MaxMessageBytes = 1000 })
	long := strings.Repeat("x", 256)
	bad := []*brokers.Message{
		{ID: long, Topic: r.queue}, {ID: "1", Topic: long}, {ID: "2", Topic: r.queue, Type: long}, {ID: "3", Topic: r.queue, ContentType: long},
		{ID: "4", Topic: r.queue, Headers: brokers.Headers{{Key: long}}}, {ID: "5", Topic: r.queue, Headers: brokers.Headers{{Key: "h", Value: make([]byte, 200<<10)}}},
		{ID: "6", Topic: r.queue, Payload: make([]byte, 1001)}, {ID: "7", Topic: r.queue, Headers: brokers.Headers{{Key: PropertyPriority, Value: []byte("high")}}},
	}
	rs := p.Publish(t.Context(), append(bad, r.message(0, ""), r.message(1, ""))...)
	for i := range bad {
		assert.Equal(t, brokers.Refused, rs[i].Outcome, i)
		assert.Equal(t, brokers.Permanent, brokers.ClassOf(rs[i].Err), i)
	}
	assert.Equal(t, brokers.Accepted, rs[len(bad)].Outcome)
	assert.Equal(t, brokers.Accepted, rs[len(bad)+1].Outcome)
	assert.Empty(t, ev.of(brokers.EventDisconnected))
	assert.EqualValues(t, 1000, p.Limits().MessageBytes)
}

// An unroutable message is confirmed all the same; the return comes before and
// must be matched: rabbitmq/rabbitmq-server#2178, Particular/NServiceBus.RabbitMQ#135,
// eventuate-tram/eventuate-tram-core#194, amqp-rs/lapin#252.
func TestUnroutableMessageIsRefusedAndMatchedByItsID(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.declare(nil)
	p, _ := r.publisher()
	ms := r.messages(100, "")
	for i, m := range ms {
		if i%3 == 1 {
			m.Topic = "no-such-queue"
		}
		if i > 90 {
			m.ID = "" // matched by where they go and their body
		}
	}
	rs := p.Publish(t.Context(), ms...)
	for i, res := range rs {
		if i%3 == 1 {
			assert.Equal(t, brokers.Refused, res.Outcome, i)
			require.ErrorIs(t, res.Err, brokers.ErrNoRoute)
			assert.Equal(t, brokers.Retryable, brokers.ClassOf(res.Err), "the queue may be bound later")
			assert.ErrorContains(t, res.Err, "no-such-queue")
		} else {
			assert.Equal(t, brokers.Accepted, res.Outcome, i)
		}
	}
	ms[1].Topic = r.queue // bound at last
	assert.Equal(t, brokers.Accepted, p.Publish(t.Context(), ms[1])[0].Outcome)

	drop, _ := r.publisher(func(c *PublisherConfig) { c.AllowUnroutable = true })
	assert.Equal(t, brokers.Accepted, drop.Publish(t.Context(), ms[4])[0].Outcome)
}

func TestMissingExchangeIsRefusedAndSparesTheOthers(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.declare(nil)
	p, ev := r.publisher(func(c *PublisherConfig) {
		c.Route = func(m *brokers.Message) (string, string) {
			if m.Type == "lost" {
				return "no-such-exchange", "k"
			}
			return "", m.Topic
		}
	})
	ms := r.messages(30, "")
	for i := range ms {
		if i%10 == 5 {
			ms[i].Type = "lost"
		}
	}
	rs := p.Publish(t.Context(), ms...)
	assert.Equal(t, map[brokers.Outcome]int{brokers.Accepted: 27, brokers.Refused: 3}, outcomes(rs))
	require.ErrorIs(t, rs[5].Err, brokers.ErrNoRoute)
	assert.Equal(t, brokers.Retryable, brokers.ClassOf(rs[5].Err))
	assert.Empty(t, ev.of(brokers.EventDisconnected))

	strict, _ := r.publisher(func(c *PublisherConfig) { c.Exchange = "no-such-exchange" })
	err := strict.Open(t.Context())
	require.ErrorIs(t, err, brokers.ErrNoRoute)
	assert.Equal(t, brokers.Fatal, brokers.ClassOf(err))
}

// An exchange that goes away while messages are on their way makes them Unknown,
// and the channel is renewed.
func TestExchangeThatDisappearsMakesWhatIsInFlightUnknown(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.declare(nil)
	exchange := r.queue + ".x"
	p, _ := r.publisher(func(c *PublisherConfig) { c.Exchange, c.Topology, c.ExchangeKind = exchange, Declare, "fanout" })
	require.NoError(t, p.Open(t.Context()))
	r.do(func(ch *amqp.Channel) error { return ch.QueueBind(r.queue, "", exchange, false, nil) })
	assert.Equal(t, brokers.Accepted, p.Publish(t.Context(), r.message(0, ""))[0].Outcome)
	r.do(func(ch *amqp.Channel) error { return ch.ExchangeDelete(exchange, false, false) })
	n := outcomes(p.Publish(t.Context(), r.messages(20, "")...))
	assert.Positive(t, n[brokers.Unknown], "%v", n)
	// Declare has made it again, with nothing bound to it.
	rs := p.Publish(t.Context(), r.message(2, ""))
	require.ErrorIs(t, rs[0].Err, brokers.ErrNoRoute)
	r.do(func(ch *amqp.Channel) error { return ch.QueueBind(r.queue, "", exchange, false, nil) })
	assert.Equal(t, brokers.Accepted, p.Publish(t.Context(), r.message(1, ""))[0].Outcome)
	r.do(func(ch *amqp.Channel) error { return ch.ExchangeDelete(exchange, false, false) })
}

func TestFullQueueRefusesRetryably(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.declare(amqp.Table{"x-queue-type": "classic", "x-max-length": 2, "x-overflow": "reject-publish"})
	p, _ := r.publisher()
	var refused *brokers.Result
	for i := range 50 {
		res := p.Publish(t.Context(), r.message(i, ""))[0]
		if res.Outcome != brokers.Accepted {
			refused = &res
			break
		}
	}
	require.NotNil(t, refused)
	assert.Equal(t, brokers.Refused, refused.Outcome, refused.Err)
	assert.Equal(t, brokers.Retryable, brokers.ClassOf(refused.Err))
	require.ErrorIs(t, refused.Err, errNacked)
}

// Within one call and one key nothing is Accepted after something that was not.
func TestKeyStopsAtItsFirstMessageThatIsNotAccepted(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.declare(nil)
	p, _ := r.publisher()
	var ms []*brokers.Message
	for i := range 60 {
		m := r.message(i, fmt.Sprint("key", i%3))
		if i == 30 { // key0
			m.Topic = "no-such-queue"
		}
		ms = append(ms, m)
	}
	rs := p.Publish(t.Context(), ms...)
	for i, res := range rs {
		switch {
		case i == 30:
			require.ErrorIs(t, res.Err, brokers.ErrNoRoute)
		case i%3 == 0 && i > 30:
			assert.Equal(t, brokers.NotSent, res.Outcome, i)
			require.ErrorIs(t, res.Err, brokers.ErrKeyStopped)
		default:
			assert.Equal(t, brokers.Accepted, res.Outcome, i)
		}
	}
	got := map[string][]string{}
	for _, g := range r.get(r.queue) {
		var n int
		_, err := fmt.Sscanf(g, "m%d", &n)
		require.NoError(t, err)
		k := fmt.Sprint(n % 3)
		got[k] = append(got[k], g)
	}
	for k, order := range got {
		assert.IsIncreasing(t, order, k)
	}
	assert.Len(t, got["0"], 10)
	assert.Len(t, got["1"], 20)
}

// What was in flight when the connection broke is Unknown, and never Accepted
// without being stored; sent again with the same IDs, everything is there. A broken
// channel must not read as a refusal: rabbitmq/amqp091-go#182, #46, #44, #92.
func TestConnectionCutWithManyInFlightLosesNothing(t *testing.T) {
	t.Parallel()
	const n = 2000
	r := newRig(t)
	r.declare(nil)
	p := newProxy(t, r.addr())
	pub, ev := r.publisher(func(c *PublisherConfig) { c.URL, c.Window = p.url(), n })
	require.NoError(t, pub.Open(t.Context()))

	done := make(chan []brokers.Result, 1)
	go func() { done <- pub.Publish(t.Context(), r.messages(n, "")...) }()
	require.Eventually(t, func() bool { return len(p.methods(idPublish)) > n/4 }, patience, time.Millisecond)
	p.cut()
	rs := <-done
	counts := outcomes(rs)
	assert.Positive(t, counts[brokers.Unknown], "%v", counts)
	assert.Zero(t, counts[brokers.Refused], "a broken channel is no refusal: %v", counts)
	ev.wait(t, brokers.EventDisconnected, 1)

	ms := r.messages(n, "")
	for try := 0; len(ms) > 0; try++ { // as the relay does
		require.Less(t, try, 10)
		var left []*brokers.Message
		if try > 0 {
			rs = pub.Publish(t.Context(), ms...)
		}
		for i, res := range rs {
			if res.Outcome != brokers.Accepted {
				left = append(left, ms[i])
			}
		}
		ms = left
	}
	stored := map[string]bool{}
	for _, g := range r.get(r.queue) {
		stored[g] = true
	}
	assert.Len(t, stored, n)
}

// A confirm that never comes is Unknown after a bounded wait: rabbitmq/amqp091-go#182.
func TestConfirmThatNeverComesIsUnknownInTime(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.declare(nil)
	p := newProxy(t, r.addr())
	pub, _ := r.publisher(func(c *PublisherConfig) { c.URL, c.ConfirmTimeout = p.url(), 500*time.Millisecond })
	require.NoError(t, pub.Open(t.Context()))
	p.pass(true, false)
	began := time.Now()
	rs := pub.Publish(t.Context(), r.messages(5, "k")...)
	assert.Less(t, time.Since(began), 3*time.Second)
	assert.Equal(t, brokers.Unknown, rs[0].Outcome)
	require.ErrorIs(t, rs[0].Err, brokers.ErrUnknownOutcome)
	require.ErrorContains(t, rs[0].Err, "ConfirmTimeout")
	for _, res := range rs[1:] { // the key stops: later ones must not overtake
		assert.Equal(t, brokers.NotSent, res.Outcome)
	}
	r.ready(r.queue, 1) // it had been stored

	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan []brokers.Result, 1)
	go func() { done <- pub.Publish(ctx, r.messages(5, "")...) }()
	require.Eventually(t, func() bool { return len(p.methods(idPublish)) == 6 }, patience, time.Millisecond)
	cancel()
	assert.Equal(t, map[brokers.Outcome]int{brokers.Unknown: 5}, outcomes(<-done))
}

// Returned messages hold up nothing: their listener has room for the window.
func TestManyReturnsDoNotDelayConfirms(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.declare(nil)
	p, _ := r.publisher(func(c *PublisherConfig) { c.Window = 50 })
	require.NoError(t, p.Open(t.Context()))
	ms := r.messages(1000, "")
	for i := range ms {
		if i%50 != 0 {
			ms[i].Topic = "no-such-queue"
		}
	}
	began := time.Now()
	var wg sync.WaitGroup
	for range 4 { // several calls share the window
		wg.Go(func() {
			assert.Equal(t, map[brokers.Outcome]int{brokers.Accepted: 20, brokers.Refused: 980}, outcomes(p.Publish(t.Context(), ms...)))
		})
	}
	wg.Wait()
	assert.Less(t, time.Since(began), 5*time.Second, "a full listener stops the reader for 5 s an event")
}

func TestPublisherReconnectsByItself(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.declare(nil)
	p := newProxy(t, r.addr())
	pub, ev := r.publisher(func(c *PublisherConfig) { c.URL = p.url() })
	for i := range 5 {
		require.Eventually(t, func() bool { return pub.Publish(t.Context(), r.message(i, ""))[0].Outcome == brokers.Accepted }, patience, 10*time.Millisecond)
		p.cut()
	}
	ev.wait(t, brokers.EventDisconnected, 5)

	p.accepting(false)
	began := time.Now()
	rs := pub.Publish(t.Context(), r.messages(500, "")...)
	assert.Equal(t, map[brokers.Outcome]int{brokers.NotSent: 500}, outcomes(rs))
	assert.Less(t, time.Since(began), 5*time.Second, "each message tried the dead broker")
	assert.Equal(t, brokers.Retryable, brokers.ClassOf(rs[0].Err))
	assert.Positive(t, brokers.RetryAfterOf(rs[0].Err))
}

func TestPublisherCloseIsBoundedAndEndsCalls(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.declare(nil)
	p := newProxy(t, r.addr())
	pub, _ := r.publisher(func(c *PublisherConfig) { c.URL = p.url() })
	require.NoError(t, pub.Open(t.Context()))
	p.pass(true, false)
	done := make(chan []brokers.Result, 1)
	go func() { done <- pub.Publish(t.Context(), r.messages(5, "")...) }()
	require.Eventually(t, func() bool { return len(p.methods(idPublish)) == 5 }, patience, time.Millisecond)
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	began := time.Now()
	require.NoError(t, pub.Close(ctx))
	assert.Less(t, time.Since(began), 2*time.Second)
	assert.Equal(t, map[brokers.Outcome]int{brokers.Unknown: 5}, outcomes(<-done))
	rs := pub.Publish(t.Context(), r.message(0, ""))
	assert.Equal(t, brokers.NotSent, rs[0].Outcome)
	require.ErrorIs(t, rs[0].Err, brokers.ErrClosed)
	require.ErrorIs(t, pub.Open(t.Context()), brokers.ErrClosed)
	require.NoError(t, pub.Close(t.Context()))
}

// A write that stands still holds the library's locks; the call ends all the same.
func TestWriteThatStandsStillEndsWithItsContext(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.declare(nil)
	stuck := &stuckConn{block: make(chan struct{})}
	pub, _ := r.publisher(func(c *PublisherConfig) {
		c.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
			nc, err := new(net.Dialer).DialContext(ctx, network, addr)
			stuck.Conn = nc
			return stuck, err
		}
	})
	require.NoError(t, pub.Open(t.Context()))
	stuck.stand()
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	began := time.Now()
	rs := pub.Publish(ctx, r.message(0, ""))
	assert.Less(t, time.Since(began), 5*time.Second)
	assert.Equal(t, brokers.Unknown, rs[0].Outcome, rs[0].Err)
}

// stuckConn is a connection whose writes stand still until it is closed.
type stuckConn struct {
	net.Conn
	mu    sync.Mutex
	still bool
	once  sync.Once
	block chan struct{}
}

func (c *stuckConn) stand() { c.mu.Lock(); c.still = true; c.mu.Unlock() }

func (c *stuckConn) Write(b []byte) (int, error) {
	c.mu.Lock()
	still := c.still
	c.mu.Unlock()
	if still {
		<-c.block
		return 0, net.ErrClosed
	}
	return c.Conn.Write(b)
}

func (c *stuckConn) Close() error {
	c.once.Do(func() { close(c.block) })
	return c.Conn.Close()
}
