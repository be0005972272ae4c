package sqs

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/sqs"
	"github.com/aws/aws-sdk-go-v2/service/sqs/types"

	"github.com/twiceproof/twiceproof/brokers"
)

// lease is one received message in hand, from the receive to the settlement. All
// fields below the first block are guarded by the Source's lock.
type lease struct {
	s        *Source
	d        *brokers.Delivery
	handle   string
	group    string // FIFO
	serial   uint64 // in the order of receiving
	size     int64
	received time.Time
	cancel   context.CancelCauseFunc

	state    leaseState
	until    time.Time     // ownership ends; before the visibility does
	beat     time.Time     // of the next extension; zero: no more of them
	settling bool          // a settlement is on its way: it decides
	extended chan struct{} // closed when the extension on its way is answered
}

type leaseState uint8

const (
	leaseHeld leaseState = iota
	leaseSettled
	leaseLost
	leaseGivenBack // with an earlier message of its group
)

// inHand returns what is held in the order of receiving. The caller holds the lock.
func (s *Source) inHand() []*lease {
	return slices.SortedFunc(maps.Keys(s.leases), func(a, b *lease) int { return cmp.Compare(a.serial, b.serial) })
}

// forget lets go of a lease: its room is free. The caller holds the lock.
func (s *Source) forget(l *lease, state leaseState) {
	if l.state != leaseHeld {
		return
	}
	l.state = state
	delete(s.leases, l)
	s.bytes -= l.size
	s.credit++
	s.changed()
	if i := slices.Index(s.buf, l); i >= 0 {
		s.buf = slices.Delete(s.buf, i, i+1)
	}
	if l.group == "" {
		return
	}
	g := s.groups[l.group]
	if i := slices.Index(g, l); i >= 0 {
		g = slices.Delete(g, i, i+1)
	}
	if len(g) == 0 {
		delete(s.groups, l.group)
	} else {
		s.groups[l.group] = g
	}
}

// later returns the messages of l's group in hand that come after it. The caller holds
// the lock.
func (s *Source) later(l *lease) []*lease {
	g := s.groups[l.group]
	if l.group == "" {
		return nil
	}
	i := slices.IndexFunc(g, func(o *lease) bool { return o.serial > l.serial })
	if i < 0 {
		return nil
	}
	return slices.Clone(g[i:])
}

// lose ends a delivery that may be somebody else's, and with it the later ones of its
// group: the next one must not run in its place. It returns those, which are still
// hidden by us. The caller holds the lock.
func (s *Source) lose(l *lease) (behind []*lease) {
	if l.state != leaseHeld {
		return nil
	}
	for _, o := range slices.Backward(s.later(l)) {
		if o.settling { // its work is done, and its settlement on its way
			continue
		}
		behind = append(behind, o)
		s.forget(o, leaseLost)
		o.cancel(brokers.ErrOwnershipLost)
	}
	s.forget(l, leaseLost)
	s.epoch++
	l.cancel(brokers.ErrOwnershipLost)
	return behind
}

// beat keeps the visibility of all that is in hand, until the Source is closed.
func (s *Source) beat() {
	t := time.NewTimer(0)
	defer t.Stop()
	for {
		select {
		case <-t.C:
		case <-s.runCtx.Done():
			return
		}
		t.Reset(s.tend(time.Now()))
	}
}

// tend ends what is over, extends what is due, and returns when to look again.
func (s *Source) tend(now time.Time) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	soon := now.Add(s.cfg.Visibility / 12)
	next := soon // what is received meanwhile is due later than that
	var due, behind []*lease
	urgent := false
	for _, l := range s.inHand() {
		if l.state != leaseHeld { // lost with an earlier one of this very round
			continue
		}
		if !l.until.After(now) {
			behind = append(behind, s.over(l, now)...)
			continue
		}
		next = earlier(next, l.until)
		if l.settling || l.extended != nil || l.beat.IsZero() || l.beat.After(soon) {
			continue
		}
		due = append(due, l)
		if l.beat.After(now) {
			next = earlier(next, l.beat)
		} else {
			urgent = true
		}
	}
	if !urgent { // what is due soon goes along with what is due
		due = nil
	}
	for chunk := range slices.Chunk(due, maxBatch) {
		answered := make(chan struct{})
		for _, l := range chunk {
			l.extended = answered
		}
		s.works.Go(func() { s.extend(chunk, answered) })
	}
	if len(behind) > 0 {
		s.works.Go(func() { s.hide(s.runCtx, behind, 0) })
	}
	return max(next.Sub(now), time.Millisecond)
}

