package kafka

import (
	"context"
	"fmt"
	"time"

	"github.com/segmentio/kafka-go"

	"github.com/twiceproof/twiceproof/brokers"
)

// member serves one membership after the other; there is another one only after a
// stall.
func (s *Source) member(ctx context.Context, c *client) {
	for {
		s.mu.Lock()
		s.c = c
		s.mu.Unlock()
		s.join(ctx, c)
		c.free()
		if ctx.Err() != nil {
			return
		}
		c = newClient(s.cfg.Brokers, s.cfg.Security, s.clientID(), s.cfg.Topics)
	}
}

// join is a member of the group until ctx ends or the membership stalls.
func (s *Source) join(ctx context.Context, c *client) {
	cg, err := kafka.NewConsumerGroup(kafka.ConsumerGroupConfig{
		ID: s.cfg.Group, Brokers: s.cfg.Brokers, Dialer: c.dialer, Topics: s.cfg.Topics,
		HeartbeatInterval: s.cfg.HeartbeatInterval, SessionTimeout: s.cfg.SessionTimeout, RebalanceTimeout: s.cfg.RebalanceTimeout,
		// The watch is ours: kafka-go's would create a topic that was deleted, and spins.
		JoinGroupBackoff: time.Second, Timeout: 5 * time.Second, WatchPartitionChanges: false,
		// RetentionTime stays unset: sent, it would expire the offsets of a living group.
	})
	if err != nil {
		s.fail(brokers.NewFatal("kafka.SourceConfig", err, ""))
		return
	}
	// Close waits for the broker: bounded by kafka-go's own timeouts, and by our Close.
	defer func() { _ = cg.Close() }()
	for {
		g, err := cg.Next(ctx)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			s.disconnected(classify(fmt.Sprintf("join group %q", s.cfg.Group), err))
			continue
		}
		gen := s.begin(c, g)
		s.log.Info("joined", "generation", g.ID, "lanes", len(gen.lanes))
		s.mu.Lock()
		s.connected, s.refusedAt = true, time.Time{}
		s.mu.Unlock()
		s.emit(brokers.Event{Kind: brokers.EventConnected})
		s.once.Do(func() { close(s.ready) })
		if stalled := gen.supervise(ctx); stalled {
			return
		}
	}
}

// supervise waits for the generation's end. It reports whether the connections are to
// be made anew.
func (g *generation) supervise(ctx context.Context) (stalled bool) {
	s := g.s
	t := time.NewTicker(max(s.cfg.StallAfter/4, 10*time.Millisecond))
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return false
		case <-g.drain:
			return false
		case <-t.C:
		}
		if l, err := g.stall(); l != nil {
			s.log.Error("the partition stalls: connecting afresh", "lane", l.name.Name, "error", err)
			s.emit(brokers.Event{Kind: brokers.EventStalled, Lane: l.name, Err: err})
			return true
		}
	}
}

// stall finds a lane that wants to read and could not for too long.
func (g *generation) stall() (*lane, error) {
	g.s.mu.Lock()
	defer g.s.mu.Unlock()
	for _, l := range g.lanes {
		waiting := len(l.buf) > 0 // there is enough to hand over
		if waiting {
			l.fetchedAt = time.Now()
		}
		if !waiting && time.Since(l.fetchedAt) > g.s.cfg.StallAfter {
			return l, l.fetchErr
		}
	}
	return nil, nil
}

// disconnected reports that the member could not join.
func (s *Source) disconnected(err error) {
	s.log.Warn("cannot join the group; trying again", "error", err)
	s.mu.Lock()
	was := s.connected
	s.connected = false
	s.mu.Unlock()
	if was {
		s.emit(brokers.Event{Kind: brokers.EventDisconnected, Err: err})
	}
	if brokers.ClassOf(err) == brokers.Fatal {
		s.refused(err)
	}
}

// refused notes an error of class Fatal, which is believed after a while.
func (s *Source) refused(err error) {
	s.mu.Lock()
	if s.refusedAt.IsZero() {
		s.refusedAt = time.Now()
	}
	patience := fatalFor
	select {
	case <-s.ready:
	default:
		patience = 2 * time.Second // Open has seen the topics: only the group refuses
	}
	believed := time.Since(s.refusedAt) >= patience
	s.mu.Unlock()
	if believed {
		s.fail(err)
	}
}
