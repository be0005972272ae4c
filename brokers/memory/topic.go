package memory

import (
	"fmt"
	"slices"
	"sort"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
)

// TopicConfig configures a partitioned log, as Apache Kafka has them.
type TopicConfig struct {
	// Partitions is their number; 0 means 1. A Key always goes to the same one;
	// messages without a Key go to one partition per Publish call, in turn.
	Partitions int
	// Retention is how long messages are kept, settled or not. 0 means 7 days.
	Retention time.Duration
	// SessionTimeout is how long a member of a group may be silent. 0 means 30 s.
	SessionTimeout time.Duration
	// HeartbeatEvery is how often a member says that it lives, and learns of a
	// rebalance. 0 means 3 s.
	HeartbeatEvery time.Duration
	// RebalanceTimeout is how long a rebalance waits for a member to come back.
	// 0 means 60 s.
	RebalanceTimeout time.Duration
}

func (c *TopicConfig) defaults() {
	c.Partitions = max(c.Partitions, 1)
	c.Retention = orDefault(c.Retention, 7*24*time.Hour)
	c.SessionTimeout = orDefault(c.SessionTimeout, 30*time.Second)
	c.HeartbeatEvery = orDefault(c.HeartbeatEvery, 3*time.Second)
	c.RebalanceTimeout = orDefault(c.RebalanceTimeout, 60*time.Second)
}

func orDefault(d, def time.Duration) time.Duration {
	if d <= 0 {
		return def
	}
	return d
}

// Topic declares a topic. It panics if the name is taken.
func (b *Broker) Topic(name string, cfg TopicConfig) {
	cfg.defaults()
	t := &topic{b: b, name: name, cfg: cfg, groups: map[string]*group{}}
	for i := range cfg.Partitions {
		t.parts = append(t.parts, &partition{t: t, n: i, lane: fmt.Sprintf("%s/%d", name, i)})
	}
	b.declare(name, t)
}

// topic is the broker's side: partitions and groups.
type topic struct {
	b          *Broker
	name       string
	cfg        TopicConfig
	parts      []*partition
	groups     map[string]*group
	groupNames []string
	subs       []*topicSource
	turn       int
}

// partition is an append-only log, possibly with holes.
type partition struct {
	t     *topic
	n     int
	lane  string
	recs  []*item // pos is the offset
	start int64   // the oldest offset there can be
	end   int64   // the next offset
}

func (t *topic) profile() string { return "topic" }

func (t *topic) source(bs base) brokers.Source {
	s := &topicSource{base: bs, t: t}
	s.self = s
	return s
}

func (t *topic) group(name string) *group {
	g := t.groups[name]
	if g == nil {
		g = &group{t: t, name: name, committed: make([]int64, len(t.parts))}
		for i := range g.committed {
			g.committed[i] = none
		}
		t.groups[name] = g
		t.groupNames = append(t.groupNames, name)
	}
	return g
}

// append stores a message in the partition of its key.
func (t *topic) append(now time.Time, it *item) {
	n := len(t.parts)
	if n > 1 {
		if it.m.Key == "" {
			n = t.turn % n
			t.turn++
		} else {
			h := newHash(0)
			h.str(it.m.Key)
			n = int(h.sum() % uint64(n))
		}
	} else {
		n = 0
	}
	t.parts[n].append(now, it)
}

func (p *partition) append(now time.Time, it *item) {
	it.pos, it.coord, it.sent = p.end, p.end, now
	p.end++
	p.recs = append(p.recs, it)
	for _, s := range p.t.subs {
		s.awake()
	}
}

// find returns the index of the first record at or after off.
func (p *partition) find(off int64) int {
	if n := len(p.recs); n == 0 || p.recs[n-1].pos < off {
		return n
	}
	if i := off - p.recs[0].pos; i >= 0 && i < int64(len(p.recs)) && p.recs[i].pos == off {
		return int(i) // no holes: the common case
	}
	return sort.Search(len(p.recs), func(i int) bool { return p.recs[i].pos >= off })
}

// truncate drops what lies before off.
func (p *partition) truncate(off int64) {
	i := p.find(off)
	clear(p.recs[:i]) // append copies what is left when it runs out of room
	p.recs = p.recs[i:]
	p.start = max(p.start, min(off, p.end))
}

// retain drops what is too old.
func (p *partition) retain(now time.Time) {
	keep := p.t.cfg.Retention
	if len(p.recs) == 0 || now.Sub(p.recs[0].sent) < keep {
		return
	}
	i := sort.Search(len(p.recs), func(i int) bool { return now.Sub(p.recs[i].sent) < keep })
	if i == len(p.recs) {
		p.truncate(p.end)
		return
	}
	p.truncate(p.recs[i].pos)
}

func (t *topic) restart(now time.Time, cause error) {
	for _, s := range slices.Clone(t.subs) {
		s.disconnect(now, cause, 0, false)
	}
}

func (t *topic) check() (bad []string) {
	for _, p := range t.parts {
		for i, it := range p.recs {
			if it.pos < p.start || it.pos >= p.end || i > 0 && it.pos <= p.recs[i-1].pos {
				bad = append(bad, fmt.Sprintf("%s: offset %d is out of place", p.lane, it.pos))
			}
		}
		for _, name := range t.groupNames {
			if c := t.groups[name].committed[p.n]; c > p.end {
				bad = append(bad, fmt.Sprintf("%s: group %q committed %d, beyond the end %d", p.lane, name, c, p.end))
			}
		}
	}
	return bad
}

// none is the committed offset of a group that has committed nothing.
const none int64 = -1

