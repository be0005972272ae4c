package rabbitmq

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/twiceproof/twiceproof/brokers"
)

// ackSettles is how long a channel is kept open after its last acknowledgement. On
// quorum queues the broker passes 32 of them on and keeps the others of a burst
// until those are applied; a channel that is closed in between forgets them, and
// the messages come again (seen with 3.10: 17 or 18 of 50).
const ackSettles = 150 * time.Millisecond

// errGivenBack ends a session whose lane was given back as a whole.
var errGivenBack = errors.New("the subscription was given back")

// session is one subscription: a channel with one consumer. Its epoch is part of
// every delivery's Lane; nothing outlives it.
type session struct {
	s    *Source
	conn *conn
	ch   *amqp.Channel
	lane brokers.Lane

	closes     chan *amqp.Error
	cancels    chan string
	deliveries <-chan amqp.Delivery // serve's; nil while it rests
	ended      chan struct{}        // closed by end

	lastAck atomic.Int64 // Unix nanoseconds; 0: none yet

	mu         sync.Mutex
	open       map[uint64]*held // by delivery tag: what the broker waits for
	cause      error            // why it ended; nil while it lives
	tag        string           // the consumer's
	subscribed int              // how often it has subscribed
	resting    bool             // the consumer is cancelled, or about to be
}

// state of a delivery.
type state uint8

const (
	stateOpen    state = iota
	stateSettled       // answered
	stateLost          // its session ended first, or it was held too long
)

// held is one delivery until it is settled.
type held struct {
	sess   *session
	tag    uint64
	at     time.Time
	state  state // under sess.mu
	cancel context.CancelCauseFunc
}

// subscribe opens a channel and starts consuming. Errors are classified.
func (s *Source) subscribe(ctx context.Context, cn *conn) (*session, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, handshakeTimeout, fmt.Errorf("no answer within %s", handshakeTimeout))
	defer cancel()
	if err := s.cfg.topology(ctx, cn); err != nil {
		return nil, err
	}
	ss := &session{
		s: s, conn: cn, open: map[uint64]*held{}, ended: make(chan struct{}),
		lane: brokers.Lane{Name: s.cfg.Queue, Epoch: s.epoch.Add(1)},
	}
	err := cn.bounded(ctx, func() error {
		ch, err := cn.Channel()
		if err != nil {
			return err
		}
		ss.ch = ch
		// Buffered, or the reason would be lost; registered before the first delivery.
		ss.closes = ch.NotifyClose(make(chan *amqp.Error, 1))
		ss.cancels = ch.NotifyCancel(make(chan string, 1))
		if err := ch.Qos(s.prefetch, 0, false); err != nil {
			return err
		}
		ss.deliveries, err = ss.consume()
		return err
	})
	if err != nil {
		if ss.ch != nil && cn.alive() {
			_ = cn.bounded(ctx, ss.ch.Close)
		}
		return nil, classify(fmt.Sprintf("consume %q", s.cfg.Queue), err)
	}
	return ss, nil
}

// consume subscribes under a tag that the channel has not had: to a consumer that comes
// back a quorum queue delivers once more what it has in hand.
func (ss *session) consume() (<-chan amqp.Delivery, error) {
	ss.mu.Lock()
	ss.subscribed++
	ss.tag = fmt.Sprintf("twiceproof-%d-%d", ss.lane.Epoch, ss.subscribed)
	tag := ss.tag
	ss.mu.Unlock()
	return ss.ch.Consume(ss.s.cfg.Queue, tag, false, false, false, false, amqp.Table(ss.s.cfg.ConsumerArgs))
}

