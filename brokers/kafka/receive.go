package kafka

import (
	"context"
	"errors"

	"github.com/twiceproof/twiceproof/brokers"
)

// Receive implements [brokers.Source].
func (s *Source) Receive(ctx context.Context, limit int) ([]*brokers.Delivery, error) {
	for {
		if err := context.Cause(ctx); err != nil {
			return nil, err
		}
		ds, err := s.take(max(limit, 1))
		if len(ds) > 0 || err != nil {
			return ds, err
		}
		select {
		case <-s.arrived:
		case <-ctx.Done():
		}
	}
}

func (s *Source) take(limit int) ([]*brokers.Delivery, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.state == sourceClosed:
		s.signal() // for the next call too
		return nil, brokers.ErrClosed
	case s.state == sourceNew:
		return nil, brokers.NewFatal("receive", errors.New("the Source is not open"), "call Open first")
	case s.fatal != nil:
		s.signal()
		return nil, s.fatal
	}
	g := s.gen
	if g == nil || g.phase != active || len(g.lanes) == 0 {
		return nil, nil
	}
	limit = min(limit, s.room-g.open)
	if limit <= 0 {
		return nil, nil // Settle signals
	}
	n := len(g.lanes)
	s.first = (s.first + 1) % n
	var ds []*brokers.Delivery
	// Every lane gets a share first; then the rest goes to those that have more.
	for _, quota := range []int{(limit + n - 1) / n, limit} {
		for i := range n {
			if len(ds) == limit {
				return ds, nil
			}
			ds = g.lanes[(s.first+i)%n].take(ds, min(quota, limit-len(ds)))
		}
	}
	return ds, nil
}

// Pause implements [brokers.LanePauser].
func (s *Source) Pause(lanes ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range lanes {
		s.paused[l] = true
	}
}

// Resume implements [brokers.LanePauser].
func (s *Source) Resume(lanes ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range lanes {
		delete(s.paused, l)
	}
	s.signal()
}
