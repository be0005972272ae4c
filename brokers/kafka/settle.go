package kafka

import (
	"context"
	"errors"
	"maps"
	"slices"

	"github.com/twiceproof/twiceproof/brokers"
)

// Settle implements [brokers.Source]. Done commits the offsets that are contiguous by
// it, and is nil also where an earlier message still holds the offset back.
func (s *Source) Settle(ctx context.Context, ss ...brokers.Settlement) []error {
	errs := make([]error, len(ss))
	owed := map[*generation][]int{}
	lost := map[brokers.Lane]int{}
	s.mu.Lock()
	closed := s.state == sourceClosed
	for i, st := range ss {
		r, err := s.settleable(st)
		if err == nil {
			switch {
			case st.Verb == brokers.Release:
				s.settled(r)
			case r.state == handed:
				r.state = marked
				r.l.tracker.Done(r.off)
				fallthrough
			default:
				owed[r.l.g] = append(owed[r.l.g], i)
			}
		}
		if errors.Is(err, brokers.ErrOwnershipLost) {
			if lost[st.Delivery.Lane]++; closed {
				err = brokers.ErrClosed
			}
		}
		errs[i] = err
	}
	s.mu.Unlock()
	for g, is := range owed {
		err := g.commit(ctx, false)
		if errors.Is(err, brokers.ErrOwnershipLost) {
			lost[ss[is[0]].Delivery.Lane] += len(is)
		}
		s.mu.Lock()
		for _, i := range is {
			errs[i] = err
			if err == nil {
				s.settled(ss[i].Delivery.Handle.(*record))
			}
		}
		s.mu.Unlock()
	}
	for _, l := range slices.SortedFunc(maps.Keys(lost), func(a, b brokers.Lane) int { return int(a.Epoch) - int(b.Epoch) }) {
		s.emit(brokers.Event{Kind: brokers.EventSettleLost, Lane: l, Count: lost[l]})
	}
	return errs
}

// settleable returns the record of a settlement that may go on. The caller holds the
// lock.
func (s *Source) settleable(st brokers.Settlement) (*record, error) {
	if st.Delivery == nil {
		return nil, brokers.NewFatal("settle", errors.New("a Settlement without a Delivery"), "settle what Receive returned")
	}
	r, ok := st.Delivery.Handle.(*record)
	if !ok || r.l.g.s != s {
		return nil, brokers.NewFatal("settle", errors.New("a delivery of another Source"), "settle what Receive of this Source returned")
	}
	switch {
	case r.state == settled:
		return nil, brokers.ErrAlreadySettled
	case r.l.g.phase == fenced:
		return nil, brokers.ErrOwnershipLost
	}
	switch st.Verb {
	case brokers.Done:
		return r, nil
	case brokers.Release:
		if r.state == marked {
			return nil, brokers.ErrAlreadySettled
		}
		if r.l.g.phase == active {
			return nil, &brokers.Error{Class: brokers.Permanent, Op: "release", Err: brokers.ErrUnsupported, Hint: "Kafka takes nothing back outside Draining and Close"}
		}
		return r, nil
	}
	return nil, &brokers.Error{Class: brokers.Permanent, Op: st.Verb.String(), Err: brokers.ErrUnsupported, Hint: "Kafka takes nothing back: hold the message and settle it as Done"}
}

// settled ends a delivery. The caller holds the lock.
func (s *Source) settled(r *record) {
	if r.state == settled {
		return
	}
	r.state = settled
	if g := r.l.g; g.phase != fenced {
		g.open--
		g.changed()
		s.signal()
	}
}