// serve moves deliveries into the Source's buffer until the session ends, by the
// broker, by end, or by ctx. It returns why.
func (ss *session) serve(ctx context.Context) error {
	hold := time.NewTicker(min(max(ss.s.cfg.MaxHold/25, 20*time.Millisecond), 30*time.Second))
	defer hold.Stop()
	cancels := ss.cancels
	for {
		var wanted <-chan struct{}
		var closes <-chan *amqp.Error
		if ss.deliveries == nil { // resting
			wanted, closes = ss.s.wanted, ss.closes
			if ss.s.asked() {
				if err := ss.wake(ctx); err != nil {
					ss.end(err)
					return ss.endedBy()
				}
				continue
			}
		}
		select {
		case d, ok := <-ss.deliveries:
			switch {
			case ok:
				ss.accept(&d)
			case ss.rests() && !ss.ch.IsClosed():
				ss.deliveries = nil
				ss.rested()
			default:
				ss.end(ss.reason())
				return ss.endedBy()
			}
		case <-wanted:
		case e := <-closes:
			ss.end(ss.closed(e))
			return ss.endedBy()
		case _, ok := <-cancels:
			if !ok { // the channel is closed, and deliveries will say why
				cancels = nil
				continue
			}
			// The channel stays open, and an answer to an old tag would be accepted in silence.
			ss.end(ss.cancelled())
			return ss.endedBy()
		case <-hold.C:
			ss.expire(time.Now())
		case <-ss.ended:
			return ss.endedBy()
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// reason says why the deliveries channel was closed. The library closes it after it
// has sent the reason, and the connection's one where the whole connection ended.
func (ss *session) reason() error {
	select {
	case _, ok := <-ss.cancels:
		if ok {
			return ss.cancelled()
		}
	default:
	}
	select {
	case e := <-ss.closes:
		return ss.closed(e)
	default:
		return ss.closed(nil)
	}
}

func (ss *session) closed(e *amqp.Error) error {
	if e == nil {
		e = amqp.ErrClosed
	}
	return classify(fmt.Sprintf("consume %q", ss.lane.Name), e)
}

func (ss *session) rests() bool {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	return ss.resting
}

func (ss *session) cancelled() error {
	return classify(fmt.Sprintf("consume %q", ss.lane.Name), errors.New("the broker cancelled the consumer: the queue was deleted or is moving"))
}

// accept puts a delivery into the Source's buffer.
func (ss *session) accept(d *amqp.Delivery) {
	h := &held{sess: ss, tag: d.DeliveryTag, at: time.Now()}
	out := &brokers.Delivery{
		Message: messageOf(d), Lane: ss.lane, Attempt: attemptOf(d, ss.s.cfg.QueueType), Handle: h,
		Coordinates: ss.lane.String() + "/" + strconv.FormatUint(d.DeliveryTag, 10),
	}
	if out.Key == "" && ss.s.cfg.KeyFromRoutingKey {
		out.Key = d.RoutingKey
	}
	out.Defect = identify(&out.Message, ss.s.cfg.ID)
	// No parent: it would remember every delivery until the session ends.
	out.Context, h.cancel = context.WithCancelCause(context.Background())

	ss.mu.Lock()
	ended := ss.cause != nil
	if !ended {
		ss.open[h.tag] = h
	}
	ss.mu.Unlock()
	if ended {
		h.cancel(brokers.ErrOwnershipLost)
		return
	}
	ss.s.push(out)
}

// end fences the session, once: nothing of it goes out or is handed over any more.
func (ss *session) end(cause error) {
	lost := brokers.ErrOwnershipLost
	if errors.Is(cause, brokers.ErrClosed) {
		lost = brokers.ErrClosed
	}
	ss.mu.Lock()
	if ss.cause != nil {
		ss.mu.Unlock()
		return
	}
	ss.cause = cause
	open := ss.open
	ss.open = nil
	for _, h := range open {
		h.state = stateLost
	}
	ss.mu.Unlock()
	ss.s.drop(ss)
	// The last one first: whoever sees the end of a message's context finds those of
	// the later ones ended too, and does not start the next of its key in its place.
	for _, tag := range slices.Backward(slices.Sorted(maps.Keys(open))) {
		open[tag].cancel(lost)
	}
	close(ss.ended)
}

func (ss *session) endedBy() error {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	return ss.cause
}

// close ends the session and closes its channel: the broker puts back everything
// that is not settled, in order, and acknowledgements sent before have arrived. A
// consumer that is cancelled first would hand the queue to the next one while its
// messages are still here.
func (ss *session) close(ctx context.Context, cause error) {
	ss.end(cause)
	if !ss.conn.alive() {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, closeTimeout)
	defer cancel()
	if at := ss.lastAck.Load(); at != 0 && !ss.ch.IsClosed() {
		select {
		case <-time.After(ackSettles - time.Since(time.Unix(0, at))):
		case <-ctx.Done():
		case <-ss.conn.dead:
		}
	}
	if err := ss.conn.bounded(ctx, ss.ch.Close); err != nil && ss.conn.alive() {
		ss.conn.sock.kill()
	}
}

// expire gives back what has been here for MaxHold, before consumer_timeout takes
// back everything.
func (ss *session) expire(now time.Time) {
	ss.mu.Lock()
	var old []*held
	for _, h := range ss.open {
		if now.Sub(h.at) >= ss.s.cfg.MaxHold {
			old = append(old, h)
		}
	}
	if len(old) == 0 {
		ss.mu.Unlock()
		return
	}
	err := fmt.Errorf("%d deliveries of %q were not settled within MaxHold (%s)", len(old), ss.lane.Name, ss.s.cfg.MaxHold)
	if ss.s.cfg.SingleActiveConsumer {
		ss.mu.Unlock()
		ss.end(&brokers.Error{Class: brokers.Retryable, Op: "hold", Err: errors.Join(errGivenBack, err)})
		return
	}
	ss.mu.Unlock()
	ss.s.log.Warn("giving back: "+err.Error(), "epoch", ss.lane.Epoch)
	if unheard := ss.s.forget(old); len(unheard) > 0 {
		ss.rest(context.Background())
	}
	ss.giveBack(old)
}

// giveBack puts deliveries back into the queue that the runner has not settled.
func (ss *session) giveBack(hs []*held) {
	slices.SortFunc(hs, func(a, b *held) int { return cmp.Compare(a.tag, b.tag) })
	for _, h := range hs {
		ss.mu.Lock()
		open := h.state == stateOpen
		if open {
			delete(ss.open, h.tag)
			h.state = stateLost
		}
		ss.mu.Unlock()
		if open {
			h.cancel(brokers.ErrOwnershipLost)
			_ = ss.ch.Nack(h.tag, false, true) // fails with the session only, which ends it
		}
	}
}
