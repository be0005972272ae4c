package consumer

import (
	"context"
	"sync"
)

// pause stops the intake on request.
type pause struct {
	mu      sync.Mutex
	resumed chan struct{}      // closed while not paused
	cancel  context.CancelFunc // ends the Receive that is waiting
}

func newPause() *pause {
	p := &pause{resumed: make(chan struct{}), cancel: func() {}}
	close(p.resumed)
	return p
}

func (p *pause) set(paused bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case isClosed(p.resumed) != paused:
	case paused:
		p.resumed = make(chan struct{})
		p.cancel()
	default:
		close(p.resumed)
	}
}

// wait blocks while paused; false when ctx ended.
func (p *pause) wait(ctx context.Context) bool {
	p.mu.Lock()
	resumed := p.resumed
	p.mu.Unlock()
	select {
	case <-resumed:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}

// during returns a context that also ends with the next pause.
func (p *pause) during(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cancel = cancel
	if !isClosed(p.resumed) {
		cancel()
	}
	return ctx, cancel
}

// Pause stops receiving and the retries of held messages. What is in hand is
// finished. It may be called before Run, and again.
func (r *Runner) Pause() { r.state.pause.set(true) }

// Resume ends a Pause.
func (r *Runner) Resume() { r.state.pause.set(false) }
