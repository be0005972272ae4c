package memory

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/internal/prefix"
)

// topicSource is the adapter's side of a topic: a member of a group, which commits
// the contiguous prefix of what is done, in the generation it was received in.
type topicSource struct {
	base
	t *topic
	g *group
	m *member

	generation uint64
	lanes      []*partLane // of this generation; nil while joining
	first      int         // lane to look at first
	open       int         // handed over in this generation and unsettled
	fatal      error       // what Receive answers

	beat      time.Time // of the next heartbeat
	draining  bool
	drainEnd  time.Time
	keepAlive time.Time // of the next commit while draining
}

// partLane is one partition during one generation.
type partLane struct {
	p         *partition
	lane      brokers.Lane
	tracker   prefix.Tracker
	committed int64
	notBefore time.Time // DelayDelivery
	drain     chan struct{}
	ctx       context.Context
	cancel    context.CancelCauseFunc
	fenced    bool
	audit     map[int64]bool // with a seed: what is not done, noted apart from the tracker
}

// record is one delivery's place.
type record struct {
	s     *topicSource
	l     *partLane
	it    *item
	state leaseState
	done  bool // marked in the tracker; its commit is still owed
}

func (s *topicSource) capabilities() brokers.Capabilities {
	return brokers.Capabilities{
		GiveBack:          brokers.GiveBackNone,
		LaneOrdered:       true,
		PrefixSettle:      true,
		RedeliveryHorizon: s.t.cfg.Retention,
		Counting:          brokers.CountsNothing,
		StableCoordinates: true,
	}
}

func (s *topicSource) register(now time.Time) {
	s.t.subs = append(s.t.subs, s)
	s.g = s.t.group(s.opts.group)
	s.g.advance(now)
	s.g.join(now, s)
}

// assigned begins a generation. The coordinator calls it.
func (s *topicSource) assigned(now time.Time, generation uint64, parts []int) {
	s.generation, s.draining, s.open = generation, false, 0
	s.beat = now.Add(s.t.cfg.HeartbeatEvery)
	s.lanes, s.first = nil, 0
	var resolved []offset
	for _, n := range parts {
		p := s.t.parts[n]
		p.retain(now)
		l := &partLane{p: p, lane: brokers.Lane{Name: p.lane, Epoch: generation}, drain: make(chan struct{})}
		l.ctx, l.cancel = context.WithCancelCause(context.Background())
		at := s.g.committed[n]
		switch {
		case at == none:
			if at = p.start; s.opts.atEnd {
				at = p.end
			}
			resolved = append(resolved, offset{n, at})
		case at < p.start || at > p.end:
			s.gap(l, at, p.start)
			at = p.start
			resolved = append(resolved, offset{n, at})
		}
		l.committed = at
		l.tracker = prefix.New(at)
		s.lanes = append(s.lanes, l)
		s.t.b.record(now, Entry{Op: "assign", Name: s.t.name, Lane: l.lane, Outcome: fmt.Sprintf("%s from %d", s.g.name, at)})
		s.emit(brokers.Event{Kind: brokers.EventLaneAssigned, Lane: l.lane})
	}
	if len(resolved) > 0 { // at once, so that a later generation starts there too
		if err := s.g.commit(now, s.m, generation, resolved); err != nil {
			s.t.b.violated("%s: the first commit of generation %d was refused: %v", s.t.name, generation, err)
		}
	}
	s.awake()
	s.poke()
}

// gap reports messages that are gone.
func (s *topicSource) gap(l *partLane, from, to int64) {
	s.emit(brokers.Event{Kind: brokers.EventGap, Lane: l.lane, From: from, To: to})
	s.t.b.record(time.Now(), Entry{Op: "gap", Name: s.t.name, Lane: l.lane, Outcome: fmt.Sprintf("%d to %d", from, to)})
	if s.opts.gapFails && s.fatal == nil {
		s.fatal = brokers.NewFatal("read "+l.p.lane,
			fmt.Errorf("offsets %d to %d are not there any more", from, to), "decide where to go on and commit that offset")
	}
}

