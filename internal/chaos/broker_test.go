package chaos

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/brokers/rabbitmq"
	"github.com/twiceproof/twiceproof/internal/devenv"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
)

// broker is a real broker of the run's own: what the driver does to it, and what the
// worker processes need to know. A further broker is one more implementation, and a
// case in endpoint.source and endpoint.publisher.
type broker interface {
	// start starts the server and makes the destination; it ends with the test.
	start(t testing.TB)
	// endpoint tells the workers where it is.
	endpoint() endpoint
	// cut ends the connections of all workers and returns how many there were.
	cut(ctx context.Context) (int, error)
	// restart kills the server and starts it again on its data.
	restart(ctx context.Context) error
	// left counts the messages, dead letters too, that no worker has in hand.
	left(ctx context.Context) (int, error)
	// ordered tells whether messages of a key are delivered in order.
	ordered() bool
}

// endpoint is where a worker finds the broker; it travels as JSON.
type endpoint struct {
	Kind, URL, Name string
	Ordered         bool
}

func (e endpoint) source() (brokers.Source, error) {
	switch e.Kind {
	case "rabbitmq":
		return rabbitmq.NewSource(rabbitmq.SourceConfig{URL: e.URL, Queue: e.Name, Topology: rabbitmq.Declare, SingleActiveConsumer: e.Ordered})
	case "kafka":
		return e.kafkaSource()
	case "sqs":
		return e.sqsSource()
	}
	return nil, fmt.Errorf("unknown broker %q", e.Kind)
}

func (e endpoint) publisher() (brokers.Publisher, error) {
	switch e.Kind {
	case "rabbitmq":
		return rabbitmq.NewPublisher(rabbitmq.PublisherConfig{URL: e.URL})
	case "kafka":
		return e.kafkaPublisher()
	case "sqs":
		return e.sqsPublisher()
	}
	return nil, fmt.Errorf("unknown broker %q", e.Kind)
}

// rabbit is a RabbitMQ node behind a proxy, with a quorum queue.
type rabbit struct {
	single bool // a single active consumer: messages are delivered in order
	node   *devenv.RabbitMQ
	proxy  *proxy
	name   string
	cuts   int
}

func (r *rabbit) start(t testing.TB) {
	r.node = devtest.OwnRabbitMQ(t)
	r.proxy = newProxy(t, r.node.Addr())
	r.name = devtest.Name("chaos")
	src, err := r.endpoint().source() // declares the queue
	require.NoError(t, err)
	_, err = src.Open(t.Context(), brokers.OpenOptions{Consumer: "driver", Room: 1})
	require.NoError(t, errors.Join(err, src.Close(t.Context())))
}

func (r *rabbit) endpoint() endpoint {
	return endpoint{"rabbitmq", "amqp://guest:guest@" + r.proxy.l.Addr().String() + "/", r.name, r.single}
}

func (r *rabbit) ordered() bool { return r.single }

// cut ends connections by a reset on the network, and each third time by the node,
// which says goodbye.
func (r *rabbit) cut(ctx context.Context) (int, error) {
	if r.cuts++; r.cuts%3 != 0 {
		return r.proxy.cut(), nil
	}
	n := r.proxy.open()
	_, err := r.node.Ctl(ctx, "close_all_connections", "chaos")
	return n, err
}

func (r *rabbit) restart(ctx context.Context) error {
	return errors.Join(r.node.Kill(), r.node.Start(ctx))
}

func (r *rabbit) left(context.Context) (int, error) {
	c, err := amqp.Dial(r.node.URL())
	if err != nil {
		return 0, err
	}
	defer c.Close() //nolint:errcheck // nothing is in flight
	ch, err := c.Channel()
	if err != nil {
		return 0, err
	}
	n := 0
	for _, name := range []string{r.name, r.name + ".dead"} {
		q, err := ch.QueueDeclarePassive(name, true, false, false, false, nil)
		if err != nil {
			return 0, err
		}
		n += q.Messages
	}
	return n, nil
}

// proxy stands between the workers and the broker, so that their connections can be
// cut.
type proxy struct {
	l        net.Listener
	upstream string
	wg       sync.WaitGroup
	mu       sync.Mutex
	conns    map[net.Conn]net.Conn // the worker's and the broker's end
	deaf     atomic.Bool           // what the broker says is lost
}

func newProxy(t testing.TB, upstream string) *proxy {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p := &proxy{l: l, upstream: upstream, conns: map[net.Conn]net.Conn{}}
	p.wg.Go(p.accept)
	t.Cleanup(func() {
		_ = l.Close()
		p.cut()
		p.wg.Wait()
	})
	return p
}

func (p *proxy) accept() {
	for {
		c, err := p.l.Accept()
		if err != nil {
			return
		}
		s, err := net.Dial("tcp", p.upstream)
		if err != nil {
			_ = c.Close()
			continue
		}
		p.mu.Lock()
		p.conns[c] = s
		p.mu.Unlock()
		p.wg.Go(func() { p.copy(mute{c, &p.deaf}, s) })
		p.wg.Go(func() { p.copy(s, c) })
	}
}

func (p *proxy) copy(dst, src net.Conn) {
	_, _ = io.Copy(dst, src)
	_, _ = dst.Close(), src.Close() // either side ends both
	p.mu.Lock()
	if m, ok := dst.(mute); ok {
		dst = m.Conn
	}
	delete(p.conns, dst)
	delete(p.conns, src)
	p.mu.Unlock()
}

// mute drops what is written to it while it is deaf.
type mute struct {
	net.Conn
	deaf *atomic.Bool
}

func (m mute) Write(b []byte) (int, error) {
	if m.deaf.Load() {
		return len(b), nil
	}
	return m.Conn.Write(b)
}

func (p *proxy) open() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.conns)
}

func (p *proxy) cut() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c, s := range p.conns {
		_, _ = c.Close(), s.Close()
	}
	return len(p.conns)
}
