package memory

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
)

// channelSource is the adapter's side: one session at a time, whose deliveries end
// with it.
type channelSource struct {
	base
	c       *channel
	epoch   uint64 // of the session
	ctx     context.Context
	cancel  context.CancelCauseFunc
	tags    []*tag // of this session, in order; settled ones are dropped lazily
	lastTag uint64
	unacked int // messages that the broker holds for this session
}

// tag is one delivery of a session.
type tag struct {
	s        *channelSource
	it       *item
	lane     brokers.Lane
	n        uint64
	received time.Time
	state    leaseState
	applied  bool // the broker has a settlement whose answer was an error
	ghost    bool // the Source believes it settled, the broker does not know
	ctx      context.CancelCauseFunc
}

func (s *channelSource) capabilities() brokers.Capabilities {
	c := brokers.Capabilities{
		GiveBack:          brokers.GiveBackMessage,
		Reject:            s.c.cfg.DeadLetter != "",
		MaxRetryDelay:     1,
		MaxHold:           s.c.cfg.ConsumerTimeout,
		RedeliveryHorizon: brokers.Unlimited,
		Counting:          brokers.CountsRedelivered,
	}
	if s.c.cfg.Quorum {
		c.Counting = brokers.CountsDeliveries
	}
	if s.c.cfg.SingleActive {
		c.LaneOrdered, c.GiveBack = true, brokers.GiveBackLane
	}
	return c
}

func (s *channelSource) register(time.Time) {
	s.c.subs = append(s.c.subs, s)
	s.session()
}

// session begins a new session.
func (s *channelSource) session() {
	s.c.epochs++
	s.epoch, s.lastTag = s.c.epochs, 0
	s.ctx, s.cancel = context.WithCancelCause(context.Background())
}

func (s *channelSource) prefetch() int {
	if p := s.c.cfg.Prefetch; p > 0 {
		return min(p, s.room)
	}
	return s.room
}

func (s *channelSource) take(now time.Time, max int) (ds []*brokers.Delivery, err error) {
	c := s.c
	c.advance(now)
	if c.cfg.SingleActive && c.subs[0] != s || s.paused[c.name] {
		return nil, nil
	}
	lane := brokers.Lane{Name: c.name, Epoch: s.epoch}
	for len(ds) < max && s.unacked < s.prefetch() && !s.full() {
		it, dup := c.takeReady(now)
		if it == nil {
			break
		}
		ds = append(ds, s.hand(now, it, lane))
		if dup {
			o := it.fresh()
			o.copied = true
			c.b.record(now, Entry{Op: "duplicate", Name: c.name, ID: it.m.ID, Outcome: "ok"})
			c.append(now, o)
		}
	}
	if len(ds) > 0 && c.b.chaos.Disconnect > 0 {
		for _, d := range ds {
			if c.b.chaos.disconnect(c.name, d.Handle.(*tag).it) {
				s.disconnect(now, ErrInjected, 0)
				break
			}
		}
	}
	return ds, nil
}

func (s *channelSource) hand(now time.Time, it *item, lane brokers.Lane) *brokers.Delivery {
	c := s.c
	if c.cfg.SingleActive && c.b.cfg.Seed != 0 && !it.taken && !it.copied && it.m.Key != "" {
		if last, ok := c.first[it.m.Key]; ok && it.coord <= last {
			c.b.violated("%s: message %q of key %q is handed over after a later one", c.name, it.m.ID, it.m.Key)
		}
		c.first[it.m.Key] = it.coord
	}
	it.taken = true
	t := &tag{s: s, it: it, lane: lane, n: s.nextTag(), received: now}
	ctx := s.ctx
	if c.cfg.SingleActive { // a Release takes single deliveries away from their session
		ctx, t.ctx = context.WithCancelCause(s.ctx)
	}
	s.tags = append(s.tags, t)
	s.unacked++
	s.hold(it)
	if s.unacked == 1 {
		s.poke()
	}
	d := &brokers.Delivery{
		Lane:        lane,
		Attempt:     1,
		Coordinates: c.name + "@" + strconv.FormatUint(lane.Epoch, 10) + "." + strconv.FormatUint(t.n, 10),
		Context:     ctx,
		Handle:      t,
	}
	switch {
	case c.cfg.Quorum && it.attempts > 0:
		d.Attempt = it.attempts + 1
	case it.again:
		d.Attempt = 2
	}
	it.deliver(d)
	if c.b.cfg.Seed != 0 {
		c.b.watch(d, func() bool { return t.state == leaseHeld }, func() bool { return t.state == leaseLost })
	}
	c.b.record(now, Entry{Op: "deliver", Name: c.name, ID: it.m.ID, Lane: lane, Attempt: d.Attempt, Outcome: "ok"})
	return d
}

