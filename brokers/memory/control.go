package memory

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
)

// opened returns the profile of an open Source of this broker.
func (b *Broker) opened(src brokers.Source) profile {
	p, ok := src.(profile)
	if !ok {
		panic(fmt.Sprintf("memory: %T is not a Source of this package", src))
	}
	return p
}

// at runs f at an instant of its own, with mu held.
func (b *Broker) at(op, name string, f func(now time.Time)) {
	b.step(stepKey{op: op, name: name})
	b.mu.Lock()
	defer b.unlock()
	f(time.Now())
}

// Disconnect cuts the connection of an open Source made by this broker; it heals
// after down. A channel's session ends and its messages come again with the
// redelivered flag; a queue's leases run out; a topic's member leaves its group
// without a drain and joins as a new one. cause goes to the Observer and may be nil.
// Deliveries in hand end with ErrOwnershipLost. A closed Source is left alone.
func (b *Broker) Disconnect(src brokers.Source, cause error, down time.Duration) {
	b.onSource("disconnect", src, func(now time.Time, p profile) { p.disconnect(now, cause, down) })
}

var errCancelled = errors.New("the broker cancelled the consumer")

// Cancel ends a subscription from the broker's side, as when a RabbitMQ queue is
// deleted or its leader moves. The Source subscribes again at once.
func (b *Broker) Cancel(src brokers.Source) {
	b.onSource("cancel", src, func(now time.Time, p profile) { p.disconnect(now, errCancelled, 0) })
}

// ExpireNow ends the leases that sel selects, by lane and message, as if their
// visibility timeout had passed. Queues only. It returns their number.
func (b *Broker) ExpireNow(sel Select) (n int) {
	b.at("expire-now", sel.Name, func(now time.Time) {
		for _, name := range b.names {
			q, ok := b.dests[name].(*queue)
			if !ok || sel.Name != "" && sel.Name != name {
				continue
			}
			for _, s := range q.subs {
				for _, l := range s.inHand() {
					if l.applied || sel.Lane != "" && sel.Lane != l.lane.Name || sel.ID != "" && sel.ID != l.it.m.ID {
						continue
					}
					q.expire(now, l.it)
					n++
				}
			}
		}
	})
	return n
}

// EvictMember makes the coordinator forget the member behind a topic's Source, as
// when its heartbeats were late: the others get its partitions, and it learns of
// that at its next heartbeat or commit.
func (b *Broker) EvictMember(src brokers.Source) {
	b.onSource("evict", src, func(now time.Time, p profile) {
		if s, ok := p.(*topicSource); ok {
			s.g.evict(now, s.m)
		}
	})
}

func (b *Broker) onSource(op string, src brokers.Source, f func(now time.Time, p profile)) {
	p := b.opened(src)
	s := p.common()
	b.step(stepKey{op: op, name: s.name, who: s.n})
	b.mu.Lock()
	defer b.unlock()
	if s.state == isOpen {
		f(time.Now(), p)
	}
}

func (s *base) common() *base { return s }

func (b *Broker) topic(name string) *topic {
	t, ok := b.dests[name].(*topic)
	if !ok {
		panic(fmt.Sprintf("memory: %q is not a topic", name))
	}
	return t
}

// Rebalance begins a rebalance of a topic's group, which its members notice at
// their next heartbeat. The i-th of owners, if given, is what the i-th member in the
// order of joining gets in the next generation.
func (b *Broker) Rebalance(topic, group string, owners ...[]int) {
	b.at("rebalance", topic, func(now time.Time) {
		g := b.topic(topic).group(group)
		if len(owners) > 0 {
			g.forced = owners
		}
		g.rebalance(now)
		b.record(now, Entry{Op: "rebalance", Name: topic, Outcome: group})
	})
}

// LoseOffsets forgets what a topic's group has committed, as when it was idle past
// the retention of offsets. It is noticed at the next assignment: see Rebalance.
func (b *Broker) LoseOffsets(topic, group string) {
	b.at("lose-offsets", topic, func(now time.Time) {
		g := b.topic(topic).group(group)
		for i := range g.committed {
			g.committed[i] = none
		}
		b.record(now, Entry{Op: "lose-offsets", Name: topic, Outcome: group})
	})
}

// Truncate drops the messages of a partition before an offset, read or not.
func (b *Broker) Truncate(topic string, partition int, before int64) {
	b.at("truncate", topic, func(now time.Time) {
		p := b.topic(topic).parts[partition]
		p.truncate(before)
		b.record(now, Entry{Op: "truncate", Name: topic, Outcome: fmt.Sprintf("%d before %d", partition, before)})
	})
}

