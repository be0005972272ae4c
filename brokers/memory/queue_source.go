package memory

import (
	"context"
	"slices"
	"strconv"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
)

// queueSource is the adapter's side of a queue: it keeps leases alive and never
// sends a settlement for one that it knows to be lost.
type queueSource struct {
	base
	q     *queue
	epoch uint64
	beats schedule[*lease] // leases by their next extension
}

// lease is one received message in hand, from Receive to Settle.
type lease struct {
	s        *queueSource
	it       *item
	handle   uint64
	lane     brokers.Lane
	received time.Time
	beat     time.Time // of the next extension
	beatAt   int
	state    leaseState
	applied  bool // a settlement reached the broker, but its answer was an error
	cancel   context.CancelCauseFunc
}

type leaseState uint8

const (
	leaseHeld leaseState = iota
	leaseSettled
	leaseLost
)

// end lets go of the lease. cause, if any, ends the delivery's context.
func (l *lease) end(state leaseState, cause error) {
	if l.state != leaseHeld {
		return
	}
	l.state = state
	l.s.beats.remove(l.beatAt)
	l.s.letGo(l.it)
	if cause != nil {
		l.cancel(cause)
	}
}

func (s *queueSource) capabilities() brokers.Capabilities {
	c := brokers.Capabilities{
		GiveBack:          brokers.GiveBackMessage,
		MaxRetryDelay:     12 * time.Hour,
		MaxHold:           s.q.cfg.MaxHold,
		RedeliveryHorizon: s.q.cfg.Retention,
		Counting:          brokers.CountsDeliveries,
		StableCoordinates: true,
	}
	if s.q.cfg.FIFO {
		c.GiveBack, c.LaneOrdered = brokers.GiveBackLane, true
	}
	return c
}

func (s *queueSource) register(time.Time) {
	s.epoch++
	s.q.subs = append(s.q.subs, s)
}

func (s *queueSource) take(now time.Time, max int) (ds []*brokers.Delivery, err error) {
	q := s.q
	q.advance(now)
	max = min(max, q.cfg.BatchMax)
	q.batches++
	for len(ds) < max && !s.full() {
		if !q.cfg.FIFO {
			if s.paused[q.name] {
				break
			}
			it, dup := q.takeReady(now)
			if it == nil {
				break
			}
			ds = append(ds, s.hand(now, it, brokers.Lane{Name: q.name, Epoch: s.epoch}))
			if dup {
				q.copyOf(now, it)
			}
			continue
		}
		its, dups := q.takeGroup(now, max-len(ds), s.paused)
		if len(its) == 0 {
			break
		}
		for i, it := range its {
			ds = append(ds, s.hand(now, it, brokers.Lane{Name: it.group.lane, Epoch: q.batches}))
			if dups[i] {
				q.copyOf(now, it)
			}
		}
	}
	if len(ds) > 0 && q.b.chaos.Disconnect > 0 {
		s.maybeBlink(now, ds)
	}
	return ds, nil
}

// hand makes a delivery of it, with a new handle.
func (s *queueSource) hand(now time.Time, it *item, lane brokers.Lane) *brokers.Delivery {
	q := s.q
	if l := it.lease; l != nil && l.state == leaseHeld {
		q.b.violated("%s: message %q is handed over while another delivery of it is live", q.name, it.m.ID)
	}
	if q.cfg.FIFO {
		q.audit(it)
	}
	q.handles++
	it.attempts++
	it.flight = true
	if it.group != nil {
		it.group.inHand++
	}
	q.hide(it, now.Add(q.cfg.Visibility))
	ctx, cancel := context.WithCancelCause(context.Background())
	l := &lease{
		s: s, it: it, handle: q.handles, lane: lane, received: now,
		beat: now.Add(q.cfg.Visibility / 3), cancel: cancel,
	}
	it.lease = l
	s.hold(it)
	s.beats.push(l)
	s.poke()
	d := &brokers.Delivery{
		Lane:        lane,
		Attempt:     it.attempts,
		Coordinates: q.name + "@" + strconv.FormatInt(it.coord, 10),
		Context:     ctx,
		Handle:      l,
	}
	it.deliver(d)
	if q.b.cfg.Seed != 0 {
		q.b.watch(d, func() bool { return l.state == leaseHeld }, func() bool { return l.state == leaseLost })
	}
	q.b.record(now, Entry{Op: "deliver", Name: q.name, ID: it.m.ID, Lane: lane, Attempt: it.attempts, Outcome: "ok"})
	return d
}