// over ends a lease whose time is up.
func (s *Source) over(l *lease, now time.Time) []*lease {
	behind := s.lose(l)
	e := brokers.Event{Kind: brokers.EventLaneRevoked, Lane: l.d.Lane, Err: errExpired}
	if now.Sub(l.received) >= s.maxHold-s.cfg.Visibility {
		e.Err = errMaxHold
	}
	s.log.Warn("a message is no longer ours", "message_id", l.d.ID, "coordinates", l.d.Coordinates, "error", e.Err)
	s.works.Go(func() { s.emit(e) }) // not under the lock
	return behind
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

// extend asks for the visibility of a chunk once more.
func (s *Source) extend(chunk []*lease, answered chan struct{}) {
	s.mu.Lock()
	sent := time.Now()
	timeouts := make([]int32, len(chunk))
	deadline := chunk[0].until
	for i, l := range chunk {
		timeouts[i] = s.timeout(l, sent)
		deadline = earlier(deadline, l.until)
	}
	s.mu.Unlock()
	ctx, cancel := context.WithDeadline(s.runCtx, deadline)
	defer cancel()
	codes, err := s.change10(ctx, chunk, timeouts)
	now := time.Now()
	s.mu.Lock()
	var behind []*lease
	for i, l := range chunk {
		l.extended = nil
		switch {
		case l.state != leaseHeld:
		case err == nil && codes[i] == "":
			l.until = sent.Add(time.Duration(timeouts[i])*time.Second - s.margin)
			l.beat = sent.Add(s.cfg.Visibility / 3)
			if l.received.Add(s.maxHold).Sub(l.until) < time.Second+s.margin {
				l.beat = time.Time{} // that was the last one
			}
		case err == nil && isLost(codes[i]) && !l.settling:
			behind = append(behind, s.lose(l)...)
		default:
			l.beat = now.Add(min(time.Second, s.cfg.Visibility/12))
		}
	}
	s.mu.Unlock()
	close(answered) // before anything waits for another extension
	if err != nil && s.runCtx.Err() == nil {
		s.log.Warn("cannot extend the visibility; trying again until it ends", "count", len(chunk), "error", err)
	}
	if len(behind) > 0 {
		s.hide(s.runCtx, behind, 0)
	}
}

// timeout returns the visibility to ask for: SQS takes no more than 12 hours from the
// receive on, and refuses what would go beyond.
func (s *Source) timeout(l *lease, now time.Time) int32 {
	rest := l.received.Add(s.maxHold).Sub(now)
	return int32(max(min(s.cfg.Visibility, rest)/time.Second, 1))
}

// change10 changes the visibility of up to ten leases, and returns a code for each: ""
// is success.
func (s *Source) change10(ctx context.Context, ls []*lease, timeouts []int32) ([]string, error) {
	in := &sqs.ChangeMessageVisibilityBatchInput{QueueUrl: &s.url, Entries: make([]types.ChangeMessageVisibilityBatchRequestEntry, len(ls))}
	for i, l := range ls {
		in.Entries[i] = types.ChangeMessageVisibilityBatchRequestEntry{Id: aws.String(strconv.Itoa(i)), ReceiptHandle: &l.handle, VisibilityTimeout: timeouts[i]}
	}
	out, err := s.client.ChangeMessageVisibilityBatch(ctx, in)
	if err != nil {
		return nil, causeOf(ctx, err)
	}
	ok := make([]string, 0, len(out.Successful))
	for _, e := range out.Successful {
		ok = append(ok, aws.ToString(e.Id))
	}
	return codes(len(ls), ok, out.Failed), nil
}

// unanswered stands for an entry that the answer says nothing about.
const unanswered = "NoAnswer"

// codes puts the answers of a batch in the order of its entries.
func codes(n int, ok []string, failed []types.BatchResultErrorEntry) []string {
	cs := make([]string, n)
	for i := range cs {
		cs[i] = unanswered
	}
	for _, id := range ok {
		if i, err := strconv.Atoi(id); err == nil && i >= 0 && i < n {
			cs[i] = ""
		}
	}
	for _, f := range failed {
		if i, err := strconv.Atoi(aws.ToString(f.Id)); err == nil && i >= 0 && i < n {
			cs[i] = cmp.Or(bare(aws.ToString(f.Code)), "Failed")
		}
	}
	return cs
}

// hide makes leases that are no longer held visible after a delay, best effort.
func (s *Source) hide(ctx context.Context, ls []*lease, after int32) []error {
	errs := make([]error, len(ls))
	at := 0
	for chunk := range slices.Chunk(ls, maxBatch) {
		for _, l := range chunk {
			s.quiesce(ctx, l)
		}
		timeouts := make([]int32, len(chunk))
		for i := range timeouts {
			timeouts[i] = after
		}
		copy(errs[at:], s.patiently(ctx, "give back", chunk, func(ctx context.Context, ls []*lease) ([]string, error) {
			return s.change10(ctx, ls, timeouts[:len(ls)])
		}))
		at += len(chunk)
	}
	return errs
}

// quiesce waits for the extension of l that is on its way: arriving later, it would
// hide again what was made visible.
func (s *Source) quiesce(ctx context.Context, l *lease) {
	s.mu.Lock()
	c := l.extended
	s.mu.Unlock()
	if c == nil {
		return
	}
	select {
	case <-c:
	case <-ctx.Done():
	}
}
