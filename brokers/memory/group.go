package memory

import (
	"fmt"
	"slices"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
)

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
