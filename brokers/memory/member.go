package memory

import (
	"slices"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
)

// refused deals with a coordinator that does not know this member, or not in this
// generation: somebody else may have the partitions.
func (s *topicSource) refused(now time.Time, cause error) {
	s.fence(now, brokers.ErrOwnershipLost)
	s.down(now, cause, 0)
	s.g.join(now, s)
}

// fence ends the generation: nothing of it can be settled any more.
func (s *topicSource) fence(now time.Time, cause error) {
	for _, l := range s.lanes {
		l.fenced = true
		if !s.draining {
			close(l.drain)
		}
		l.cancel(cause)
		s.t.b.record(now, Entry{Op: "revoke", Name: s.t.name, Lane: l.lane, Outcome: cause.Error()})
		s.emit(brokers.Event{Kind: brokers.EventLaneRevoked, Lane: l.lane})
	}
	s.lanes, s.draining = nil, false
	s.open, s.held, s.heldBytes = 0, 0, 0
	s.awake()
}

func (s *topicSource) next() (at time.Time, ok bool) {
	earlier := func(t time.Time) {
		if !ok || t.Before(at) {
			at, ok = t, true
		}
	}
	if t, has := s.g.nextDeadline(); has {
		earlier(t)
	}
	switch {
	case s.m.joined: // waits for the others
	case s.draining && s.open == 0:
		earlier(s.b.start)
	case s.draining:
		earlier(s.drainEnd)
		earlier(s.keepAlive)
	default:
		earlier(s.beat)
	}
	return at, ok
}

func (s *topicSource) work(now time.Time) {
	s.g.advance(now)
	if s.m.joined {
		return
	}
	if s.draining {
		s.workDraining(now)
		return
	}
	if s.beat.After(now) {
		return
	}
	if len(s.b.faults) > 0 {
		if _, struck := s.b.strike(faultFailExtend, s.t.name, "", ""); struck {
			s.b.record(now, Entry{Op: "heartbeat", Name: s.t.name, Outcome: "failed"})
			s.beat = now.Add(min(time.Second, s.t.cfg.HeartbeatEvery))
			return
		}
	}
	s.beat = now.Add(s.t.cfg.HeartbeatEvery)
	switch err := s.g.heartbeat(now, s.m, s.generation); err {
	case nil:
		_ = s.commit(now, settleFault{}) // holes commit themselves
	case errRebalance:
		s.startDrain(now)
	default:
		s.refused(now, err)
	}
}

// startDrain hands out nothing more and lets what has started settle. From here to
// its end only commits keep the membership alive.
func (s *topicSource) startDrain(now time.Time) {
	s.draining = true
	s.drainEnd = now.Add(s.opts.drain)
	s.keepAlive = now.Add(s.t.cfg.SessionTimeout / 4)
	for _, l := range s.lanes {
		close(l.drain)
		s.b.record(now, Entry{Op: "drain", Name: s.t.name, Lane: l.lane, Outcome: "ok"})
	}
	if s.open == 0 {
		s.workDraining(now)
	}
}

func (s *topicSource) workDraining(now time.Time) {
	if s.open > 0 && s.drainEnd.After(now) {
		if !s.keepAlive.After(now) {
			s.keepAlive = now.Add(s.t.cfg.SessionTimeout / 4)
			if err := s.g.commit(now, s.m, s.generation, nil); err != nil {
				s.refused(now, err)
				return
			}
			_ = s.commit(now, settleFault{})
		}
		return
	}
	if err := s.commit(now, settleFault{}); err != nil {
		return // refused: it has joined again already
	}
	s.fence(now, brokers.ErrOwnershipLost)
	s.g.join(now, s)
}

func (s *topicSource) leave(now time.Time) {
	s.g.advance(now)
	if len(s.lanes) > 0 && !s.m.gone {
		_ = s.g.commit(now, s.m, s.generation, s.moved())
	}
	s.fence(now, brokers.ErrClosed)
	s.t.subs = slices.DeleteFunc(s.t.subs, func(o *topicSource) bool { return o == s })
	s.g.remove(now, s.m)
}

// moved returns the offsets that are owed to the coordinator.
func (s *topicSource) moved() (os []offset) {
	for _, l := range s.lanes {
		if safe := l.tracker.Safe(); safe > l.committed {
			os = append(os, offset{l.p.n, safe})
		}
	}
	return os
}

// disconnect loses the coordinator: the generation ends at once, and the member
// joins again as a new one.
func (s *topicSource) disconnect(now time.Time, cause error, d time.Duration) {
	s.fence(now, brokers.ErrOwnershipLost)
	s.down(now, cause, d)
	s.g.remove(now, s.m)
	s.g.join(now, s)
}
