package memory

import (
	"bytes"
	"cmp"
	"slices"
	"sort"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
)

// item is a stored message. One with a copied flag is a duplicate that a fault made.
type item struct {
	m        brokers.Message // never changed after it is stored
	pos      int64           // place in its queue; offset in a partition
	coord    int64           // the number in its coordinates
	sent     time.Time
	at       time.Time // queue: invisible until then
	hidden   int       // index+1 in the heap of invisible ones
	attempts int       // hand-overs the broker counted
	settles  int       // settlements tried, for Chaos
	passed   int       // times that Reorder passed it over
	group    *fifoGroup
	lease    *lease // queue: the live delivery
	copied   bool
	delayed  bool // a DelayDelivery of Chaos struck
	again    bool // channel: the redelivered flag
	taken    bool // channel: was handed over
	flight   bool // queue: received, and neither visible again nor deleted
}

// newItem returns an item with a deep copy of m.
func newItem(m *brokers.Message) *item {
	it := &item{m: *m}
	it.m.Headers, it.m.Payload = m.Headers.Clone(), bytes.Clone(m.Payload)
	return it
}

// fresh returns an item with the same message, as if it were new.
func (it *item) fresh() *item { return &item{m: it.m} }

// turn numbers the hand-overs of it and of its copy, for Chaos.
func (it *item) turn() int64 {
	n := int64(it.attempts) << 1
	if it.copied {
		n |= 1
	}
	return n
}

// deliver returns a delivery with a copy of the message, so that nothing that a
// handler does to it reaches the next delivery.
func (it *item) deliver(d *brokers.Delivery) {
	d.Message = it.m
	d.Message.Headers = it.m.Headers.Clone()
	d.Message.Payload = bytes.Clone(it.m.Payload)
}

// inOrder sorts items by their places.
func inOrder(its []*item) []*item {
	slices.SortFunc(its, func(a, b *item) int { return cmp.Compare(a.pos, b.pos) })
	return its
}

func clones(its []*item) []*brokers.Message {
	ms := make([]*brokers.Message, len(its))
	for i, it := range its {
		ms[i] = it.m.Clone()
	}
	return ms
}

// lagOf is the status of a queue that stores its.
func lagOf(now time.Time, name string, its []*item) brokers.LaneStatus {
	st := brokers.LaneStatus{Name: name, Lag: int64(len(its)), Oldest: -1}
	for _, it := range its {
		st.Oldest = max(st.Oldest, now.Sub(it.sent))
	}
	return st
}

// line is a queue of items in the order of pos. Taken items leave a gap at its
// front, into which returned ones fit without moving the rest.
type line struct {
	q    []*item
	head int
}

func (l *line) len() int       { return len(l.q) - l.head }
func (l *line) at(i int) *item { return l.q[l.head+i] }

// insert puts it at its place.
func (l *line) insert(it *item) {
	if n := len(l.q); n == l.head || l.q[n-1].pos < it.pos {
		l.q = append(l.q, it)
		return
	}
	if l.head == 0 {
		gap := 16 + len(l.q)/4
		q := make([]*item, gap+len(l.q), gap+len(l.q)+len(l.q)/4)
		copy(q[gap:], l.q)
		l.q, l.head = q, gap
	}
	i := sort.Search(l.len(), func(i int) bool { return l.at(i).pos > it.pos })
	copy(l.q[l.head-1:], l.q[l.head:l.head+i])
	l.head--
	l.q[l.head+i] = it
}

// take removes the i-th item.
func (l *line) take(i int) *item {
	it := l.at(i)
	copy(l.q[l.head+1:l.head+i+1], l.q[l.head:l.head+i])
	l.q[l.head] = nil
	l.head++
	switch {
	case l.head == len(l.q):
		l.q, l.head = l.q[:0], 0
	case l.head >= 1024 && l.head > len(l.q)/2:
		n := copy(l.q[16:], l.q[l.head:]) // leaves a gap for those that come back
		clear(l.q[16+n:])
		l.q, l.head = l.q[:16+n], 16
	}
	return it
}

// remove takes it out, if it is in l.
func (l *line) remove(it *item) {
	i := sort.Search(l.len(), func(i int) bool { return l.at(i).pos >= it.pos })
	if i < l.len() && l.at(i) == it {
		l.take(i)
	}
}

// schedule is a heap of things with a due time, in order of that and then of rank.
type schedule[T any] struct {
	a    []T
	due  func(T) time.Time
	rank func(T) int64
	mark func(T, int) // remembers the index plus one; 0 is not in the heap
}

func (s *schedule[T]) len() int { return len(s.a) }

// next returns the earliest due time.
func (s *schedule[T]) next() (at time.Time, ok bool) {
	if len(s.a) == 0 {
		return at, false
	}
	return s.due(s.a[0]), true
}

func (s *schedule[T]) push(x T) {
	s.a = append(s.a, x)
	s.up(len(s.a) - 1)
}

// remove takes out the element whose mark is i.
func (s *schedule[T]) remove(i int) {
	if i == 0 {
		return
	}
	i--
	x, last := s.a[i], len(s.a)-1
	s.swap(i, last)
	var zero T
	s.a[last] = zero
	s.a = s.a[:last]
	s.mark(x, 0)
	if i < last {
		s.fix(i)
	}
}

// fix restores the order after the due time of element i changed.
func (s *schedule[T]) fix(i int) {
	s.down(i)
	s.up(i)
}

func (s *schedule[T]) less(i, j int) bool {
	a, b := s.due(s.a[i]), s.due(s.a[j])
	if a.Equal(b) {
		return s.rank(s.a[i]) < s.rank(s.a[j])
	}
	return a.Before(b)
}

func (s *schedule[T]) swap(i, j int) {
	s.a[i], s.a[j] = s.a[j], s.a[i]
	s.mark(s.a[i], i+1)
	s.mark(s.a[j], j+1)
}

func (s *schedule[T]) up(i int) {
	s.mark(s.a[i], i+1)
	for i > 0 {
		p := (i - 1) / 2
		if !s.less(i, p) {
			return
		}
		s.swap(i, p)
		i = p
	}
}

func (s *schedule[T]) down(i int) {
	for {
		c := 2*i + 1
		if c >= len(s.a) {
			return
		}
		if c+1 < len(s.a) && s.less(c+1, c) {
			c++
		}
		if !s.less(c, i) {
			return
		}
		s.swap(i, c)
		i = c
	}
}
