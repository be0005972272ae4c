// Package lanes hands jobs to workers so that jobs of one key run one at a time and
// in order, and jobs without a key run at once.
package lanes

import (
	"slices"
	"sync"
	"time"
)

// Lanes is a scheduler. It is safe for concurrent use.
type Lanes[J any] struct {
	mu     sync.Mutex
	wake   sync.Cond
	keys   map[string]*lane[J]
	all    map[*lane[J]]struct{} // with a job queued or running
	ready  []*lane[J]
	queued int
	closed bool
}

// lane is the queue of one key; it is busy while a job of it runs or it is resting.
type lane[J any] struct {
	key  string
	jobs []J
	busy bool
}

// New returns an empty scheduler.
func New[J any]() *Lanes[J] {
	l := &Lanes[J]{keys: map[string]*lane[J]{}, all: map[*lane[J]]struct{}{}}
	l.wake.L = &l.mu
	return l
}

// Ticket is the right to run one job; End gives its key back.
type Ticket[J any] struct {
	Job  J
	lane *lane[J]
}

// Push appends a job to its key; "" is no key. It reports false after Close.
func (l *Lanes[J]) Push(key string, j J) bool { return l.push(key, j, false) }

// PushFront puts a job before all of its key.
func (l *Lanes[J]) PushFront(key string, j J) bool { return l.push(key, j, true) }

func (l *Lanes[J]) push(key string, j J, front bool) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return false
	}
	ln := l.keys[key]
	if key == "" || ln == nil {
		ln = &lane[J]{key: key}
		l.all[ln] = struct{}{}
		if key != "" {
			l.keys[key] = ln
		}
	}
	if front {
		ln.jobs = append([]J{j}, ln.jobs...)
	} else {
		ln.jobs = append(ln.jobs, j)
	}
	l.queued++
	if len(ln.jobs) == 1 && !ln.busy {
		l.makeReady(ln)
	}
	return true
}

func (l *Lanes[J]) makeReady(ln *lane[J]) {
	l.ready = append(l.ready, ln)
	l.wake.Signal()
}

// Next waits for a job whose key is free and takes it; ok is false after Close.
func (l *Lanes[J]) Next() (t Ticket[J], ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for len(l.ready) == 0 && !l.closed {
		l.wake.Wait()
	}
	if l.closed {
		return t, false
	}
	ln := l.ready[0]
	l.ready = l.ready[1:]
	t = Ticket[J]{ln.jobs[0], ln}
	ln.jobs = ln.jobs[1:]
	ln.busy = true
	l.queued--
	return t, true
}

// End says that the job is over; the next of its key may start.
func (l *Lanes[J]) End(t Ticket[J]) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.free(t.lane)
}

// Again puts the job back at the front of its key, which stays closed for after.
// It reports false after Close: the job is the caller's then.
func (l *Lanes[J]) Again(t Ticket[J], after time.Duration) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return false
	}
	t.lane.jobs = append([]J{t.Job}, t.lane.jobs...)
	l.queued++
	if after <= 0 {
		l.free(t.lane)
		return true
	}
	l.resting(t.lane, after)
	return true
}

func (l *Lanes[J]) resting(ln *lane[J], after time.Duration) {
	time.AfterFunc(after, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.free(ln)
	})
}

func (l *Lanes[J]) free(ln *lane[J]) {
	ln.busy = false
	if len(ln.jobs) > 0 {
		l.makeReady(ln)
		return
	}
	delete(l.all, ln)
	if l.keys[ln.key] == ln {
		delete(l.keys, ln.key)
	}
}

// Any reports whether a job that has not started satisfies is.
func (l *Lanes[J]) Any(is func(J) bool) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for ln := range l.all {
		if slices.ContainsFunc(ln.jobs, is) {
			return true
		}
	}
	return false
}

// Take removes the jobs that have not started and satisfy which, and returns them,
// of one key in order. The others keep their places.
func (l *Lanes[J]) Take(which func(J) bool) []J {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.take(which)
}

func (l *Lanes[J]) take(which func(J) bool) (out []J) {
	for ln := range l.all {
		var keep []J
		for _, j := range ln.jobs {
			if which(j) {
				out = append(out, j)
			} else {
				keep = append(keep, j)
			}
		}
		ln.jobs = keep
		if len(keep) == 0 && !ln.busy {
			l.ready = slices.DeleteFunc(l.ready, func(r *lane[J]) bool { return r == ln })
			l.free(ln)
		}
	}
	l.queued -= len(out)
	return out
}

// Close makes Next return, refuses further jobs, and gives back what has not
// started, of one key in order.
func (l *Lanes[J]) Close() []J {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	l.wake.Broadcast()
	return l.take(func(J) bool { return true })
}
