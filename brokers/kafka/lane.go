package kafka

import (
	"context"
	"strconv"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/internal/prefix"
)

// none is the committed offset of a partition that has none.
const none = -1

// lane is one partition during one generation. Its fields below the line are guarded
// by the Source's mutex.
type lane struct {
	g     *generation
	topic string
	num   int
	name  brokers.Lane

	ctx    context.Context // of the deliveries
	cancel context.CancelCauseFunc
	wake   chan struct{} // cap 1: there may be room to fetch

	unpacker unpacker // the fetcher's
	spare    []byte   // the fetcher's: memory for the next answer

	tracker   prefix.Tracker
	resolved  bool
	committed int64 // what the group has for certain, or none
	buf       []*record
	bufBytes  int64
	upTo      int64 // the position behind everything fetched
	end       int64 // of the log, as the last fetch said: what may be read lies before it
	low       int64 // buffered bytes below which the next fetch starts
	fetchedAt time.Time
	fetchErr  error
}

// record is one message and its delivery.
type record struct {
	l     *lane
	off   int64
	size  int64
	state recordState
	d     brokers.Delivery
}

type recordState uint8

const (
	fetched recordState = iota
	handed
	marked // done, and its commit is still owed
	settled
)

// start begins to read at pos. The caller holds the lock.
func (l *lane) start(pos, committed int64) {
	l.tracker, l.committed, l.upTo, l.resolved = prefix.New(pos), committed, pos, true
}

// add appends what a fetch brought. It reports whether the position moved past
// something that no settlement will ever commit.
func (l *lane) add(rs []*record, next, end int64) (owed bool) {
	s := l.g.s
	s.mu.Lock()
	defer s.mu.Unlock()
	l.fetchedAt, l.fetchErr, l.end = time.Now(), nil, end
	if l.g.phase != active {
		return false
	}
	for _, r := range rs {
		l.bufBytes += r.size
	}
	l.buf = append(l.buf, rs...)
	l.upTo = next
	if len(l.buf) == 0 {
		l.tracker.Skipped(next)
	}
	if len(rs) > 0 {
		s.signal()
	}
	return len(l.buf) == 0 && l.tracker.Unfinished() == 0 && l.tracker.Safe() > l.committed
}

// full tells the fetcher to wait.
func (l *lane) full() bool {
	s := l.g.s
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(l.buf) > 0 && l.bufBytes >= l.low
}

// poke lets the fetcher look again.
func (l *lane) poke() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// take appends up to n deliveries to ds. The caller holds the lock.
func (l *lane) take(ds []*brokers.Delivery, n int) []*brokers.Delivery {
	s := l.g.s
	n = min(n, len(l.buf), s.cfg.MaxLaneSpan-l.tracker.Span())
	if n <= 0 || s.paused[l.name.Name] {
		return ds
	}
	for _, r := range l.buf[:n] {
		l.tracker.Delivered(r.off)
		r.state = handed
		l.bufBytes -= r.size
		ds = append(ds, &r.d)
	}
	clear(l.buf[:n])
	if l.buf = l.buf[n:]; len(l.buf) == 0 {
		l.buf = nil
		l.tracker.Skipped(l.upTo)
	}
	l.g.open += n
	if l.bufBytes < l.low {
		l.poke()
	}
	return ds
}

// prepare completes a record's delivery, so that handing it over costs nothing more.
// Its coordinates are appended to buf.
func (l *lane) prepare(r *record, buf []byte) []byte {
	r.size = r.d.Size()
	r.d.Lane = l.name
	if need := len(l.name.Name) + 21; cap(buf)-len(buf) < need {
		buf = make([]byte, 0, slabSize*need)
	}
	from := len(buf)
	buf = strconv.AppendInt(append(append(buf, l.name.Name...), '@'), r.off, 10)
	r.d.Coordinates = text(buf[from:])
	r.d.Context, r.d.Draining, r.d.Handle = l.ctx, l.g.drain, r
	return buf
}

// lag is the number of offsets that are not done; some may be holes. The caller holds
// the lock.
func (l *lane) lag() int64 {
	if !l.resolved {
		return -1
	}
	return max(0, l.end-l.tracker.Safe())
}