// audit checks the order of first hand-overs of a key.
func (q *queue) audit(it *item) {
	if q.b.cfg.Seed == 0 || it.attempts > 0 || it.copied || it.m.Key == "" {
		return
	}
	if last, ok := q.first[it.m.Key]; ok && it.coord <= last {
		q.b.violated("%s: message %q of key %q is handed over after a later one", q.name, it.m.ID, it.m.Key)
	}
	q.first[it.m.Key] = it.coord
}

func (s *queueSource) wakeAt(time.Time) (time.Time, bool) { return s.q.hidden.next() }

func (s *queueSource) settle(now time.Time, ss []brokers.Settlement, errs []error) {
	s.q.advance(now)
	var back map[*lease]bool // given back with their lane by an earlier settlement of this call
	for i, st := range ss {
		l, ok := (*lease)(nil), false
		if st.Delivery != nil {
			l, ok = st.Delivery.Handle.(*lease)
		}
		switch {
		case !ok || l.s != s:
			errs[i] = s.lost(now, st.Delivery)
		case l.state == leaseSettled:
			errs[i] = brokers.ErrAlreadySettled
		case l.state == leaseLost && back[l] && st.Verb == brokers.Release:
			l.state = leaseSettled
		case l.state == leaseLost:
			errs[i] = s.lost(now, st.Delivery)
		default:
			var lane []*lease
			lane, errs[i] = s.settleOne(now, l, st)
			for _, o := range lane {
				if back == nil {
					back = map[*lease]bool{}
				}
				back[o] = true
			}
		}
	}
}

// settleOne settles a held lease and returns those that went back with it.
func (s *queueSource) settleOne(now time.Time, l *lease, st brokers.Settlement) (lane []*lease, err error) {
	q, it := s.q, l.it
	switch st.Verb {
	case brokers.Done, brokers.Release:
	case brokers.Retry:
		if st.After > 12*time.Hour {
			return nil, unsupported(st.Verb, "the longest delay is 12 h")
		}
	case brokers.Reject:
		return nil, unsupported(st.Verb, "a queue moves messages to its dead letters by MaxReceives only")
	default:
		return nil, unknownVerb(st.Verb)
	}
	if l.applied { // the broker has it already; a repeated delete answers success
		l.end(leaseSettled, nil)
		return nil, nil
	}
	f := q.b.onSettle(q.name, l.lane, it, st.Verb)
	e := Entry{Op: st.Verb.String(), Name: q.name, ID: it.m.ID, Lane: l.lane, Attempt: it.attempts, Outcome: "ok"}
	if f.struck && !f.applied {
		e.Outcome = "never arrived"
		q.b.record(now, e)
		if f.err == nil {
			it.lease = nil // nobody extends it: it comes again when its time is up
			l.end(leaseSettled, nil)
		}
		return nil, f.err
	}
	if f.struck {
		e.Outcome = "answer lost"
	}
	q.b.record(now, e)
	switch st.Verb {
	case brokers.Done:
		q.n.done++
		q.remove(it)
		if f.err != nil {
			l.applied = true
			return nil, f.err
		}
		l.end(leaseSettled, nil)
	default:
		lane = s.returnLane(now, l)
		after := time.Duration(0)
		if st.Verb == brokers.Retry {
			after = min(max(st.After, 0), l.received.Add(q.cfg.MaxHold).Sub(now))
		}
		l.end(leaseSettled, brokers.ErrOwnershipLost)
		q.giveBack(now, it, after)
		if f.err != nil {
			l.state = leaseLost
		}
	}
	return lane, f.err
}