// nextTag numbers the deliveries of a session from 1, and drops settled ones when
// they are the greater part.
func (s *channelSource) nextTag() uint64 {
	if len(s.tags) > 64+2*s.held {
		s.tags = slices.DeleteFunc(s.tags, func(t *tag) bool { return !t.live() })
	}
	s.lastTag++
	return s.lastTag
}

// live reports whether the Source or the broker still has to do with it.
func (t *tag) live() bool { return t.state == leaseHeld || t.ghost }

// open reports whether the broker still holds the message for the session.
func (t *tag) open() bool { return t.state == leaseHeld && !t.applied || t.ghost }

func (s *channelSource) wakeAt(now time.Time) (time.Time, bool) {
	at, ok := s.c.delayed.next()
	if t := s.c.stalled; t.After(now) && (!ok || t.Before(at)) {
		return t, true
	}
	return at, ok
}

func (s *channelSource) settle(now time.Time, ss []brokers.Settlement, errs []error) {
	var back map[*tag]bool
	for i, st := range ss {
		t, ok := (*tag)(nil), false
		if st.Delivery != nil {
			t, ok = st.Delivery.Handle.(*tag)
		}
		switch {
		case !ok || t.s != s:
			errs[i] = s.lost(now, st.Delivery)
		case t.state == leaseSettled:
			errs[i] = brokers.ErrAlreadySettled
		case t.state == leaseLost && back[t] && st.Verb == brokers.Release:
			t.state = leaseSettled
		case t.state == leaseLost:
			errs[i] = s.lost(now, st.Delivery)
		default:
			var lane []*tag
			lane, errs[i] = s.settleOne(now, t, st)
			for _, o := range lane {
				if back == nil {
					back = map[*tag]bool{}
				}
				back[o] = true
			}
		}
	}
}

func (s *channelSource) settleOne(now time.Time, t *tag, st brokers.Settlement) (lane []*tag, err error) {
	c := s.c
	switch st.Verb {
	case brokers.Done, brokers.Release:
	case brokers.Retry:
		if st.After > 1 {
			return nil, unsupported(st.Verb, "a channel can retry at once only")
		}
	case brokers.Reject:
		if c.cfg.DeadLetter == "" {
			return nil, unsupported(st.Verb, "no DeadLetter is configured: the message would be gone")
		}
	default:
		return nil, unknownVerb(st.Verb)
	}
	if t.applied {
		s.finish(t, leaseSettled)
		return nil, nil
	}
	if t.lane.Epoch != s.epoch {
		c.b.violated("%s: a settlement of session %d reached session %d", c.name, t.lane.Epoch, s.epoch)
	}
	f := c.b.onSettle(c.name, t.lane, t.it, st.Verb)
	e := Entry{Op: st.Verb.String(), Name: c.name, ID: t.it.m.ID, Lane: t.lane, Attempt: t.it.attempts, Outcome: "ok"}
	if f.struck && !f.applied {
		e.Outcome = "never arrived"
		c.b.record(now, e)
		if f.err == nil { // the broker holds it until the session ends
			t.ghost = true
			s.finish(t, leaseSettled)
		}
		return nil, f.err
	}
	if f.struck {
		e.Outcome = "answer lost"
	}
	c.b.record(now, e)
	if st.Verb == brokers.Retry || st.Verb == brokers.Release {
		lane = s.returnLater(now, t)
	}
	s.unacked--
	if f.err != nil {
		t.applied = true
	} else {
		s.finish(t, leaseSettled)
	}
	switch st.Verb {
	case brokers.Done:
		c.n.done++
	case brokers.Reject:
		c.retire(now, t.it)
	case brokers.Retry:
		c.requeue(now, t.it, true)
	case brokers.Release:
		c.requeue(now, t.it, c.cfg.NackCounts)
	}
	return lane, f.err
}