func (s *topicSource) take(now time.Time, max int) (ds []*brokers.Delivery, err error) {
	if s.fatal != nil {
		return nil, s.fatal
	}
	if s.draining || len(s.lanes) == 0 {
		return nil, nil
	}
	s.first = (s.first + 1) % len(s.lanes)
	// Everybody gets a share first; then the rest goes to who has more.
	for _, quota := range []int{(max + len(s.lanes) - 1) / len(s.lanes), max} {
		for i := range s.lanes {
			if len(ds) >= max || s.full() {
				break
			}
			l := s.lanes[(s.first+i)%len(s.lanes)]
			ds = s.takeLane(now, l, ds, min(quota, max-len(ds)))
		}
		if len(s.lanes) == 1 {
			break
		}
	}
	if s.fatal != nil && len(ds) == 0 {
		return nil, s.fatal
	}
	if len(ds) > 0 && s.t.b.chaos.Disconnect > 0 {
		for _, d := range ds {
			if s.t.b.chaos.disconnect(s.t.name, d.Handle.(*record).it) {
				s.disconnect(now, ErrInjected, 0)
				break
			}
		}
	}
	return ds, nil
}

// takeLane appends up to n deliveries of l.
func (s *topicSource) takeLane(now time.Time, l *partLane, ds []*brokers.Delivery, n int) []*brokers.Delivery {
	p, b := l.p, s.t.b
	if l.notBefore.After(now) || s.paused[p.lane] {
		return ds
	}
	p.retain(now)
	if pos := l.tracker.Pos(); pos < p.start || pos > p.end {
		s.gap(l, pos, p.start)
		if s.fatal != nil {
			return ds
		}
		s.skipTo(l, p.start)
	}
	i := p.find(l.tracker.Pos())
	n = min(n, len(p.recs)-i, s.opts.span-l.tracker.Span())
	if n <= 0 {
		if i == len(p.recs) {
			l.tracker.Skipped(p.end)
		}
		return ds
	}
	slab := make([]struct {
		d brokers.Delivery
		r record
	}, n)
	for k := range n {
		if s.full() && k > 0 {
			break
		}
		it := p.recs[i+k]
		wait, dup := time.Duration(0), false
		if len(b.faults) > 0 || b.chaos.on() {
			wait, dup = b.onDeliver(s.t.name, p.lane, it)
		}
		if wait > 0 {
			l.notBefore = now.Add(wait)
			break
		}
		d, r := &slab[k].d, &slab[k].r
		*r = record{s: s, l: l, it: it}
		s.hand(now, d, r)
		ds = append(ds, d)
		if dup {
			c := it.fresh()
			c.copied = true
			b.record(now, Entry{Op: "duplicate", Name: s.t.name, ID: it.m.ID, Lane: l.lane, Outcome: "ok"})
			p.append(now, c)
		}
	}
	if i+n == len(p.recs) && l.tracker.Pos() == p.recs[len(p.recs)-1].pos+1 {
		l.tracker.Skipped(p.end)
	}
	return ds
}

// skipTo goes on at off, which lies before the position only when the log lost its
// end.
func (s *topicSource) skipTo(l *partLane, off int64) {
	if off >= l.tracker.Pos() {
		l.tracker.Skipped(off)
		return
	}
	l.tracker = prefix.New(off)
	l.committed = none // what was committed lies beyond the end
}

func (s *topicSource) hand(now time.Time, d *brokers.Delivery, r *record) {
	l, it := r.l, r.it
	l.tracker.Delivered(it.pos)
	it.attempts++ // for Chaos alone: a log does not count
	s.open++
	s.hold(it)
	d.Lane = l.lane
	buf := make([]byte, 0, len(l.lane.Name)+21)
	buf = append(append(buf, l.lane.Name...), '@')
	d.Coordinates = string(strconv.AppendInt(buf, it.pos, 10))
	d.Context, d.Draining, d.Handle = l.ctx, l.drain, r
	it.deliver(d)
	if s.t.b.cfg.Seed != 0 {
		if l.audit == nil {
			l.audit = map[int64]bool{}
		}
		l.audit[it.pos] = true
		s.t.b.watch(d, func() bool { return r.state == leaseHeld && !l.fenced }, func() bool { return l.fenced })
		s.t.b.record(now, Entry{Op: "deliver", Name: s.t.name, ID: it.m.ID, Lane: l.lane, Outcome: strconv.FormatInt(it.pos, 10)})
	}
}

