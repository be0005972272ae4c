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
		s.disconnect(now, cause, 0)
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
