package consumer

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/inbox"
)

// panicError is a handler's panic.
type panicError struct {
	value any
	stack string
}

func (e *panicError) Error() string { return fmt.Sprintf("handler panicked: %v", e.value) }

// result is how a handler came back.
type result struct {
	err     error
	lost    bool // its delivery's ownership was lost
	drained bool // the drain deadline ended it
	ended   bool // its context had ended
}

// call runs the handler with its deadline. A handler that ignores its context past
// the grace period loses its connection.
func (l *loop[Tx]) call(j *job, a inbox.Attempt[Tx], m *Message, owned context.Context) result {
	values := l.values
	if j.ctx != nil {
		values = context.WithoutCancel(j.ctx) // an interceptor's
	}
	ctx, cancel := context.WithCancelCause(values)
	defer cancel(nil)
	if l.cfg.HandlerTimeout > 0 {
		var stop context.CancelFunc
		ctx, stop = context.WithTimeoutCause(ctx, l.cfg.HandlerTimeout, fmt.Errorf("handler timeout of %s: %w", l.cfg.HandlerTimeout, context.DeadlineExceeded))
		defer stop()
	}
	if owned != nil {
		defer context.AfterFunc(owned, func() { cancel(brokers.ErrOwnershipLost) })()
	}
	defer context.AfterFunc(l.drained, func() { cancel(errDraining) })()
	done := make(chan error, 1)
	go func() {
		defer func() {
			if v := recover(); v != nil {
				done <- &panicError{v, string(debug.Stack())}
			}
		}()
		done <- l.handler(ctx, a.Tx(), m)
	}()
	var err error
	select {
	case err = <-done:
	case <-ctx.Done():
		err = l.awaitReturn(ctx, a, m, done)
	}
	cause := context.Cause(ctx)
	j.err = err
	r := result{err: err, ended: ctx.Err() != nil}
	if err != nil {
		r.lost = errors.Is(cause, brokers.ErrOwnershipLost)
		r.drained = errors.Is(cause, errDraining)
		if r.ended && errors.Is(cause, context.DeadlineExceeded) {
			r.err = errors.Join(cause, err)
		}
	}
	return r
}

// awaitReturn gives a handler whose context has ended the grace period, and cuts its
// connection then.
func (l *loop[Tx]) awaitReturn(ctx context.Context, a inbox.Attempt[Tx], m *Message, done <-chan error) error {
	t := time.NewTimer(l.cfg.Grace)
	defer t.Stop()
	select {
	case err := <-done:
		return err
	case <-t.C:
	}
	stuck := fmt.Errorf("handler of message %q ignores its context", m.ID)
	l.abandon(+1, stuck)
	killCtx, cancel := context.WithTimeout(l.values, 5*time.Second)
	err := a.Kill(killCtx)
	cancel()
	l.cfg.Logger.Error("handler ignores its context; its connection is cut", "message_id", m.ID, "cause", context.Cause(ctx), "error", err)
	if err != nil {
		// Nobody can end its transaction but itself (SQLite).
		err = errors.Join(<-done, stuck)
		l.abandon(-1, nil)
		return err
	}
	go func() {
		<-done
		l.abandon(-1, nil)
	}()
	return stuck
}

// abandon counts the handlers that go on although their context has ended.
func (l *loop[Tx]) abandon(n int64, stuck error) {
	if n > 0 {
		l.st.stats.abandoned.Add(1)
		l.st.report("handler", stuck)
	}
	if l.stuck.Add(n) == 0 {
		l.st.report("handler", nil)
	}
}
