package memory

import (
	"slices"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
)

// ChannelConfig configures a queue that pushes to sessions, as RabbitMQ has them.
type ChannelConfig struct {
	// Prefetch bounds the unacknowledged messages of one Source. 0 means its Room.
	Prefetch int
	// Quorum counts deliveries (Delivery.Attempt), as quorum queues do; otherwise
	// there is only the redelivered flag.
	Quorum bool
	// DeliveryLimit n retires a message after n+1 deliveries: to DeadLetter or, if
	// that is empty, for good. Quorum only; 0 means never.
	DeliveryLimit int
	// DeadLetter is the queue for rejected messages and those past the limit. If it
	// is empty, Reject is unsupported.
	DeadLetter string
	// SingleActive hands everything to the first Source that is open, and to the
	// next one when it goes: the queue is LaneOrdered.
	SingleActive bool
	// ConsumerTimeout ends the session of a Source that holds one message longer.
	// 0 means 30 min.
	ConsumerTimeout time.Duration
	// RequeueAtTail puts returned messages last instead of where they were.
	RequeueAtTail bool
	// NackCounts makes Release count against DeliveryLimit (RabbitMQ before 4.3).
	NackCounts bool
}

// Channel declares a queue in the manner of RabbitMQ. It panics if the name is
// taken.
func (b *Broker) Channel(name string, cfg ChannelConfig) {
	if cfg.ConsumerTimeout <= 0 {
		cfg.ConsumerTimeout = 30 * time.Minute
	}
	c := &channel{b: b, name: name, cfg: cfg, first: map[string]int64{}}
	c.delayed = schedule[*item]{
		due:  func(it *item) time.Time { return it.at },
		rank: func(it *item) int64 { return it.pos },
		mark: func(it *item, i int) { it.hidden = i },
	}
	b.declare(name, c)
}

// channel is the broker's side of it.
type channel struct {
	b    *Broker
	name string
	cfg  ChannelConfig

	next    int64
	epochs  uint64
	ready   line
	delayed schedule[*item] // by DelayDelivery
	stalled time.Time       // single active: nothing is handed over until then
	subs    []*channelSource
	n       tally
	first   map[string]int64
}

func (c *channel) profile() string { return "channel" }

func (c *channel) source(bs base) brokers.Source {
	s := &channelSource{base: bs, c: c}
	s.self = s
	return s
}

func (c *channel) append(now time.Time, it *item) {
	it.pos, it.coord, it.sent = c.next, c.next, now
	c.next++
	if it.copied {
		c.n.copies++
	} else {
		c.n.accepted++
	}
	c.ready.insert(it)
	c.awake()
}

func (c *channel) awake() {
	for _, s := range c.subs {
		s.awake()
	}
}

// requeue puts an unacknowledged message back. counts says whether this was one of
// the deliveries that the limit limits.
func (c *channel) requeue(now time.Time, it *item, counts bool) {
	it.again = true
	if counts {
		it.attempts++
	}
	if c.cfg.Quorum && c.cfg.DeliveryLimit > 0 && it.attempts > c.cfg.DeliveryLimit {
		c.retire(now, it)
		return
	}
	if c.cfg.RequeueAtTail {
		it.pos = c.next
		c.next++
	}
	c.ready.insert(it)
	c.awake()
}

// retire ends the life of a rejected message, or of one past the limit.
func (c *channel) retire(now time.Time, it *item) {
	e := Entry{Op: "dead-letter", Name: c.name, ID: it.m.ID, Attempt: it.attempts, Outcome: "dropped"}
	if c.cfg.DeadLetter == "" {
		c.n.dropped++
	} else {
		c.n.dead++
		e.Outcome = c.cfg.DeadLetter
		c.b.deadLetter(now, c.cfg.DeadLetter, it)
	}
	c.b.record(now, e)
}

func (c *channel) advance(now time.Time) {
	for {
		at, ok := c.delayed.next()
		if !ok || at.After(now) {
			return
		}
		it := c.delayed.a[0]
		c.delayed.remove(it.hidden)
		c.ready.insert(it)
		c.awake()
	}
}

// takeReady takes the next message for s, or returns nil.
func (c *channel) takeReady(now time.Time) (*item, bool) {
	for c.ready.len() > 0 && !c.stalled.After(now) {
		i := 0
		if !c.cfg.SingleActive {
			i = c.b.pick(c.name, &c.ready)
		}
		it := c.ready.at(i)
		wait, dup := c.b.onDeliver(c.name, c.name, it)
		if wait == 0 {
			return c.ready.take(i), dup
		}
		c.b.record(now, Entry{Op: "delay", Name: c.name, ID: it.m.ID, Attempt: it.attempts, Outcome: wait.String()})
		if c.cfg.SingleActive {
			c.stalled = now.Add(wait)
			break
		}
		c.ready.take(i)
		it.at = now.Add(wait)
		c.delayed.push(it)
	}
	return nil, false
}

func (c *channel) restart(now time.Time, cause error) {
	for _, s := range slices.Clone(c.subs) {
		s.disconnect(now, cause, 0)
	}
}

func (c *channel) check() []string { return c.n.check(c.name, c.stored()) }

func (c *channel) stored() int {
	n := c.ready.len() + c.delayed.len()
	for _, s := range c.subs {
		n += s.unacked
	}
	return n
}

// all returns what is stored, in hand or not, in order.
func (c *channel) all() []*item {
	its := slices.Concat(c.ready.q[c.ready.head:], c.delayed.a)
	for _, s := range c.subs {
		for _, t := range s.tags {
			if t.open() {
				its = append(its, t.it)
			}
		}
	}
	return inOrder(its)
}
