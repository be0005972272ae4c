package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/twiceproof/twiceproof/brokers"
)

// errBlocked is why nothing is sent during an alarm.
var errBlocked = errors.New("the broker blocks publishers: a memory or disk alarm is on")

// Publisher publishes with confirms, on a connection of its own, which it opens
// when it is first needed and again when it broke. Make one by [NewPublisher].
type Publisher struct {
	cfg PublisherConfig
	cc  connConfig

	dialing  chan struct{} // cap 1: held by whoever connects or opens a channel
	attempts atomic.Uint64

	mu      sync.Mutex
	link    *link
	closed  bool
	calls   sync.WaitGroup // Publish calls; Add under mu while not closed
	tails   sync.WaitGroup // goroutines that calls leave behind; Add by a call only
	closing chan struct{}  // closed by Close

	life context.Context // ends when Close has given up waiting for calls
	die  context.CancelCauseFunc
}

// NewPublisher returns a Publisher for the configuration, or everything that is
// wrong with it. It does no I/O; see [Publisher.Open].
func NewPublisher(cfg PublisherConfig) (*Publisher, error) {
	cfg, cc, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	p := &Publisher{cfg: cfg, cc: cc, dialing: make(chan struct{}, 1), closing: make(chan struct{})}
	p.life, p.die = context.WithCancelCause(context.Background())
	return p, nil
}

// link is one connection and its channels, one for each exchange: a publish to a
// missing exchange ends its channel and everything in flight on it.
type link struct {
	*conn
	blocked  atomic.Bool
	mu       sync.Mutex
	channels map[string]*channel
	wg       sync.WaitGroup // the link's own goroutines
}

// channel is one AMQP channel in confirm mode.
type channel struct {
	link    *link
	ch      *amqp.Channel
	window  chan struct{} // a token for each message in flight
	closes  chan *amqp.Error
	returns returns
}

// Open connects and verifies the configured exchange, so that mistakes come out
// before the first message. It is optional.
func (p *Publisher) Open(ctx context.Context) error {
	if !p.enter() {
		return brokers.ErrClosed
	}
	defer p.calls.Done()
	ctx, cancel := p.bound(ctx)
	defer cancel()
	_, err := p.channel(ctx, p.cfg.Exchange)
	return err
}

// bound returns a context that also ends when Close has waited long enough.
func (p *Publisher) bound(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(p.life, func() { cancel(context.Cause(p.life)) })
	return ctx, func() { stop(); cancel(nil) }
}

func (p *Publisher) enter() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return false
	}
	p.calls.Add(1)
	return true
}

// Limits implements [brokers.Publisher].
func (p *Publisher) Limits() brokers.PublishLimits {
	return brokers.PublishLimits{MessageBytes: p.cfg.MaxMessageBytes}
}

// channel returns a usable channel for the exchange, connecting where needed. Its
// errors mean that nothing was sent.
func (p *Publisher) channel(ctx context.Context, exchange string) (*channel, error) {
	if c := p.existing(exchange); c != nil {
		return c, nil
	}
	select {
	case p.dialing <- struct{}{}:
		defer func() { <-p.dialing }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	case <-p.closing:
		return nil, brokers.ErrClosed
	}
	if c := p.existing(exchange); c != nil { // somebody else was faster
		return c, nil
	}
	ctx, cancel := context.WithTimeoutCause(ctx, handshakeTimeout, fmt.Errorf("no answer within %s", handshakeTimeout))
	defer cancel()
	l, err := p.connect(ctx)
	if err != nil {
		return nil, err
	}
	if l.blocked.Load() { // opening a channel would hang
		return nil, throttled()
	}
	if err := l.verifyExchange(ctx, exchange, p.cfg.ExchangeKind, p.cfg.Topology); err != nil {
		return nil, err
	}
	return l.open(ctx, exchange, p.cfg.Window)
}

func throttled() error {
	return &brokers.Error{Class: brokers.Throttled, Op: "publish", Err: errBlocked, After: time.Second, Hint: "see `rabbitmq-diagnostics alarms`"}
}