// finish ends the delivery on the Source's side.
func (s *channelSource) finish(t *tag, state leaseState) {
	t.state = state
	s.letGo(t.it)
}

// returnLater gives back what came after t: on an ordered lane nothing may stay in
// hand behind a message that comes again.
func (s *channelSource) returnLater(now time.Time, t *tag) (lane []*tag) {
	if t.ctx == nil {
		return nil
	}
	t.ctx(brokers.ErrOwnershipLost)
	for _, o := range s.tags {
		if o.n <= t.n || o.state != leaseHeld || o.applied {
			continue
		}
		lane = append(lane, o)
		s.unacked--
		s.finish(o, leaseLost)
		o.ctx(brokers.ErrOwnershipLost)
		s.c.b.record(now, Entry{Op: "release", Name: s.c.name, ID: o.it.m.ID, Lane: o.lane, Attempt: o.it.attempts, Outcome: "with its lane"})
		s.c.requeue(now, o.it, s.c.cfg.NackCounts)
	}
	return lane
}

// oldest returns the oldest message that the broker waits for.
func (s *channelSource) oldest() *tag {
	for len(s.tags) > 0 && !s.tags[0].live() {
		s.tags = s.tags[1:]
	}
	for _, t := range s.tags {
		if t.open() {
			return t
		}
	}
	return nil
}

func (s *channelSource) next() (at time.Time, ok bool) {
	t := s.oldest()
	if t == nil {
		return at, false
	}
	return t.received.Add(s.c.cfg.ConsumerTimeout), true
}

var errConsumerTimeout = errors.New("delivery acknowledgement timed out")

// work ends a session whose oldest message is in hand for too long.
func (s *channelSource) work(now time.Time) {
	if at, ok := s.next(); ok && !at.After(now) {
		s.disconnect(now, errConsumerTimeout, 0)
	}
}

// disconnect ends the session: what it holds goes back, and a new one begins.
func (s *channelSource) disconnect(now time.Time, cause error, d time.Duration) {
	s.endSession(now, brokers.ErrOwnershipLost)
	if i := slices.Index(s.c.subs, s); s.c.cfg.SingleActive && i >= 0 {
		s.c.subs = append(slices.Delete(s.c.subs, i, i+1), s) // the next one becomes active
	}
	s.session()
	s.down(now, cause, d)
	s.c.awake()
}

func (s *channelSource) endSession(now time.Time, cause error) {
	s.cancel(cause)
	for _, t := range s.tags {
		back := t.open()
		t.ghost = false
		if t.state == leaseHeld {
			s.finish(t, leaseLost)
		}
		if back {
			s.unacked--
			s.c.requeue(now, t.it, true)
		}
	}
	s.tags = nil
}

func (s *channelSource) leave(now time.Time) {
	s.endSession(now, brokers.ErrClosed)
	s.c.subs = slices.DeleteFunc(s.c.subs, func(o *channelSource) bool { return o == s })
	s.c.awake()
}

func (s *channelSource) status(now time.Time) []brokers.LaneStatus {
	return []brokers.LaneStatus{lagOf(now, s.c.name, s.c.all())}
}
