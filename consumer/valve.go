package consumer

import (
	"context"
	"sync"
)

// valve stops the intake while it is shut.
type valve struct {
	mu     sync.Mutex
	opened chan struct{}      // closed while it is open
	cancel context.CancelFunc // ends the Receive that is waiting
}

func newValve() *valve {
	v := &valve{opened: make(chan struct{}), cancel: func() {}}
	close(v.opened)
	return v
}

// shut reports false when it was shut already.
func (v *valve) shut() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	if !isClosed(v.opened) {
		return false
	}
	v.opened = make(chan struct{})
	v.cancel()
	return true
}

func (v *valve) open() {
	v.mu.Lock()
	defer v.mu.Unlock()
	if !isClosed(v.opened) {
		close(v.opened)
	}
}

func (v *valve) isOpen() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return isClosed(v.opened)
}

// wait blocks while it is shut; false when ctx ended.
func (v *valve) wait(ctx context.Context) bool {
	v.mu.Lock()
	opened := v.opened
	v.mu.Unlock()
	select {
	case <-opened:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}

// during returns a context that also ends when it is shut.
func (v *valve) during(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	v.mu.Lock()
	defer v.mu.Unlock()
	v.cancel = cancel
	if !isClosed(v.opened) {
		cancel()
	}
	return ctx, cancel
}

// Pause stops receiving and the retries of held messages. What is in hand is
// finished. It may be called before Run, and again.
func (r *Runner) Pause() { r.state.pause.shut() }

// Resume ends a Pause.
func (r *Runner) Resume() { r.state.pause.open() }
