package consumer

import (
	"errors"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/inbox"
)

// A message whose run ends the process leaves nothing behind, and comes again. So a
// message that may have done it is a suspect: the run is noted before it begins, in a
// transaction of its own, and suspects run one at a time, so that a crash blames one
// message and none of its neighbours. First deliveries pay nothing.
//
// Where the broker counts deliveries, those from the second on are suspects. Where it
// does not, each lane keeps one row while somebody works on it: where the row of an
// earlier owner is found, that one has died, and the first messages are suspects.

// suspectSpan is how many messages of a lane are suspects after an unclean end: what may
// have been handed over and not settled then.
const suspectSpan = 1000

// suspects tells which deliveries are suspects.
type suspects struct {
	owner string
	one   turn // of the suspect that runs

	mu    sync.Mutex
	lanes map[string]*laneWatch
}

type laneWatch struct {
	mu      turn // of whoever enters the lane
	entered bool
	epoch   uint64
	left    int // how many more are suspects
}

func newSuspects() *suspects {
	return &suspects{owner: uuid.NewString(), one: newTurn(), lanes: map[string]*laneWatch{}}
}

// turn is a mutex that is held over waits. Virtual time does not pass while somebody
// waits for a sync.Mutex.
type turn chan struct{}

func newTurn() turn { return make(turn, 1) }

func (t turn) Lock()   { t <- struct{}{} }
func (t turn) Unlock() { <-t }

func (s *suspects) lane(name string) *laneWatch {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := s.lanes[name]
	if w == nil {
		w = &laneWatch{mu: newTurn()}
		s.lanes[name] = w
	}
	return w
}

// suspect reports whether a delivery is a suspect.
func (l *loop[Tx]) suspect(j *job) (bool, error) {
	if l.caps.Counting != brokers.CountsNothing {
		return j.d.Attempt > 1, nil
	}
	w := l.suspects.lane(j.d.Lane.Name)
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.entered || w.epoch != j.d.Lane.Epoch {
		unclean, err := l.enterLane(j.d.Lane.Name)
		if err != nil {
			return false, err
		}
		w.entered, w.epoch, w.left = true, j.d.Lane.Epoch, 0
		if unclean {
			w.left = suspectSpan
			l.cfg.Logger.Warn("the lane's last owner has not ended in good order: its first messages are run one at a time", "lane", j.d.Lane.Name)
		}
	}
	if w.left == 0 {
		return false, nil
	}
	w.left--
	return true, nil
}

// enterLane reports whether the last owner of the lane has died. One that gives the lane
// up in good order says so at that moment, which may be this one.
func (l *loop[Tx]) enterLane(name string) (unclean bool, err error) {
	ctx, cancel := l.storeContext()
	defer cancel()
	for range 2 {
		owner, err := l.store.LaneOwner(ctx, l.cfg.Name, name)
		if err != nil {
			return false, err
		}
		if unclean = owner != "" && owner != l.suspects.owner; !unclean || !sleep(ctx, 200*time.Millisecond) {
			break
		}
	}
	return unclean, l.store.EnterLane(ctx, l.cfg.Name, name, l.suspects.owner)
}

// revoked notes that a lane was given up in good order.
func (l *loop[Tx]) revoked(name string) {
	l.suspects.mu.Lock()
	w := l.suspects.lanes[name]
	delete(l.suspects.lanes, name)
	l.suspects.mu.Unlock()
	if w == nil {
		return
	}
	l.leaving.Go(func() { l.leaveLane(w, name) })
}

// leaveLanes is for the end of Run, after the last run.
func (l *loop[Tx]) leaveLanes() {
	l.suspects.mu.Lock()
	lanes := l.suspects.lanes
	l.suspects.lanes = map[string]*laneWatch{}
	l.suspects.mu.Unlock()
	for name, w := range lanes {
		l.leaveLane(w, name)
	}
	l.leaving.Wait()
}

func (l *loop[Tx]) leaveLane(w *laneWatch, name string) {
	w.mu.Lock()
	entered := w.entered
	w.mu.Unlock()
	if !entered {
		return
	}
	ctx, cancel := l.storeContext()
	defer cancel()
	if err := l.store.LeaveLane(ctx, l.cfg.Name, name, l.suspects.owner); err != nil {
		l.cfg.Logger.Warn("that the lane was left in good order could not be written; its next owner will run its first messages one at a time", "lane", name, "error", err)
	}
}

// ownTurn waits for the suspect's turn. It reports false when the delivery was lost or
// given back meanwhile: what has not begun at a shutdown does not begin any more.
func (l *loop[Tx]) ownTurn(j *job) bool {
	var lost <-chan struct{}
	if j.d.Context != nil {
		lost = j.d.Context.Done()
	}
	select {
	case l.suspects.one <- struct{}{}:
		return true
	case <-lost:
		l.drop(j)
	case <-j.d.Draining:
		l.release(j)
	case <-l.stopping.Done():
		l.release(j)
	}
	l.judged(j, false, true, nil)
	return false
}

// careful runs a delivery, alone and with its run noted if it is a suspect.
func (l *loop[Tx]) careful(j *job) next {
	suspect := j.suspect
	if !j.judged {
		var err error
		if suspect, err = l.suspect(j); err != nil {
			l.judged(j, false, true, nil)
			return l.storeFailed(j, err)
		}
		j.suspect, j.judged = suspect, true
	}
	if !suspect {
		return l.claim(j)
	}
	if !l.ownTurn(j) {
		return over
	}
	defer l.suspects.one.Unlock()
	ctx, cancel := l.storeContext()
	starts, err := l.store.Suspect(ctx, l.cfg.Name, j.item)
	cancel()
	if err != nil {
		l.judged(j, false, true, nil)
		return l.storeFailed(j, err)
	}
	var n next
	if died := starts - 1; died >= l.cfg.CrashLimit {
		l.judged(j, false, true, nil)
		err := errors.New("the process ended during too many runs of this message")
		n = l.record(j, outcome{reason: inbox.ReasonCrashLoop, dead: true, attempts: died, err: err, failure: failure("crash-loop", err)})
		if j.pending != nil {
			return n // not recorded yet
		}
	} else {
		n = l.claim(j)
	}
	ctx, cancel = l.storeContext()
	defer cancel()
	if err := l.store.Cleared(ctx, l.cfg.Name, j.item); err != nil {
		l.cfg.Logger.Warn("that a run has ended could not be written", "message_id", j.d.ID, "error", err)
	}
	return n
}
