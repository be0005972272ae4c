package rabbitmq

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/twiceproof/twiceproof/brokers"
)

// Publish implements [brokers.Publisher]. Messages without a Key are all sent at
// once, as far as the window allows; those with one follow PerKeyInFlight. A
// message that no queue gets is Refused with brokers.ErrNoRoute, retryable: the
// queue may be bound later.
func (p *Publisher) Publish(ctx context.Context, ms ...*brokers.Message) []brokers.Result {
	c := &call{p: p, ms: ms, rs: make([]brokers.Result, len(ms)), keys: map[string]*keyState{}}
	if !p.enter() {
		for i := range c.rs {
			c.rs[i] = brokers.Result{Outcome: brokers.NotSent, Err: brokers.ErrClosed}
		}
		return c.rs
	}
	defer p.calls.Done()
	ctx, release := p.bound(ctx)
	defer release()
	ctx, cancel := context.WithTimeoutCause(ctx, p.cfg.ConfirmTimeout,
		fmt.Errorf("not confirmed within ConfirmTimeout (%s): %w", p.cfg.ConfirmTimeout, context.DeadlineExceeded))
	defer cancel()
	c.run(ctx)
	return c.rs
}

// call is one Publish. Only its own goroutine touches it.
type call struct {
	p        *Publisher
	ms       []*brokers.Message
	rs       []brokers.Result
	keys     map[string]*keyState
	ready    []int   // may be sent, in order
	inflight []*sent // in the order of sending
	finished chan struct{}
	down     error            // the broker cannot be reached: tried once a call
	missing  map[string]error // by exchange
}

type keyState struct {
	waiting  []int // indexes, in order
	inflight int
	stopped  bool
}

// sent is one message on its way.
type sent struct {
	i       int
	on      *channel
	sig     string
	size    int
	confirm *amqp.DeferredConfirmation
}

func (c *call) run(ctx context.Context) {
	c.finished = make(chan struct{})
	defer close(c.finished)
	for i, m := range c.ms {
		if m.Key == "" {
			c.ready = append(c.ready, i)
			continue
		}
		k := c.keys[m.Key]
		if k == nil {
			k = &keyState{}
			c.keys[m.Key] = k
		}
		if k.inflight < c.p.cfg.PerKeyInFlight {
			k.inflight++
			c.ready = append(c.ready, i)
		} else {
			k.waiting = append(k.waiting, i)
		}
	}
	for len(c.ready) > 0 || len(c.inflight) > 0 {
		if len(c.ready) > 0 && c.send(ctx) {
			continue
		}
		if len(c.inflight) > 0 {
			c.await(ctx)
		}
	}
}

// send sends the next ready message, or finishes it unsent. It returns false when
// the window is full and something of this call is in flight, whose answer makes
// room.
func (c *call) send(ctx context.Context) bool {
	i := c.ready[0]
	m := c.ms[i]
	if err := cmp.Or(context.Cause(ctx), c.down); err != nil {
		c.finish(i, brokers.NotSent, err)
		return true
	}
	exchange, key := c.p.cfg.Exchange, m.Topic
	if c.p.cfg.Route != nil {
		exchange, key = c.p.cfg.Route(m)
	}
	msg, err := publishingOf(m, exchange, key, &c.p.cfg)
	if err != nil {
		c.finish(i, brokers.Refused, err)
		return true
	}
	if err := c.missing[exchange]; err != nil {
		c.finish(i, brokers.Refused, err)
		return true
	}
	on, err := c.p.channel(ctx, exchange)
	switch {
	case isNoQueue(err): // a missing exchange: not for want of a connection
		err = &brokers.Error{Class: brokers.Retryable, Op: "publish", Err: err, After: retryPause}
		if c.missing == nil {
			c.missing = map[string]error{}
		}
		c.missing[exchange] = err
		c.finish(i, brokers.Refused, err)
		return true
	case err == nil && on.link.blocked.Load():
		err = throttled()
		fallthrough
	case err != nil:
		c.down = err
		c.finish(i, brokers.NotSent, err)
		return true
	}
	if !c.window(ctx, on) {
		return false
	}
	c.transmit(ctx, i, on, exchange, key, msg)
	return true
}

// window takes a token, waiting for one only if nothing of this call is in flight.
func (c *call) window(ctx context.Context, on *channel) bool {
	select {
	case on.window <- struct{}{}:
		return true
	default:
	}
	if len(c.inflight) > 0 {
		return false
	}
	select {
	case on.window <- struct{}{}:
		return true
	case <-ctx.Done():
	case <-on.link.dead:
	}
	return false // the next round finds out why
}

func (c *call) transmit(ctx context.Context, i int, on *channel, exchange, key string, msg amqp.Publishing) {
	// A write that stands still is ended with its connection once ctx is over.
	stop := context.AfterFunc(ctx, func() { on.link.sock.killIfStuck(c.finished) })
	defer stop()
	confirm, err := on.ch.PublishWithDeferredConfirm(exchange, key, !c.p.cfg.AllowUnroutable, false, msg)
	if err != nil || confirm == nil {
		<-on.window
		if errors.Is(err, amqp.ErrClosed) { // refused before the first byte
			c.finish(i, brokers.NotSent, classify("publish", err))
		} else {
			c.finish(i, brokers.Unknown, unknown(err))
		}
		return
	}
	c.ready = c.ready[1:]
	c.inflight = append(c.inflight, &sent{i: i, on: on, sig: signature(msg.MessageId, exchange, key, msg.Body), size: len(msg.Body), confirm: confirm})
}

