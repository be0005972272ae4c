package rabbitmq

import (
	"context"
	"errors"
	"fmt"

	amqp "github.com/rabbitmq/amqp091-go"
)

// A broker pushes: what goes back to the queue comes again at once, whether anybody
// asks for it or not, and each time counts against the delivery limit. So once
// something went back while no Receive waits (the consumer's database is out, say), the
// subscription rests until the next Receive. On a single active consumer the whole of
// it has been given back, and is made anew then.

// asking counts the Receives that wait.
func (s *Source) asking(n int) {
	s.mu.Lock()
	s.waiting += n
	s.mu.Unlock()
	if n > 0 {
		select {
		case s.wanted <- struct{}{}:
		default:
		}
	}
}

func (s *Source) asked() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.waiting > 0
}

// awaitReceive waits until a Receive waits; false when ctx ended first.
func (s *Source) awaitReceive(ctx context.Context) bool {
	for !s.asked() {
		select {
		case <-s.wanted:
		case <-ctx.Done():
			return false
		}
	}
	return true
}

// rest cancels the consumer unless a Receive waits: the channel stays, for what is in
// hand. What is still on its way is given back by serve. It waits for the broker's
// answer, or what goes back now would come again; but not longer than ctx lasts.
func (ss *session) rest(ctx context.Context) {
	if ss.s.cfg.SingleActiveConsumer || ss.s.asked() {
		return
	}
	ss.mu.Lock()
	already := ss.resting || ss.cause != nil
	ss.resting = true
	tag := ss.tag
	ss.mu.Unlock()
	if already {
		return
	}
	ss.s.log.Info("nobody receives: the subscription rests until somebody does", "epoch", ss.lane.Epoch)
	done := make(chan struct{})
	go func() { // ends with the connection at the latest
		defer close(done)
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), handshakeTimeout)
		defer cancel()
		if err := ss.conn.bounded(ctx, func() error { return ss.ch.Cancel(tag, false) }); err != nil {
			ss.end(classify(fmt.Sprintf("cancel the consumer of %q", ss.lane.Name), err))
		}
	}()
	select {
	case <-done:
	case <-ctx.Done():
	}
}

// rested gives back what came before the consumer was cancelled.
func (ss *session) rested() {
	ss.mu.Lock()
	unheard := make([]*held, 0, len(ss.open))
	for _, h := range ss.open {
		unheard = append(unheard, h)
	}
	ss.mu.Unlock()
	ss.giveBack(ss.s.forget(unheard))
}

// wake consumes again. The caller is serve.
func (ss *session) wake(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, handshakeTimeout, errors.New("no answer in time"))
	defer cancel()
	var deliveries <-chan amqp.Delivery
	err := ss.conn.bounded(ctx, func() (err error) {
		deliveries, err = ss.consume()
		return err
	})
	if err != nil {
		return classify(fmt.Sprintf("consume %q", ss.lane.Name), err)
	}
	ss.mu.Lock()
	ss.resting = false
	ss.mu.Unlock()
	ss.deliveries = deliveries
	ss.s.log.Info("somebody receives: the subscription goes on", "epoch", ss.lane.Epoch)
	return nil
}
