package consumer

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
)

// settler sends settlements in batches of whatever has come together, from one
// goroutine.
type settler struct {
	settle  func(ctx context.Context, ss ...brokers.Settlement) []error
	done    func(j *job, err error)
	linger  time.Duration
	batch   int // sent at once when there are as many
	mu      sync.Mutex
	pending []settlement
	later   int // that wait for another try
	closed  bool
	wake    chan struct{}
}

type settlement struct {
	job   *job
	verb  brokers.Verb
	tries int
}

func newSettler[Tx any](l *loop[Tx]) *settler {
	return &settler{settle: l.src.Settle, linger: max(l.caps.SettleLinger, moment), batch: cmp.Or(l.caps.SettleBatch, 500), wake: make(chan struct{}, 1),
		done: func(j *job, err error) {
			l.room.give(j.d.Size())
			switch {
			case err == nil:
			case errors.Is(err, brokers.ErrOwnershipLost), errors.Is(err, brokers.ErrClosed):
				l.st.stats.lost.Add(1)
			default:
				l.cfg.Logger.Warn("settle failed; the redelivery will be a duplicate", "message_id", j.d.ID, "coordinates", j.d.Coordinates, "error", err)
			}
		}}
}

func (s *settler) add(j *job, v brokers.Verb) { s.put(settlement{job: j, verb: v}) }

func (s *settler) put(ss ...settlement) {
	s.mu.Lock()
	s.pending = append(s.pending, ss...)
	s.mu.Unlock()
	s.signal()
}

func (s *settler) signal() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// close lets run end once everything is sent.
func (s *settler) close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.signal()
}

func (s *settler) run() {
	for range s.wake {
		for {
			s.mu.Lock()
			work, closed := s.pending, s.closed
			if !closed && len(work) > 0 && len(work) < s.batch {
				s.mu.Unlock()
				time.Sleep(s.linger)
				s.mu.Lock()
				work, closed = s.pending, s.closed
			}
			s.pending = nil
			later := s.later
			s.mu.Unlock()
			if len(work) == 0 {
				if closed && later == 0 {
					return
				}
				break
			}
			s.send(work)
		}
	}
}

// moment is long enough for what is done together to be sent together. In virtual
// time nothing else makes a batch the same in every run.
const moment = time.Microsecond

func (s *settler) send(work []settlement) {
	slices.SortFunc(work, func(a, b settlement) int { return cmp.Compare(a.job.arrival, b.job.arrival) })
	ss := make([]brokers.Settlement, len(work))
	for i, w := range work {
		ss[i] = brokers.Settlement{Delivery: w.job.d, Verb: w.verb}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	errs := s.settle(ctx, ss...)
	cancel()
	s.mu.Lock()
	closed := s.closed
	s.mu.Unlock()
	var again []settlement
	var after time.Duration
	for i, w := range work {
		var err error
		if errs != nil {
			err = errs[i]
		}
		if !w.worthAnotherTry(err, closed) {
			s.done(w.job, err)
			continue
		}
		w.tries++
		after = max(after, min(20*time.Millisecond<<min(w.tries, 10), time.Second), min(brokers.RetryAfterOf(err), 5*time.Second))
		again = append(again, w)
	}
	if len(again) > 0 {
		s.mu.Lock()
		s.later += len(again)
		s.mu.Unlock()
		time.AfterFunc(after, func() { // run waits for it
			s.mu.Lock()
			s.later -= len(again)
			s.pending = append(s.pending, again...)
			s.mu.Unlock()
			s.signal()
		})
	}
}

// worthAnotherTry: as long as the message is ours, since one whose settlement is
// given up is neither settled nor delivered again while it is, and stays in the
// source's room. At the end of Run a few tries must do: closing the source gives
// back the rest.
func (w settlement) worthAnotherTry(err error, closing bool) bool {
	if err == nil || errors.Is(err, brokers.ErrClosed) || errors.Is(err, brokers.ErrAlreadySettled) || errors.Is(err, brokers.ErrUnsupported) {
		return false
	}
	if c := brokers.ClassOf(err); c != brokers.Retryable && c != brokers.Throttled {
		return false
	}
	const triesAtEnd = 5
	return w.tries < triesAtEnd || !closing
}