func (p *Publisher) existing(exchange string) *channel {
	p.mu.Lock()
	l := p.link
	p.mu.Unlock()
	if l == nil || !l.alive() {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if c := l.channels[exchange]; c != nil && !c.ch.IsClosed() {
		return c
	}
	return nil
}

// connect returns the live link, or a new one. The caller holds p.dialing.
func (p *Publisher) connect(ctx context.Context) (*link, error) {
	p.mu.Lock()
	l := p.link
	p.mu.Unlock()
	if l != nil {
		if l.alive() {
			return l, nil
		}
		l.shut(ctx)
	}
	cn, err := p.cc.connect(ctx, int(p.attempts.Add(1)-1))
	if err != nil {
		return nil, err
	}
	l = &link{conn: cn, channels: map[string]*channel{}}
	// Full, a listener would hold up the connection's reader for 5 s an event.
	alarms := cn.NotifyBlocked(make(chan amqp.Blocking, 16))
	l.wg.Go(func() { p.watch(l, alarms) })
	p.mu.Lock()
	closed := p.closed
	if !closed {
		p.link = l
	}
	p.mu.Unlock()
	if closed {
		l.shut(ctx)
		return nil, brokers.ErrClosed
	}
	p.cfg.Logger.Info("publisher connected", "exchange", p.cfg.Exchange)
	p.emit(brokers.Event{Kind: brokers.EventConnected})
	return l, nil
}

// watch follows the link's alarms until it ends.
func (p *Publisher) watch(l *link, alarms <-chan amqp.Blocking) {
	for b := range alarms {
		l.blocked.Store(b.Active)
		if b.Active {
			p.cfg.Logger.Warn("the broker blocks publishers", "reason", b.Reason)
			p.emit(brokers.Event{Kind: brokers.EventThrottled, Err: fmt.Errorf("%w: %s", errBlocked, b.Reason)})
		} else {
			p.cfg.Logger.Info("the broker accepts messages again")
		}
	}
	<-l.dead
	p.mu.Lock()
	closed := p.closed
	p.mu.Unlock()
	if !closed {
		p.cfg.Logger.Warn("publisher disconnected", "error", l.err)
		p.emit(brokers.Event{Kind: brokers.EventDisconnected, Err: l.err})
	}
}

func (p *Publisher) emit(e brokers.Event) {
	if p.cfg.Observer != nil {
		p.cfg.Observer(e)
	}
}

// open opens the exchange's channel in confirm mode.
func (l *link) open(ctx context.Context, exchange string, window int) (*channel, error) {
	c := &channel{link: l, window: make(chan struct{}, window)}
	err := l.bounded(ctx, func() error {
		ch, err := l.Channel()
		if err != nil {
			return err
		}
		c.ch = ch
		c.closes = ch.NotifyClose(make(chan *amqp.Error, 1))
		// Room for one return of each message in flight: it is never full.
		c.returns.ch = ch.NotifyReturn(make(chan amqp.Return, window+1))
		return ch.Confirm(false)
	})
	if err != nil {
		return nil, classify(fmt.Sprintf("open a channel for the exchange %q", exchange), err)
	}
	l.mu.Lock()
	l.channels[exchange] = c
	l.mu.Unlock()
	return c, nil
}

// shut closes the link and waits for its goroutines.
func (l *link) shut(ctx context.Context) {
	l.close(ctx)
	l.wg.Wait()
}

// Close implements [brokers.Publisher]. It waits for Publish calls within ctx, and
// then ends them: what they have in flight is Unknown. Further calls return nil.
func (p *Publisher) Close(ctx context.Context) error {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return nil
	}
	p.closed = true
	close(p.closing)
	p.mu.Unlock()
	idle := make(chan struct{})
	go func() { p.calls.Wait(); close(idle) }()
	select {
	case <-idle:
	case <-ctx.Done():
	}
	p.mu.Lock()
	l := p.link
	p.mu.Unlock()
	p.die(brokers.ErrClosed)
	if l != nil {
		l.shut(ctx)
	}
	<-idle // every wait of a call ends with life or the connection
	p.tails.Wait()
	return nil
}