func (s *topicSource) wakeAt(now time.Time) (at time.Time, ok bool) {
	for _, l := range s.lanes {
		if l.notBefore.After(now) && (!ok || l.notBefore.Before(at)) {
			at, ok = l.notBefore, true
		}
	}
	return at, ok
}

func (s *topicSource) settle(now time.Time, ss []brokers.Settlement, errs []error) {
	var (
		fault settleFault
		owed  []*record
		at    []int
	)
	for i, st := range ss {
		r, ok := (*record)(nil), false
		if st.Delivery != nil {
			r, ok = st.Delivery.Handle.(*record)
		}
		switch {
		case !ok || r.s != s:
			errs[i] = s.lost(now, st.Delivery)
			continue
		case r.state == leaseSettled:
			errs[i] = brokers.ErrAlreadySettled
			continue
		case r.l.fenced:
			errs[i] = s.lost(now, st.Delivery)
			continue
		}
		switch st.Verb {
		case brokers.Done:
		case brokers.Release:
			if !s.draining {
				errs[i] = unsupported(st.Verb, "a log gives nothing back outside Draining and Close")
				continue
			}
			s.settled(r)
			s.t.b.record(now, Entry{Op: "release", Name: s.t.name, ID: r.it.m.ID, Lane: r.l.lane, Outcome: "ok"})
			continue
		case brokers.Retry, brokers.Reject:
			errs[i] = unsupported(st.Verb, "a log has no nack")
			continue
		default:
			errs[i] = unknownVerb(st.Verb)
			continue
		}
		if f := s.t.b.onSettle(s.t.name, r.l.lane, r.it, st.Verb); f.struck {
			fault = f
		}
		if !r.done {
			r.done = true
			r.l.tracker.Done(r.it.pos)
			delete(r.l.audit, r.it.pos)
		}
		owed, at = append(owed, r), append(at, i)
	}
	if len(owed) == 0 {
		return
	}
	err := s.commit(now, fault)
	for k, r := range owed {
		errs[at[k]] = err
		if err == nil {
			s.settled(r)
			if s.t.b.cfg.Seed != 0 {
				s.t.b.record(now, Entry{Op: "done", Name: s.t.name, ID: r.it.m.ID, Lane: r.l.lane, Outcome: "ok"})
			}
		}
	}
}

// settled ends a delivery on the Source's side.
func (s *topicSource) settled(r *record) {
	r.state = leaseSettled
	s.open--
	s.letGo(r.it)
	if s.draining && s.open == 0 {
		s.poke()
	}
}

// commit commits what moved, in one call.
func (s *topicSource) commit(now time.Time, f settleFault) error {
	moved := s.moved()
	if f.struck && !f.applied { // the request is lost; the next one carries its offsets
		return f.err
	}
	if len(moved) == 0 {
		return f.err
	}
	if err := s.g.commit(now, s.m, s.generation, moved); err != nil {
		s.refused(now, err)
		return brokers.ErrOwnershipLost
	}
	for _, l := range s.lanes {
		if safe := l.tracker.Safe(); safe > l.committed {
			l.committed = safe
		}
	}
	return f.err
}

func (s *topicSource) status(now time.Time) (st []brokers.LaneStatus) {
	for _, l := range s.lanes {
		p := l.p
		p.retain(now)
		safe := max(l.tracker.Safe(), p.start)
		ls := brokers.LaneStatus{Name: p.lane, Lag: max(0, p.end-safe), Oldest: -1}
		if i := p.find(safe); i < len(p.recs) {
			ls.Oldest = now.Sub(p.recs[i].sent)
		}
		st = append(st, ls)
	}
	return st
}
