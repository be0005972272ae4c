package memory

import (
	"time"

	"github.com/twiceproof/twiceproof/brokers"
)

// Chaos is a mix of faults that strike by chance. Probabilities are from 0 (never,
// the default) to 1 (always). Whether a fault strikes is a hash of the seed, the
// message and the attempt: not of the time, nor of the order of goroutines.
//
// A lost ack comes again when its lease or session ends: on real time give the
// queue a short Visibility (or the channel a short ConsumerTimeout), as in
//
//	b := memory.New(memory.Config{Chaos: memory.Chaos{Seed: 1, Duplicate: 1, LoseAck: 0.1, Reorder: 8, Delay: 0.2}})
//	b.Queue("orders", memory.QueueConfig{Visibility: 300 * time.Millisecond})
type Chaos struct {
	// Seed chooses the run.
	Seed uint64
	// Duplicate is the probability that a message gets a second copy when it is
	// first handed over. 1 delivers everything at least twice.
	Duplicate float64
	// LoseAck is the probability that a Done never reaches the broker though the
	// Source answers nil: the message comes again when its lease or session ends.
	LoseAck float64
	// FailAck is the probability that a Done is answered by an error; half of
	// these were applied.
	FailAck float64
	// Delay is the probability that a message is handed over up to MaxDelay late,
	// once. Zero MaxDelay means 100 ms.
	Delay    float64
	MaxDelay time.Duration
	// Reorder is the window out of which any message may be handed over first,
	// where lanes are not ordered. Below 2 means in order.
	Reorder int
	// Disconnect is the probability, for each delivery, that the subscription loses
	// its connection right after it, and with it everything it holds.
	Disconnect float64
	// PublishUnknown is the probability that the answer to a message is lost; half
	// of these are stored. PublishNack is the probability that it is refused for now.
	PublishUnknown, PublishNack float64
}

// SetChaos replaces the mix of faults. The zero Chaos ends it.
func (b *Broker) SetChaos(c Chaos) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.chaos = c
}

func (c *Chaos) on() bool { return *c != Chaos{} }

// draw is a number in [0, 1) that depends on the seed and the arguments alone.
func (c *Chaos) draw(kind, name, id string, pos, n int64) float64 {
	h := newHash(c.Seed)
	h.str(kind)
	h.str(name)
	h.str(id)
	h.num(uint64(pos))
	h.num(uint64(n))
	return h.unit()
}

func (c *Chaos) of(kind, name string, it *item) float64 {
	return c.draw(kind, name, it.m.ID, it.coord, it.turn())
}

func (c *Chaos) delay(name string, it *item) time.Duration {
	if c.Delay == 0 || c.of("delay", name, it) >= c.Delay {
		return 0
	}
	most := c.MaxDelay
	if most == 0 {
		most = 100 * time.Millisecond
	}
	return max(1, time.Duration(c.of("delay for", name, it)*float64(most)))
}

func (c *Chaos) duplicate(name string, it *item) bool {
	return !it.copied && it.attempts == 0 && c.Duplicate > 0 && c.of("duplicate", name, it) < c.Duplicate
}

func (c *Chaos) disconnect(name string, it *item) bool {
	return c.Disconnect > 0 && c.of("disconnect", name, it) < c.Disconnect
}

func (c *Chaos) settle(name string, it *item) settleFault {
	it.settles++
	p := c.draw("settle", name, it.m.ID, it.coord, it.turn()<<16|int64(it.settles))
	switch {
	case p < c.LoseAck:
		return settleFault{struck: true}
	case p < c.LoseAck+c.FailAck:
		return settleFault{true, p < c.LoseAck+c.FailAck/2, ErrInjected}
	}
	return settleFault{}
}

// publish returns a fault for the n-th message of a publisher.
func (c *Chaos) publish(m *brokers.Message, n int64) (Fault, bool) {
	p := c.draw("publish", m.Topic, m.ID, 0, n)
	switch {
	case p < c.PublishUnknown:
		return PublishUnknown(p < c.PublishUnknown/2), true
	case p < c.PublishUnknown+c.PublishNack:
		return PublishNack(nil), true
	}
	return Fault{}, false
}
