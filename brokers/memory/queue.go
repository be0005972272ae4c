package memory

import (
	"fmt"
	"slices"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
)

// QueueConfig configures a queue with visibility timeouts, as Amazon SQS has them.
type QueueConfig struct {
	// Visibility is how long a received message stays invisible to others without
	// an extension. The Source extends it every third of it. 0 means 30 s.
	Visibility time.Duration
	// FIFO makes messages of one Key a group, which is handed over in order and
	// locked while any of it is in hand. Messages without a Key are a group each.
	FIFO bool
	// OneLockPerGroup hands over one message of a group at a time; by default one
	// Receive returns as many of a group as it can.
	OneLockPerGroup bool
	// MaxReceives moves a message to DeadLetter instead of handing it over once
	// more. 0 means never.
	MaxReceives int
	// DeadLetter is the queue for that; empty means the queue's name + ".dead".
	DeadLetter string
	// BatchMax is the most messages of one Receive. 0 means 10.
	BatchMax int
	// MaxHold is the longest that extensions can keep a message. 0 means 12 h.
	MaxHold time.Duration
	// Retention is how long unsettled messages are kept. 0 means 4 days.
	Retention time.Duration
}

func (c *QueueConfig) defaults(name string) {
	c.Visibility = orDefault(c.Visibility, 30*time.Second)
	c.MaxHold = orDefault(c.MaxHold, 12*time.Hour)
	c.Retention = orDefault(c.Retention, 4*24*time.Hour)
	if c.BatchMax <= 0 {
		c.BatchMax = 10
	}
	if c.DeadLetter == "" {
		c.DeadLetter = name + ".dead"
	}
}

// Queue declares a queue. It panics if the name is taken.
func (b *Broker) Queue(name string, cfg QueueConfig) { b.declare(name, newQueue(b, name, cfg)) }

// queue is the broker's side of it.
type queue struct {
	b    *Broker
	name string
	cfg  QueueConfig

	next    int64 // position and coordinate of the next message
	handles uint64
	batches uint64
	ready   line            // standard: visible messages
	hidden  schedule[*item] // invisible ones: in hand, or delayed
	groups  map[string]*fifoGroup
	turn    []*fifoGroup // groups that may have something to hand over
	subs    []*queueSource
	n       tally
	first   map[string]int64 // last first delivery of a key, for Check
}

// fifoGroup is the messages of one Key, in order.
type fifoGroup struct {
	key    string
	lane   string
	line   line // all that are stored, those in hand included
	inHand int
	queued bool // in turn
}

func newQueue(b *Broker, name string, cfg QueueConfig) *queue {
	cfg.defaults(name)
	return &queue{
		b: b, name: name, cfg: cfg,
		groups: map[string]*fifoGroup{},
		first:  map[string]int64{},
		hidden: schedule[*item]{
			due:  func(it *item) time.Time { return it.at },
			rank: func(it *item) int64 { return it.pos },
			mark: func(it *item, i int) { it.hidden = i },
		},
	}
}

func (q *queue) profile() string { return "queue" }

func (q *queue) source(bs base) brokers.Source {
	s := &queueSource{base: bs, q: q}
	s.self = s
	s.beats = schedule[*lease]{
		due:  func(l *lease) time.Time { return l.beat },
		rank: func(l *lease) int64 { return int64(l.handle) },
		mark: func(l *lease, i int) { l.beatAt = i },
	}
	return s
}

// append stores a new message.
func (q *queue) append(now time.Time, it *item) {
	it.coord = q.next
	q.n.accepted++
	q.add(now, it)
}

// copyOf stores a second copy of it, under the same coordinates.
func (q *queue) copyOf(now time.Time, it *item) {
	c := it.fresh()
	c.coord, c.copied = it.coord, true
	q.n.copies++
	q.b.record(now, Entry{Op: "duplicate", Name: q.name, ID: it.m.ID, Outcome: "ok"})
	q.add(now, c)
}

func (q *queue) add(now time.Time, it *item) {
	it.pos, it.sent = q.next, now
	q.next++
	if q.cfg.FIFO {
		key := it.m.Key
		name := "group:" + key
		if key == "" {
			key = fmt.Sprintf("\x00%d", it.coord)
			name = fmt.Sprintf("single:%d", it.coord)
		}
		g := q.groups[key]
		if g == nil {
			g = &fifoGroup{key: key, lane: q.name + "/" + name}
			q.groups[key] = g
		}
		it.group = g
		g.line.insert(it)
	}
	q.show(it)
}

// show makes it visible.
func (q *queue) show(it *item) {
	q.hidden.remove(it.hidden)
	if g := it.group; g != nil {
		q.offer(g)
	} else {
		q.ready.insert(it)
	}
	q.awake()
}

// hide makes it invisible until at; it must not be in ready.
func (q *queue) hide(it *item, at time.Time) {
	it.at = at
	if it.hidden > 0 {
		q.hidden.fix(it.hidden - 1)
		return
	}
	q.hidden.push(it)
}

// offer queues g for hand-over if it is free.
func (q *queue) offer(g *fifoGroup) {
	if !g.queued && g.inHand == 0 && g.line.len() > 0 && g.line.at(0).hidden == 0 {
		g.queued = true
		q.turn = append(q.turn, g)
	}
}

func (q *queue) awake() {
	for _, s := range q.subs {
		s.awake()
	}
}