// returnLane gives back the later messages of l's group that are in hand.
func (s *queueSource) returnLane(now time.Time, l *lease) (lane []*lease) {
	g := l.it.group
	if g == nil {
		return nil
	}
	for i := range g.line.len() {
		it := g.line.at(i)
		if it.pos > l.it.pos && it.lease != nil {
			lane = append(lane, it.lease)
		}
	}
	for _, o := range lane {
		s.q.b.record(now, Entry{Op: "release", Name: s.q.name, ID: o.it.m.ID, Lane: o.lane, Attempt: o.it.attempts, Outcome: "with its lane"})
		o.end(leaseLost, brokers.ErrOwnershipLost)
		s.q.giveBack(now, o.it, 0)
	}
	return lane
}

func (s *queueSource) next() (at time.Time, ok bool) {
	at, ok = s.beats.next()
	if t, has := s.q.hidden.next(); has && (!ok || t.Before(at)) && len(s.beats.a) > 0 {
		at = t // an extension failed: the lease ends at its time, not at the next look
	}
	return at, ok
}

// work extends leases that are due, and those due soon, in one call.
func (s *queueSource) work(now time.Time) {
	q := s.q
	q.advance(now)
	soon := now.Add(q.cfg.Visibility / 12)
	at, ok := s.beats.next()
	if !ok || at.After(now) {
		return
	}
	for _, l := range s.inHand() {
		if !l.beat.After(soon) {
			s.extend(now, l)
		}
	}
}

func (s *queueSource) extend(now time.Time, l *lease) {
	q, it := s.q, l.it
	e := Entry{Op: "extend", Name: q.name, ID: it.m.ID, Lane: l.lane, Attempt: it.attempts, Outcome: "ok"}
	if l.applied { // deleted by a settlement whose answer was an error
		e.Outcome = "gone"
		q.b.record(now, e)
		l.end(leaseLost, brokers.ErrOwnershipLost)
		return
	}
	if len(q.b.faults) > 0 {
		if _, struck := q.b.strike(faultFailExtend, q.name, l.lane.Name, it.m.ID); struck {
			e.Outcome = "failed"
			q.b.record(now, e)
			l.beat = now.Add(time.Second)
			s.beats.fix(l.beatAt - 1)
			return
		}
	}
	until := now.Add(q.cfg.Visibility)
	last := l.received.Add(q.cfg.MaxHold)
	if until.After(last) {
		until, e.Outcome = last, "for the last time"
		l.beat = last.Add(time.Second)
	} else {
		l.beat = now.Add(q.cfg.Visibility / 3)
	}
	q.b.record(now, e)
	q.hide(it, until)
	s.beats.fix(l.beatAt - 1)
}

// leave gives back what is unsettled: the last first, so that groups stay in order.
func (s *queueSource) leave(now time.Time) {
	held := s.inHand()
	slices.Reverse(held)
	for _, l := range held {
		l.end(leaseLost, brokers.ErrClosed)
		if !l.applied {
			s.q.giveBack(now, l.it, 0)
		}
	}
	s.q.subs = slices.DeleteFunc(s.q.subs, func(o *queueSource) bool { return o == s })
}

// inHand returns the held leases in the order of their hand-over.
func (s *queueSource) inHand() []*lease {
	held := slices.Clone(s.beats.a)
	slices.SortFunc(held, func(a, b *lease) int { return int(int64(a.handle) - int64(b.handle)) })
	return held
}

// blink loses everything in hand, as if the consumer had been unreachable until its
// leases ran out.
func (s *queueSource) blink(now time.Time, cause error, d time.Duration) {
	s.epoch++
	for _, l := range s.inHand() {
		if l.applied {
			l.end(leaseLost, brokers.ErrOwnershipLost)
			continue
		}
		s.q.expire(now, l.it)
	}
	s.down(now, cause, d)
}

func (s *queueSource) disconnect(now time.Time, cause error, d time.Duration) {
	s.blink(now, cause, d)
}

func (s *queueSource) maybeBlink(now time.Time, ds []*brokers.Delivery) {
	for _, d := range ds {
		if it := d.Handle.(*lease).it; s.q.b.chaos.disconnect(s.q.name, it) {
			s.blink(now, ErrInjected, 0)
			return
		}
	}
}

func (s *queueSource) status(now time.Time) []brokers.LaneStatus {
	return []brokers.LaneStatus{lagOf(now, s.q.name, s.q.all())}
}
