package consumer

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
)

// Interceptor wraps every run of a message outside its transaction: for tracing,
// metrics, rate limits. It calls next once, with a context whose values the handler
// sees, and gets how the run ended: nil for a commit and for a duplicate.
//
// What it returns matters only if it did not call next: then the message did not
// run, and the error counts as the handler's would.
type Interceptor func(ctx context.Context, m *Message, next func(ctx context.Context) error) error

// Chain wraps a handler inside its transaction, the first wrapper outermost.
func Chain[Tx any](h Handler[Tx], wrappers ...func(Handler[Tx]) Handler[Tx]) Handler[Tx] {
	for i := len(wrappers) - 1; i >= 0; i-- {
		h = wrappers[i](h)
	}
	return h
}

// Option configures what needs the transaction's type.
type Option[Tx any] func(*loop[Tx])

// errSkipped is how a run ends that an interceptor did not let through without
// saying why.
var errSkipped = errors.New("an interceptor returned nil without running the message")

// intercept takes a job one step further inside the interceptors.
func (l *loop[Tx]) intercept(j *job, step func(*job) next) next {
	if len(l.cfg.Interceptors) == 0 {
		return step(j)
	}
	var n next
	ran := false
	run := func(ctx context.Context) error {
		if ran {
			return errors.New("consumer: an interceptor called next twice")
		}
		ran = true
		j.ctx, j.err = ctx, nil
		n = step(j)
		j.ctx = nil
		return j.err
	}
	m := l.message(j)
	for i := len(l.cfg.Interceptors) - 1; i >= 0; i-- {
		f, inner := l.cfg.Interceptors[i], run
		run = func(ctx context.Context) error { return f(ctx, m, inner) }
	}
	err := safely(l.values, run)
	switch {
	case ran:
		if p := (*panicError)(nil); errors.As(err, &p) {
			l.cfg.Logger.Error("interceptor panicked after the run", "message_id", m.ID, "error", err, "stack", p.stack)
		}
		return n
	case err == nil:
		err = errSkipped
	}
	if j.head != nil {
		return l.skipHead(j, err)
	}
	return l.failed(j, err)
}

// skipHead keeps the error of an interceptor on a held message that did not run.
func (l *loop[Tx]) skipHead(j *job, err error) next {
	ctx, cancel := l.storeContext()
	a, e := l.store.BeginRetry(ctx, j.head, l.unit(j))
	cancel()
	if e != nil {
		return l.retryNotBegun(j, e)
	}
	return l.failHead(j, a, l.decideHead(j, err))
}

// safely turns a panic into an error.
func safely(ctx context.Context, f func(context.Context) error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("interceptor: %w", &panicError{v, string(debug.Stack())})
		}
	}()
	return f(ctx)
}
