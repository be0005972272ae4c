package sqs

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/sqs"
	"github.com/aws/aws-sdk-go-v2/service/sqs/types"

	"github.com/twiceproof/twiceproof/brokers"
)

const (
	// entryTries is how often an entry is sent that failed on SQS's side.
	entryTries = 3
	// parallelBatches bounds the calls that one Settle has in flight.
	parallelBatches = 4
)

var (
	errExpired = errors.New("its visibility could not be extended in time")
	errMaxHold = errors.New("it was held for as long as SQS allows (12 h)")
)

// Settle implements [brokers.Source]: deletes in batches of ten, then changes of
// visibility. SQS may answer a delete with success and deliver the message again.
//
// Retry and Release on a FIFO queue give back all later messages of the group in hand;
// Retry hides the group for the delay. Delays are rounded up to seconds and end with
// the 12 hours from the receive.
func (s *Source) Settle(ctx context.Context, ss ...brokers.Settlement) []error {
	if len(ss) == 0 {
		return nil
	}
	if err := context.Cause(ctx); err != nil {
		return each(len(ss), err)
	}
	s.mu.Lock()
	if s.state != sourceOpen {
		s.mu.Unlock()
		return each(len(ss), brokers.ErrClosed)
	}
	s.calls.Add(1)
	defer s.calls.Done()
	errs := make([]error, len(ss))
	var done, back []int
	for i, st := range ss {
		l, err := s.check(st)
		switch {
		case err != nil:
			errs[i] = err
		case l.state == leaseGivenBack: // a Release, and it went with its lane
			l.state = leaseSettled
		case st.Verb == brokers.Done:
			l.settling = true
			done = append(done, i)
		default:
			back = append(back, i)
		}
	}
	s.mu.Unlock()
	lease := func(i int) *lease { return ss[i].Delivery.Handle.(*lease) }
	s.remove(ctx, done, lease, errs)
	s.giveBack(ctx, ss, back, errs)
	s.tellLost(ss, errs)
	return errs
}

func each(n int, err error) []error {
	errs := make([]error, n)
	for i := range errs {
		errs[i] = err
	}
	return errs
}

// check judges a settlement before anything is sent. The caller holds the lock.
func (s *Source) check(st brokers.Settlement) (*lease, error) {
	if st.Delivery == nil {
		return nil, &brokers.Error{Class: brokers.Permanent, Op: "settle", Err: errors.New("no Delivery")}
	}
	op := "settle " + st.Delivery.Coordinates + " as " + st.Verb.String()
	l, ok := st.Delivery.Handle.(*lease)
	if !ok || l.s != s {
		return nil, &brokers.Error{Class: brokers.Lost, Op: op, Err: brokers.ErrOwnershipLost, Hint: "the delivery is of another Source"}
	}
	switch {
	case l.state == leaseSettled, l.settling:
		return nil, brokers.ErrAlreadySettled
	case l.state == leaseGivenBack && st.Verb == brokers.Release:
		return l, nil
	case l.state != leaseHeld:
		return nil, brokers.ErrOwnershipLost
	}
	switch st.Verb {
	case brokers.Done, brokers.Release, brokers.Retry:
	case brokers.Reject:
		return nil, &brokers.Error{Class: brokers.Permanent, Op: op, Err: brokers.ErrUnsupported, Hint: "SQS moves messages to dead letters by maxReceiveCount only"}
	default:
		return nil, &brokers.Error{Class: brokers.Permanent, Op: op, Err: brokers.ErrUnsupported, Hint: "unknown verb"}
	}
	if !time.Now().Before(l.until) { // the heartbeat is about to say so
		return nil, brokers.ErrOwnershipLost
	}
	return l, nil
}

// remove deletes what is done.
func (s *Source) remove(ctx context.Context, idx []int, of func(int) *lease, errs []error) {
	var wg sync.WaitGroup
	slots := make(chan struct{}, parallelBatches)
	for chunk := range slices.Chunk(idx, maxBatch) {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			ls := make([]*lease, len(chunk))
			for i, at := range chunk {
				ls[i] = of(at)
			}
			for i, err := range s.patiently(ctx, "delete", ls, s.delete10) {
				errs[chunk[i]] = s.deleted(ls[i], err)
			}
		})
	}
	wg.Wait()
}

