// Package prefix remembers which positions of a log are finished and up to where
// all of them are: the only position that may be committed on brokers that keep
// one position per lane (Kafka, the memory broker's log).
//
// It guarantees that Safe never passes a position that was delivered and is not
// done, that it never goes back, and that gaps in the log (compaction, transaction
// markers) hold nothing up. It is not safe for concurrent use: its owner's mutex,
// which also fences commits, guards it.
package prefix

import "sort"

// Tracker follows one lane of a log. Positions are the log's own offsets, which
// rise but need not be contiguous. Use New.
type Tracker struct {
	q    []entry // sorted by off; everything before head is done
	head int
	pos  int64 // the next position to read
	open int   // entries that are not done
}

type entry struct {
	off  int64
	done bool
}

// New returns a tracker whose next position to read is pos.
func New(pos int64) Tracker { return Tracker{pos: pos} }

// Delivered notes that off was handed over and moves the position behind it. It
// reports false, and changes nothing, when off lies before the position: it was
// handed over or skipped before.
func (t *Tracker) Delivered(off int64) bool {
	if off < t.pos {
		return false
	}
	t.q = append(t.q, entry{off: off})
	t.pos = off + 1
	t.open++
	return true
}

// Skipped notes that there is nothing to deliver before next.
func (t *Tracker) Skipped(next int64) { t.pos = max(t.pos, next) }

// Done marks off as finished and reports whether it was delivered and unfinished.
func (t *Tracker) Done(off int64) bool {
	live := t.q[t.head:]
	i := 0
	if len(live) > 0 && live[0].off != off { // finishing in order is the common case
		i = sort.Search(len(live), func(i int) bool { return live[i].off >= off })
	}
	if i >= len(live) || live[i].off != off || live[i].done {
		return false
	}
	live[i].done = true
	t.open--
	for t.head < len(t.q) && t.q[t.head].done {
		t.head++
	}
	t.compact()
	return true
}

// compact drops the finished head once it is the larger part of the slice, so
// that each entry is moved at most once on average.
func (t *Tracker) compact() {
	switch {
	case t.head == len(t.q):
		t.q, t.head = t.q[:0], 0
	case t.head >= 64 && t.head > len(t.q)/2:
		t.q = t.q[:copy(t.q, t.q[t.head:])]
		t.head = 0
	}
}

// Safe is the position that may be committed: the oldest unfinished one or, when
// all are finished, the next one to read. It is the next position to read after a
// restart, so gaps commit themselves.
func (t *Tracker) Safe() int64 {
	if t.head < len(t.q) {
		return t.q[t.head].off
	}
	return t.pos
}

// Pos is the next position to read.
func (t *Tracker) Pos() int64 { return t.pos }

// Span is the number of deliveries since the oldest unfinished one, itself
// included, finished or not: what a crash now would deliver again.
func (t *Tracker) Span() int { return len(t.q) - t.head }

// Unfinished is the number of deliveries that are not done.
func (t *Tracker) Unfinished() int { return t.open }