// landed notes that it is in nobody's hands any more.
func (q *queue) landed(it *item) {
	it.lease = nil
	if it.flight {
		it.flight = false
		if it.group != nil {
			it.group.inHand--
		}
	}
}

// remove ends a message's life.
func (q *queue) remove(it *item) {
	q.landed(it)
	q.hidden.remove(it.hidden)
	if g := it.group; g != nil {
		g.line.remove(it)
		if g.line.len() == 0 {
			delete(q.groups, g.key)
		}
		q.offer(g)
		q.awake()
	}
}

// advance makes visible what is due. A lease that ran out is lost.
func (q *queue) advance(now time.Time) {
	for {
		at, ok := q.hidden.next()
		if !ok || at.After(now) {
			return
		}
		q.expire(at, q.hidden.a[0])
	}
}

// expire ends an invisibility.
func (q *queue) expire(at time.Time, it *item) {
	if l := it.lease; l != nil {
		q.b.record(at, Entry{Op: "expire", Name: q.name, ID: it.m.ID, Lane: l.lane, Attempt: it.attempts, Outcome: "ok"})
		l.end(leaseLost, brokers.ErrOwnershipLost)
	}
	q.giveBack(at, it, 0)
}

// giveBack makes it visible again after d.
func (q *queue) giveBack(now time.Time, it *item, d time.Duration) {
	q.landed(it)
	if d > 0 {
		q.hide(it, now.Add(d))
		return
	}
	if it.group == nil { // a standard queue promises no order, and a poison message must not stay in front
		it.pos = q.next
		q.next++
	}
	q.show(it)
}

// retired reports whether it is past the queue's retention or receives, and deals
// with it.
func (q *queue) retired(now time.Time, it *item) bool {
	switch {
	case now.Sub(it.sent) >= q.cfg.Retention:
		q.n.expired++
		q.b.record(now, Entry{Op: "retention", Name: q.name, ID: it.m.ID, Attempt: it.attempts, Outcome: "dropped"})
	case q.cfg.MaxReceives > 0 && it.attempts >= q.cfg.MaxReceives:
		q.n.dead++
		q.b.record(now, Entry{Op: "dead-letter", Name: q.name, ID: it.m.ID, Attempt: it.attempts, Outcome: q.cfg.DeadLetter})
		q.b.deadLetter(now, q.cfg.DeadLetter, it)
	default:
		return false
	}
	q.remove(it)
	return true
}

// takeReady takes the next visible message of a standard queue.
func (q *queue) takeReady(now time.Time) (*item, bool) {
	for q.ready.len() > 0 {
		it := q.ready.take(q.b.pick(q.name, &q.ready))
		if q.retired(now, it) {
			continue
		}
		wait, dup := q.b.onDeliver(q.name, q.name, it)
		if wait > 0 {
			q.b.record(now, Entry{Op: "delay", Name: q.name, ID: it.m.ID, Attempt: it.attempts, Outcome: wait.String()})
			q.hide(it, now.Add(wait))
			continue
		}
		return it, dup
	}
	return nil, false
}

// takeGroup takes up to max messages of the next free group that is not skipped.
func (q *queue) takeGroup(now time.Time, max int, skip map[string]bool) (its []*item, dups []bool) {
	if q.cfg.OneLockPerGroup {
		max = 1
	}
	var passed []*fifoGroup
	defer func() { q.turn = append(passed, q.turn...) }()
	for len(q.turn) > 0 && len(its) == 0 {
		g := q.turn[0]
		q.turn[0] = nil
		q.turn = q.turn[1:]
		if skip[g.lane] {
			passed = append(passed, g)
			continue
		}
		g.queued = false
		for i := 0; i < g.line.len() && len(its) < max && g.inHand == 0; {
			it := g.line.at(i)
			if it.hidden > 0 {
				break
			}
			if q.retired(now, it) {
				continue // it is gone: the next one has its place
			}
			wait, dup := q.b.onDeliver(q.name, g.lane, it)
			if wait > 0 { // the messages behind it wait too
				q.hide(it, now.Add(wait))
				break
			}
			its, dups = append(its, it), append(dups, dup)
			i++
		}
	}
	return its, dups
}

func (q *queue) restart(now time.Time, cause error) {
	for _, s := range slices.Clone(q.subs) {
		s.blink(now, cause, 0)
	}
}

func (q *queue) check() []string { return q.n.check(q.name, q.stored()) }

// all returns what is stored, in hand or not, in order.
func (q *queue) all() []*item {
	var its []*item
	if q.cfg.FIFO {
		for _, g := range q.groups {
			its = append(its, g.line.q[g.line.head:]...)
		}
	} else {
		its = slices.Concat(q.ready.q[q.ready.head:], q.hidden.a)
	}
	return inOrder(its)
}

func (q *queue) stored() int {
	if !q.cfg.FIFO {
		return q.ready.len() + q.hidden.len()
	}
	n := 0
	for _, g := range q.groups {
		n += g.line.len()
	}
	return n
}

// tally counts what became of the messages of a destination.
type tally struct {
	accepted, copies                       int
	done, rejected, dead, dropped, expired int
}

func (n *tally) check(name string, stored int) []string {
	in, out := n.accepted+n.copies, n.done+n.rejected+n.dead+n.dropped+n.expired
	if in != out+stored {
		return []string{fmt.Sprintf("%s: %d messages came in, but %d are settled or retired and %d stored: %+v", name, in, out, stored, *n)}
	}
	return nil
}