// LoseTail drops the messages of a partition from an offset on, as an unclean
// election of a leader does: groups may have committed beyond the end. It breaks the
// promise of Accepted.
func (b *Broker) LoseTail(topic string, partition int, from int64) {
	b.at("lose-tail", topic, func(now time.Time) {
		p := b.topic(topic).parts[partition]
		p.recs = p.recs[:p.find(from)]
		p.end = max(p.start, min(p.end, from))
		b.record(now, Entry{Op: "lose-tail", Name: topic, Outcome: fmt.Sprintf("%d from %d", partition, from)})
		for _, s := range b.topic(topic).subs {
			s.awake()
		}
	})
}

// Gap leaves n offsets of a partition without messages from here on, as compaction
// and transaction markers do.
func (b *Broker) Gap(topic string, partition int, n int64) {
	b.at("hole", topic, func(now time.Time) {
		b.topic(topic).parts[partition].end += max(n, 0)
		for _, s := range b.topic(topic).subs {
			s.awake()
		}
		b.record(now, Entry{Op: "hole", Name: topic, Outcome: fmt.Sprintf("%d offsets in %d", n, partition)})
	})
}

// Committed returns the next offset that a group reads of a partition, or -1 if it
// has committed none.
func (b *Broker) Committed(topic, group string, partition int) int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.topic(topic).group(group).committed[partition]
}

// Block stops all publishing to the destinations, or to all if none is given, as a
// memory alarm does: Publish waits until Unblock or the end of its ctx.
func (b *Broker) Block(names ...string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(names) == 0 {
		names = []string{""}
	}
	for _, n := range names {
		b.blocked[n] = true
	}
}

// Unblock ends every Block.
func (b *Broker) Unblock() {
	b.mu.Lock()
	defer b.mu.Unlock()
	clear(b.blocked)
	close(b.unblocked)
	b.unblocked = make(chan struct{})
}

var errRestarted = errors.New("the broker restarted")

// Restart cuts every connection at once; what is stored stays.
func (b *Broker) Restart() {
	b.at("restart", "", func(now time.Time) {
		b.record(now, Entry{Op: "restart", Outcome: "ok"})
		for _, name := range b.names {
			b.dests[name].restart(now, errRestarted)
		}
	})
}

// Len returns the number of messages that name stores and that are not settled,
// whoever has them; for a topic the number of records. 0 for an unknown name.
func (b *Broker) Len(name string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch d := b.dests[name].(type) {
	case *queue:
		return d.stored()
	case *channel:
		return d.stored()
	case *topic:
		n := 0
		for _, p := range d.parts {
			n += len(p.recs)
		}
		return n
	}
	return 0
}

// Messages returns copies of what Len counts, in the order of their places.
func (b *Broker) Messages(name string) []*brokers.Message {
	b.mu.Lock()
	defer b.mu.Unlock()
	var ms []*brokers.Message
	switch d := b.dests[name].(type) {
	case *queue:
		ms = clones(d.all())
	case *channel:
		ms = clones(d.all())
	case *topic:
		for _, p := range d.parts {
			ms = append(ms, clones(p.recs)...)
		}
	}
	return ms
}

// Check verifies the broker's invariants and returns what is broken, joined:
//
//   - no message is lost: what was Accepted is settled, retired or stored;
//   - no message is handed over while another delivery of it is live;
//   - with a seed, first deliveries of a key are in order where lanes are ordered;
//   - no settlement reaches a channel under a session that has ended;
//   - commits rise, and pass no message that is unfinished in their generation;
//   - with a seed, the context of a delivery ends when its ownership does, with
//     cause ErrOwnershipLost or ErrClosed, and not before.
//
// Call it at the end of every test.
func (b *Broker) Check() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	bad := append([]string(nil), b.violations...)
	for _, name := range b.names {
		bad = append(bad, b.dests[name].check()...)
	}
	for _, w := range b.watched {
		cause := context.Cause(w.d.Context)
		switch lost := w.lost(); {
		case lost && cause != brokers.ErrOwnershipLost && cause != brokers.ErrClosed:
			bad = append(bad, fmt.Sprintf("%s: ownership of %q is lost, but its context says %v", w.d.Coordinates, w.d.ID, cause))
		case !lost && cause == brokers.ErrOwnershipLost && w.held():
			bad = append(bad, fmt.Sprintf("%s: the context of %q ended, but its ownership did not", w.d.Coordinates, w.d.ID))
		}
	}
	errs := make([]error, len(bad))
	for i, s := range bad {
		errs[i] = errors.New("memory: " + s)
	}
	return errors.Join(errs...)
}

// watch keeps a delivery for Check.
func (b *Broker) watch(d *brokers.Delivery, held, lost func() bool) {
	if b.cfg.Seed != 0 {
		b.watched = append(b.watched, watched{d, held, lost})
	}
}

type watched struct {
	d          *brokers.Delivery
	held, lost func() bool
}
