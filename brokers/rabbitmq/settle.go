package rabbitmq

import (
	"context"
	"errors"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
)

// Settle implements [brokers.Source]. Acknowledgements are written one by one and
// are not confirmed by the broker.
//
// On a queue with a single active consumer Release closes the subscription, after
// every other verb of the call: all that is unsettled goes back in order, and the
// Source subscribes again.
func (s *Source) Settle(ctx context.Context, ss ...brokers.Settlement) []error {
	if err := context.Cause(ctx); err != nil {
		return each(len(ss), err)
	}
	done := make(chan struct{})
	// Only a write that stands still outlives ctx; it is ended with its connection.
	stop := context.AfterFunc(ctx, func() {
		if cn := s.connection(); cn != nil {
			cn.sock.killIfStuck(done)
		}
	})
	defer stop()
	defer close(done)

	errs := make([]error, len(ss))
	var lost []*brokers.Delivery
	var back []int // releases on an ordered lane, which come last
	for i, st := range ss {
		h, err := s.handle(st)
		switch {
		case err != nil:
			errs[i] = err
		case st.Verb == brokers.Release && s.cfg.SingleActiveConsumer:
			back = append(back, i)
		default:
			if st.Verb == brokers.Release {
				h.sess.rest(ctx)
			}
			errs[i] = h.settle(st.Verb)
		}
		if errors.Is(errs[i], brokers.ErrOwnershipLost) {
			lost = append(lost, st.Delivery)
		}
	}
	for _, i := range back {
		errs[i] = ss[i].Delivery.Handle.(*held).giveBackLane()
		if errors.Is(errs[i], brokers.ErrOwnershipLost) {
			lost = append(lost, ss[i].Delivery)
		}
	}
	if len(lost) > 0 {
		s.log.Info("settlements came after their subscription had ended and were dropped", "count", len(lost), "first", lost[0].Coordinates)
		s.emit(brokers.Event{Kind: brokers.EventSettleLost, Lane: lost[0].Lane, Count: len(lost), Err: brokers.ErrOwnershipLost})
	}
	return errs
}

func each(n int, err error) []error {
	errs := make([]error, n)
	for i := range errs {
		errs[i] = err
	}
	return errs
}

// handle checks a settlement before anything is sent.
func (s *Source) handle(st brokers.Settlement) (*held, error) {
	if st.Delivery == nil {
		return nil, &brokers.Error{Class: brokers.Permanent, Op: "settle", Err: errors.New("no Delivery")}
	}
	h, ok := st.Delivery.Handle.(*held)
	if !ok || h.sess.s != s {
		return nil, &brokers.Error{Class: brokers.Lost, Op: "settle " + st.Delivery.Coordinates, Err: brokers.ErrOwnershipLost,
			Hint: "the delivery is of another Source"}
	}
	if h.settled() { // whatever is asked of it now
		return nil, brokers.ErrAlreadySettled
	}
	caps := s.cfg.capabilities()
	switch st.Verb {
	case brokers.Done, brokers.Release:
	case brokers.Retry:
		if caps.MaxRetryDelay == 0 || st.After > caps.MaxRetryDelay {
			return nil, unsupported(st, "RabbitMQ has no delayed retry, and none at all that keeps a lane's order")
		}
	case brokers.Reject:
		if !caps.Reject {
			return nil, unsupported(st, "without a dead-letter exchange the message would be lost; see DeadLetters")
		}
	default:
		return nil, unsupported(st, "unknown verb")
	}
	return h, nil
}

func (h *held) settled() bool {
	h.sess.mu.Lock()
	defer h.sess.mu.Unlock()
	return h.state == stateSettled
}

func unsupported(st brokers.Settlement, hint string) error {
	return &brokers.Error{Class: brokers.Permanent, Op: "settle " + st.Delivery.Coordinates + " as " + st.Verb.String(), Err: brokers.ErrUnsupported, Hint: hint}
}

// settle answers one delivery under the session that it came by, or not at all.
func (h *held) settle(v brokers.Verb) error {
	ss := h.sess
	ss.mu.Lock()
	if err := h.gone(v); err != nil || h.state != stateOpen {
		ss.mu.Unlock()
		return err
	}
	h.state = stateSettled
	delete(ss.open, h.tag)
	ss.mu.Unlock()
	// After this line the session may end at any time: the channel, which nothing
	// ever reopens, then refuses to send.
	var err error
	ss.lastAck.Store(time.Now().UnixNano())
	switch v {
	case brokers.Done:
		err = ss.ch.Ack(h.tag, false)
	case brokers.Retry:
		// Since 4.3 reject counts against the delivery limit and nack does not.
		err = ss.ch.Reject(h.tag, true)
	case brokers.Release:
		err = ss.ch.Nack(h.tag, false, true)
	case brokers.Reject:
		err = ss.ch.Reject(h.tag, false)
	}
	if err == nil {
		return nil
	}
	ss.mu.Lock()
	h.state = stateLost
	ss.mu.Unlock()
	h.cancel(brokers.ErrOwnershipLost)
	return &brokers.Error{Class: brokers.Lost, Op: "settle", Err: errors.Join(brokers.ErrOwnershipLost, err)}
}

// gone returns what a settlement of a delivery that is not open is answered with.
// The caller holds the session's lock.
func (h *held) gone(v brokers.Verb) error {
	switch {
	case h.state == stateSettled:
		return brokers.ErrAlreadySettled
	case h.state == stateOpen:
		return nil
	case errors.Is(h.sess.cause, brokers.ErrClosed):
		return brokers.ErrClosed
	case v == brokers.Release && errors.Is(h.sess.cause, errGivenBack):
		h.state = stateSettled
		return nil // it went back with its lane
	}
	return brokers.ErrOwnershipLost
}

// giveBackLane ends the subscription: everything unsettled goes back in order.
func (h *held) giveBackLane() error {
	ss := h.sess
	ss.mu.Lock()
	err := h.gone(brokers.Release)
	open := err == nil && h.state == stateOpen
	ss.mu.Unlock()
	if !open {
		return err
	}
	ss.end(&brokers.Error{Class: brokers.Retryable, Op: "release", Err: errGivenBack})
	ss.mu.Lock()
	defer ss.mu.Unlock()
	return h.gone(brokers.Release)
}
