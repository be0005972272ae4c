package consumer

import (
	"context"
	"errors"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/inbox"
	"github.com/twiceproof/twiceproof/internal/lanes"
)

// job is a delivery, or a held message that is due.
type job struct {
	d        *brokers.Delivery
	head     *inbox.Head
	item     *inbox.Item
	defect   error // why the message can only be held
	received time.Time
	arrival  uint64 // the deliveries' order

	ctx context.Context // what the interceptors gave, nil without
	err error           // how the last run ended, for the interceptors

	out       bool                            // a head that counts as taken
	suspect   bool                            // it may have ended a process before
	judged    bool                            // suspect is known
	probe     bool                            // the breaker's: its failure counts for nothing
	tries     int                             // failed runs of this delivery
	first     time.Time                       // when the first run began
	reruns    int                             // serialization failures in a row
	broken    int                             // lost connections in a row
	waits     int                             // claims that timed out in a row
	ended     bool                            // the handler ended the transaction; claim again to know
	pending   *outcome                        // what is to be kept, when keeping it has failed before
	owed      func(ctx context.Context) error // what is still to be written about the head
	unwritten int                             // failures of that in a row, with a database that is there
}

// next is what a worker does with a job afterwards.
type next struct {
	again bool // put it back at the front of its key, which stays closed for after
	after time.Duration
}

var over = next{}

func again(after time.Duration) next { return next{true, after} }

// work runs jobs until the scheduler is closed.
func (l *loop[Tx]) work() {
	for {
		t, ok := l.jobs.Next()
		if !ok {
			return
		}
		l.busy.Add(1)
		n := l.process(t.Job)
		l.busy.Add(-1)
		l.finish(t, n)
	}
}

func (l *loop[Tx]) finish(t lanes.Ticket[*job], n next) {
	switch {
	case !n.again:
		l.progress.Store(time.Now().UnixNano())
		l.headDone(t.Job)
		l.jobs.End(t)
	case !l.jobs.Again(t, n.after):
		l.jobs.End(t)
		l.release(t.Job) // shutting down
	}
	if t.Job.head != nil {
		l.nudgeHeads()
	}
}

// process takes a job one step further.
func (l *loop[Tx]) process(j *job) next {
	if !l.pass(j) {
		return over
	}
	if j.owed != nil {
		return l.writeHead(j, j.owed)
	}
	if j.head != nil {
		if !l.enter(j) {
			return over
		}
		return l.intercept(j, l.retry)
	}
	switch {
	case j.d.Context != nil && j.d.Context.Err() != nil:
		l.drop(j)
		return over
	case isClosed(j.d.Draining):
		l.release(j)
		return over
	case j.pending != nil:
		return l.record(j, *j.pending)
	case j.defect != nil:
		reason := inbox.ReasonBadID
		if errors.Is(j.defect, inbox.ErrNoID) {
			reason = inbox.ReasonNoID
		}
		j.item.ID = ""
		return l.record(j, outcome{reason: reason, dead: true, err: j.defect, failure: failure("id", j.defect)})
	}
	if !l.enter(j) {
		return over
	}
	return l.intercept(j, l.careful)
}

// message is what the next run of a job's handler gets.
func (l *loop[Tx]) message(j *job) *Message {
	if h := j.head; h != nil {
		return &Message{Message: h.Item.Message, Consumer: l.cfg.Name, Coordinates: h.Item.Coordinates, Attempt: h.Attempts + 1, Replayed: true}
	}
	return &Message{Message: &j.d.Message, Consumer: l.cfg.Name, Coordinates: j.d.Coordinates, Attempt: j.tries + 1}
}

// drop forgets a delivery whose ownership is lost.
func (l *loop[Tx]) drop(j *job) {
	l.st.stats.lost.Add(1)
	l.room.give(j.d.Size())
}