// deleted notes the answer to a delete.
func (s *Source) deleted(l *lease, err error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	l.settling = false
	switch {
	case err == nil:
		s.forget(l, leaseSettled)
		l.state = leaseSettled // also when its time was up meanwhile: it is deleted
	case errors.Is(err, brokers.ErrOwnershipLost):
		if behind := s.lose(l); len(behind) > 0 {
			s.works.Go(func() { s.hide(s.runCtx, behind, 0) })
		}
	case l.state != leaseHeld:
		return brokers.ErrOwnershipLost
	}
	return err
}

func (s *Source) delete10(ctx context.Context, ls []*lease) ([]string, error) {
	in := &sqs.DeleteMessageBatchInput{QueueUrl: &s.url, Entries: make([]types.DeleteMessageBatchRequestEntry, len(ls))}
	for i, l := range ls {
		in.Entries[i] = types.DeleteMessageBatchRequestEntry{Id: aws.String(strconv.Itoa(i)), ReceiptHandle: &l.handle}
	}
	out, err := s.client.DeleteMessageBatch(ctx, in)
	if err != nil {
		return nil, causeOf(ctx, err)
	}
	ok := make([]string, 0, len(out.Successful))
	for _, e := range out.Successful {
		ok = append(ok, aws.ToString(e.Id))
	}
	return codes(len(ls), ok, out.Failed), nil
}

// patiently makes one call for up to ten leases, and again for the entries that failed
// on the server's side.
func (s *Source) patiently(ctx context.Context, op string, ls []*lease, call func(context.Context, []*lease) ([]string, error)) []error {
	errs := make([]error, len(ls))
	open := make([]int, len(ls))
	for i := range open {
		open[i] = i
	}
	for try := 1; len(open) > 0; try++ {
		now := make([]*lease, len(open))
		for i, at := range open {
			now[i] = ls[at]
		}
		cs, err := call(ctx, now)
		var again []int
		for i, at := range open {
			switch {
			case err != nil:
				errs[at] = classify(op, err)
			case cs[i] == "":
				errs[at] = nil
			default:
				errs[at] = entryError(op, cs[i])
				if !errors.Is(errs[at], brokers.ErrOwnershipLost) && brokers.ClassOf(errs[at]) != brokers.Fatal {
					again = append(again, at)
				}
			}
		}
		if open = again; len(open) == 0 || try == entryTries || !sleep(ctx, backoff(try)) {
			break
		}
	}
	return errs
}

func entryError(op, c string) error {
	if isLost(c) {
		return &brokers.Error{Class: brokers.Lost, Op: op, Err: fmt.Errorf("%w: %s", brokers.ErrOwnershipLost, c)}
	}
	class, hint := classOf(c, 0)
	if class == brokers.Permanent {
		class = brokers.Retryable
	}
	return &brokers.Error{Class: class, Op: op, Err: errors.New(c), After: retryPause, Hint: hint}
}

// sleep returns false when ctx ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// giveBack makes messages visible again, at once or after their delay.
func (s *Source) giveBack(ctx context.Context, ss []brokers.Settlement, idx []int, errs []error) {
	of := func(i int) *lease { return ss[i].Delivery.Handle.(*lease) }
	if s.fifo { // the first of a group takes the others with it
		slices.SortFunc(idx, func(a, b int) int { return cmp.Compare(of(a).serial, of(b).serial) })
		for _, i := range idx {
			errs[i] = s.giveBackLane(ctx, ss[i], of(i))
		}
		return
	}
	byDelay := map[int32][]int{}
	s.mu.Lock()
	for _, i := range idx {
		l := of(i)
		if l.state != leaseHeld || l.settling {
			errs[i] = brokers.ErrOwnershipLost
			continue
		}
		l.settling = true
		after := s.delay(ss[i], l)
		byDelay[after] = append(byDelay[after], i)
	}
	s.mu.Unlock()
	for after, idx := range byDelay {
		ls := make([]*lease, len(idx))
		for i, at := range idx {
			ls[i] = of(at)
		}
		for i, err := range s.hide(ctx, ls, after) {
			errs[idx[i]] = s.gaveBack(ls[i], err)
		}
	}
}