// await waits for the answer to the message that was sent first. The others'
// answers are not lost: they are there when their turn comes.
func (c *call) await(ctx context.Context) {
	s := c.inflight[0]
	select {
	case <-s.confirm.Done():
	default:
		select {
		case <-s.confirm.Done():
		case <-ctx.Done():
			c.abandon(context.Cause(ctx))
			return
		}
	}
	c.inflight = c.inflight[1:]
	outcome, err := s.result()
	<-s.on.window
	c.answer(s.i, outcome, err)
}

// abandon ends the call: what is answered by now counts, the rest is Unknown. Its
// places in the window are free when the answers come, or the channel ends.
func (c *call) abandon(cause error) {
	left := c.inflight
	c.inflight = nil
	for _, s := range left {
		select {
		case <-s.confirm.Done():
			outcome, err := s.result()
			<-s.on.window
			c.answer(s.i, outcome, err)
		default:
			c.p.tails.Go(func() { // ends with the channel at the latest
				<-s.confirm.Done()
				_, _ = s.result() // takes its return out of the way
				<-s.on.window
			})
			c.answer(s.i, brokers.Unknown, unknown(cause))
		}
	}
}

// finish records the outcome of the message at the head of ready.
func (c *call) finish(i int, o brokers.Outcome, err error) {
	c.ready = c.ready[1:]
	c.answer(i, o, err)
}

// answer records an outcome and lets the Key go on, or stop.
func (c *call) answer(i int, o brokers.Outcome, err error) {
	c.rs[i] = brokers.Result{Outcome: o, Err: err}
	k := c.keys[c.ms[i].Key]
	if k == nil {
		return
	}
	k.inflight--
	if o != brokers.Accepted {
		k.stopped = true
	}
	for len(k.waiting) > 0 && (k.stopped || k.inflight < c.p.cfg.PerKeyInFlight) {
		next := k.waiting[0]
		k.waiting = k.waiting[1:]
		if k.stopped {
			c.rs[next] = brokers.Result{Outcome: brokers.NotSent, Err: brokers.ErrKeyStopped}
			continue
		}
		k.inflight++
		c.ready = append(c.ready, next)
	}
}

// result tells what became of an answered message.
func (s *sent) result() (brokers.Outcome, error) {
	// The broker sends a return before the confirm, and one goroutine reads both: when
	// the confirm is here, so is the return.
	returned := s.on.returns.take(s.sig)
	switch {
	case s.confirm.Acked() && returned == nil:
		return brokers.Accepted, nil
	case s.confirm.Acked():
		return brokers.Refused, &brokers.Error{Class: brokers.Retryable, Op: "publish", After: retryPause,
			Err:  fmt.Errorf("%w: exchange %q, routing key %q: %s", brokers.ErrNoRoute, returned.Exchange, returned.RoutingKey, returned.ReplyText),
			Hint: "no queue is bound for it"}
	case !s.on.ch.IsClosed():
		return brokers.Refused, &brokers.Error{Class: brokers.Retryable, Op: "publish", Err: errNacked, After: retryPause,
			Hint: "the queue may be full (x-max-length with reject-publish) or have lost its leader"}
	}
	// The library answers "not acknowledged" for everything when a channel ends.
	reason := s.on.reason()
	if tooLarge(reason, s.size) {
		return brokers.Refused, permanent(reason)
	}
	return brokers.Unknown, unknown(reason)
}

var errNacked = errors.New("the broker did not take the message (basic.nack)")

func unknown(cause error) error {
	if cause == nil {
		cause = amqp.ErrClosed
	}
	e := &brokers.Error{Class: brokers.Retryable, Op: "publish", Err: errors.Join(brokers.ErrUnknownOutcome, cause), After: retryPause}
	return e
}

// reason returns why the channel ended.
func (c *channel) reason() error {
	c.returns.mu.Lock()
	defer c.returns.mu.Unlock()
	if c.returns.closedBy == nil {
		c.returns.closedBy = amqp.ErrClosed
		select {
		case e := <-c.closes:
			if e != nil {
				c.returns.closedBy = e
			}
		default:
		}
	}
	return classify("publish", c.returns.closedBy)
}

// tooLarge tells the message that the broker ended the channel over, by the size
// that it names; its neighbours are merely Unknown.
func tooLarge(err error, size int) bool {
	var ae *amqp.Error
	return errors.As(err, &ae) && ae.Code == amqp.PreconditionFailed && strings.Contains(ae.Reason, "message size "+strconv.Itoa(size)+" ")
}

// returns are the unroutable messages of one channel that were not matched yet.
type returns struct {
	ch       <-chan amqp.Return
	mu       sync.Mutex
	bySig    map[string][]*amqp.Return
	closedBy error
}

// take removes and returns the return that belongs to sig, if there is one.
func (r *returns) take(sig string) *amqp.Return {
	r.mu.Lock()
	defer r.mu.Unlock()
	for r.ch != nil {
		select {
		case ret, ok := <-r.ch:
			if !ok {
				r.ch = nil
				continue
			}
			if r.bySig == nil {
				r.bySig = map[string][]*amqp.Return{}
			}
			s := signature(ret.MessageId, ret.Exchange, ret.RoutingKey, ret.Body)
			r.bySig[s] = append(r.bySig[s], &ret)
			continue
		default:
		}
		break
	}
	found := r.bySig[sig]
	if len(found) == 0 {
		return nil
	}
	if len(found) == 1 {
		delete(r.bySig, sig)
	} else {
		r.bySig[sig] = found[1:]
	}
	return found[0]
}

// signature identifies a message among those in flight on a channel: by its ID and
// where it goes, by its body where it has no ID. Two with one signature share their
// fate anyway: they are routed alike.
func signature(id, exchange, key string, body []byte) string {
	if id == "" {
		id = "\x00" + string(body)
	}
	return brokers.JoinID(id, exchange, key)
}