// group is the coordinator's view of a consumer group.
type group struct {
	t          *topic
	name       string
	generation uint64
	ids        uint64
	members    []*member // in the order they joined
	preparing  bool      // a rebalance waits for members to join
	since      time.Time // when it began
	committed  []int64
	forced     [][]int // partitions of the i-th member in the next generation
}

type member struct {
	id       uint64
	s        *topicSource
	joined   bool // waits for the next generation
	lastSeen time.Time
	gone     bool
}

// groupError is a coordinator's refusal.
type groupError string

func (e groupError) Error() string { return "group coordinator: " + string(e) }

const (
	errUnknownMember = groupError("unknown member")
	errGeneration    = groupError("illegal generation")
	errRebalance     = groupError("rebalance in progress")
)

// join lets s take part in the next generation, as a new member if it is none.
func (g *group) join(now time.Time, s *topicSource) {
	if s.m == nil || s.m.gone {
		g.ids++
		s.m = &member{id: g.ids, s: s}
		g.members = append(g.members, s.m)
	}
	s.m.joined, s.m.lastSeen = true, now
	g.rebalance(now)
	g.complete(now)
}

// rebalance asks all members to join again.
func (g *group) rebalance(now time.Time) {
	if g.preparing || len(g.members) == 0 {
		return
	}
	g.preparing, g.since = true, now
	for _, m := range g.members {
		m.s.poke()
	}
}

// complete begins the next generation once all members have joined.
func (g *group) complete(now time.Time) {
	if !g.preparing {
		return
	}
	if len(g.members) == 0 {
		g.preparing = false
		return
	}
	for _, m := range g.members {
		if !m.joined {
			return
		}
	}
	g.preparing = false
	g.generation++
	parts := g.forced
	g.forced = nil
	if parts == nil {
		parts = spread(len(g.t.parts), len(g.members))
	}
	for i, m := range g.members {
		m.joined, m.lastSeen = false, now
		var mine []int
		if i < len(parts) {
			mine = parts[i]
		}
		m.s.assigned(now, g.generation, mine)
	}
}

// spread gives each member a range of partitions.
func spread(parts, members int) [][]int {
	a := make([][]int, members)
	for p := range parts {
		m := p * members / parts
		if members > parts {
			m = p
		}
		a[m] = append(a[m], p)
	}
	return a
}

// advance evicts members that were silent for too long.
func (g *group) advance(now time.Time) {
	for {
		i := slices.IndexFunc(g.members, func(m *member) bool {
			at, ok := g.deadline(m)
			return ok && !at.After(now)
		})
		if i < 0 {
			return
		}
		at, _ := g.deadline(g.members[i])
		g.evict(at, g.members[i])
	}
}

// deadline is when m is evicted.
func (g *group) deadline(m *member) (time.Time, bool) {
	if m.joined { // it waits for us
		return time.Time{}, false
	}
	at := m.lastSeen.Add(g.t.cfg.SessionTimeout)
	if r := g.since.Add(g.t.cfg.RebalanceTimeout); g.preparing && r.Before(at) {
		at = r
	}
	return at, true
}

func (g *group) nextDeadline() (at time.Time, ok bool) {
	for _, m := range g.members {
		if t, has := g.deadline(m); has && (!ok || t.Before(at)) {
			at, ok = t, true
		}
	}
	return at, ok
}

// evict removes m, which learns of it when it next speaks.
func (g *group) evict(now time.Time, m *member) {
	g.t.b.record(now, Entry{Op: "evict", Name: g.t.name, Outcome: fmt.Sprintf("member %d of %s", m.id, g.name)})
	g.remove(now, m)
}

func (g *group) remove(now time.Time, m *member) {
	if m.gone {
		return
	}
	m.gone = true
	g.members = slices.DeleteFunc(g.members, func(o *member) bool { return o == m })
	g.rebalance(now)
	g.complete(now)
}

func (g *group) heartbeat(now time.Time, m *member, generation uint64) error {
	switch {
	case m.gone:
		return errUnknownMember
	case generation != g.generation:
		return errGeneration
	}
	m.lastSeen = now
	if g.preparing {
		return errRebalance
	}
	return nil
}

// commit stores offsets. As on Kafka it checks that the member and the generation
// are current, and not who owns the partition: that is the adapter's to keep. It
// counts as a heartbeat.
func (g *group) commit(now time.Time, m *member, generation uint64, offsets []offset) error {
	switch {
	case m.gone:
		return errUnknownMember
	case generation != g.generation:
		return errGeneration
	}
	m.lastSeen = now
	for _, o := range offsets {
		old := g.committed[o.part]
		g.audit(m, o, old)
		g.committed[o.part] = o.next
		g.t.b.record(now, Entry{Op: "commit", Name: g.t.name, Lane: brokers.Lane{Name: g.t.parts[o.part].lane, Epoch: generation},
			Outcome: fmt.Sprintf("%s %d -> %d", g.name, old, o.next)})
	}
	return nil
}

// audit notes a commit that goes back, or passes a message that is not finished.
func (g *group) audit(m *member, o offset, old int64) {
	p := g.t.parts[o.part]
	if old != none && o.next <= old && old <= p.end {
		g.t.b.violated("%s: group %q commits %d after %d", p.lane, g.name, o.next, old)
	}
	for _, l := range m.s.lanes {
		if l.p != p {
			continue
		}
		for off := range l.audit {
			if off < o.next {
				g.t.b.violated("%s: group %q commits %d, but %d is not finished", p.lane, g.name, o.next, off)
				return
			}
		}
	}
}

// offset is the next offset to read of a partition.
type offset struct {
	part int
	next int64
}