// delay returns the visibility that a settlement asks for, within the 12 hours.
func (s *Source) delay(st brokers.Settlement, l *lease) int32 {
	if st.Verb != brokers.Retry || st.After <= 0 {
		return 0
	}
	after := (st.After + time.Second - 1).Truncate(time.Second)
	rest := time.Until(l.received.Add(s.maxHold)) - time.Second
	return int32(max(min(after, rest)/time.Second, 0))
}

func (s *Source) gaveBack(l *lease, err error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	l.settling = false
	switch {
	case err == nil:
		s.forget(l, leaseSettled)
		l.state = leaseSettled
		l.cancel(brokers.ErrOwnershipLost)
	case errors.Is(err, brokers.ErrOwnershipLost):
		s.lose(l)
	case l.state != leaseHeld:
		return brokers.ErrOwnershipLost
	}
	return err
}

// giveBackLane gives back a message of a group with all later ones in hand. The first
// of them locks the group as long as it is hidden, so it becomes visible last; with a
// delay it is hidden first.
func (s *Source) giveBackLane(ctx context.Context, st brokers.Settlement, l *lease) error {
	s.mu.Lock()
	switch {
	case l.state == leaseGivenBack && st.Verb == brokers.Release:
		l.state = leaseSettled
		s.mu.Unlock()
		return nil
	case l.state != leaseHeld || l.settling:
		s.mu.Unlock()
		return brokers.ErrOwnershipLost
	}
	var behind []*lease
	for _, o := range slices.Backward(s.later(l)) {
		if !o.settling {
			s.forget(o, leaseGivenBack)
			o.cancel(brokers.ErrOwnershipLost)
			behind = append(behind, o)
		}
	}
	l.settling = true
	after := s.delay(st, l)
	s.mu.Unlock()
	if after == 0 {
		s.hide(ctx, behind, 0) // what fails becomes visible with its time, and blocks its group until then
		return s.gaveBack(l, s.hide(ctx, []*lease{l}, 0)[0])
	}
	err := s.hide(ctx, []*lease{l}, after)[0]
	s.hide(ctx, behind, 0)
	return s.gaveBack(l, err)
}

// giveBackAll makes visible what is in hand when the Source closes: of each group the
// first one last.
func (s *Source) giveBackAll(ctx context.Context) error {
	s.mu.Lock()
	var first, rest []*lease
	for _, l := range slices.Backward(s.inHand()) {
		if s.fifo && s.groups[l.group][0] != l {
			rest = append(rest, l)
		} else {
			first = append(first, l)
		}
	}
	for _, l := range slices.Concat(rest, first) {
		s.forget(l, leaseLost)
		l.cancel(brokers.ErrClosed)
	}
	s.mu.Unlock()
	if len(first) == 0 {
		return nil
	}
	if err := context.Cause(ctx); err != nil {
		return fmt.Errorf("%d messages were not given back: %w", len(first)+len(rest), err)
	}
	for _, ls := range [][]*lease{rest, first} {
		for _, err := range s.hide(ctx, ls, 0) {
			if err != nil && !errors.Is(err, brokers.ErrOwnershipLost) {
				return err
			}
		}
	}
	return nil
}

// tellLost reports settlements that came too late.
func (s *Source) tellLost(ss []brokers.Settlement, errs []error) {
	n := 0
	var first *brokers.Delivery
	for i, err := range errs {
		if errors.Is(err, brokers.ErrOwnershipLost) && ss[i].Delivery != nil {
			n++
			if first == nil {
				first = ss[i].Delivery
			}
		}
	}
	if n > 0 {
		s.log.Info("settlements came after their ownership had ended and were dropped", "count", n, "first", first.Coordinates)
		s.emit(brokers.Event{Kind: brokers.EventSettleLost, Lane: first.Lane, Count: n, Err: brokers.ErrOwnershipLost})
	}
}
