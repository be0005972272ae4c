package memory

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
)

// Source returns a Source of the queue, channel or topic called name. Sources are
// numbered in the order of these calls: make them in one goroutine where the
// History must be repeatable. The Source also implements [brokers.LanePauser].
func (b *Broker) Source(name string, opts ...SourceOption) brokers.Source {
	o := sourceOptions{group: "default"}
	for _, opt := range opts {
		opt(&o)
	}
	if o.span <= 0 {
		o.span = 1000
	}
	if o.drain <= 0 {
		o.drain = 10 * time.Second
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.sources++
	bs := base{b: b, n: b.sources, name: name, opts: o, wake: make(chan struct{})}
	d, err := b.find(name)
	if err != nil {
		return &missing{err: err}
	}
	return d.source(bs)
}

// missing is the Source of a name that was not declared on a strict broker: it says
// so where configuration mistakes come out, in Open.
type missing struct{ err error }

func (m *missing) Open(context.Context, brokers.OpenOptions) (brokers.Capabilities, error) {
	return brokers.Capabilities{}, brokers.NewFatal("open", m.err, "declare it before its Source is made")
}
func (m *missing) Receive(context.Context, int) ([]*brokers.Delivery, error) {
	return nil, brokers.ErrClosed
}
func (m *missing) Settle(_ context.Context, ss ...brokers.Settlement) []error {
	return all(len(ss), brokers.ErrClosed)
}
func (m *missing) Status(context.Context) (brokers.Status, error) {
	return brokers.Status{}, m.err
}
func (m *missing) Close(context.Context) error { return nil }

func all(n int, err error) []error {
	errs := make([]error, n)
	for i := range errs {
		errs[i] = err
	}
	return errs
}

// profile is what the three kinds of Sources do differently. All methods are called
// with the broker's mutex held.
type profile interface {
	common() *base
	capabilities() brokers.Capabilities
	register(now time.Time)                                      // at Open
	take(now time.Time, max int) ([]*brokers.Delivery, error)    // what there is
	wakeAt(now time.Time) (time.Time, bool)                      // when take may find more by itself
	settle(now time.Time, ss []brokers.Settlement, errs []error) // one error each
	next() (time.Time, bool)                                     // when work is due
	work(now time.Time)                                          // heartbeats, leases, rebalances
	leave(now time.Time)                                         // at Close: give back what is unsettled
	status(now time.Time) []brokers.LaneStatus                   // for Status
	disconnect(now time.Time, cause error, down time.Duration)   // lose the connection
}

// base is what the Sources have in common.
type base struct {
	b    *Broker
	n    int // number of the Source
	name string
	opts sourceOptions
	self profile

	// Guarded by b.mu.
	state     sourceState
	o         brokers.OpenOptions
	room      int
	bytesRoom int64
	wake      chan struct{} // closed and replaced to wake Receive
	waiting   bool          // Receive waits for wake
	kick      chan struct{} // wakes the pump; one slot
	paused    map[string]bool
	held      int   // handed over and unsettled
	heldBytes int64 // their sizes
	calls     uint64
	downUntil time.Time
	connected bool

	stop chan struct{}
	done chan struct{} // closed when the pump has ended
}

type sourceState uint8

const (
	isNew sourceState = iota
	isOpen
	isClosed
)

// Open implements [brokers.Source].
func (s *base) Open(ctx context.Context, o brokers.OpenOptions) (brokers.Capabilities, error) {
	if err := ctx.Err(); err != nil {
		return brokers.Capabilities{}, err
	}
	s.b.step(stepKey{op: "open", name: s.name, who: s.n})
	s.b.mu.Lock()
	defer s.b.unlock()
	switch s.state {
	case isOpen:
		return brokers.Capabilities{}, fmt.Errorf("memory: the Source of %q is open already: a Source serves one Open", s.name)
	case isClosed:
		return brokers.Capabilities{}, fmt.Errorf("memory: the Source of %q: %w", s.name, brokers.ErrClosed)
	}
	s.state, s.o = isOpen, o
	if s.o.Logger == nil {
		s.o.Logger = slog.New(slog.DiscardHandler)
	}
	if s.room = o.Room; s.room <= 0 {
		s.room = 64
	}
	if s.bytesRoom = o.RoomBytes; s.bytesRoom <= 0 {
		s.bytesRoom = 64 << 20
	}
	s.kick = make(chan struct{}, 1)
	s.stop, s.done = make(chan struct{}), make(chan struct{})
	s.connected = true
	now := time.Now()
	s.b.record(now, Entry{Op: "open", Name: s.name, Outcome: "ok"})
	s.emit(brokers.Event{Kind: brokers.EventConnected})
	s.self.register(now)
	go s.pump()
	return s.self.capabilities(), nil
}

// Receive implements [brokers.Source].
func (s *base) Receive(ctx context.Context, max int) ([]*brokers.Delivery, error) {
	max = cap1(max)
	for {
		if s.b.cfg.Seed != 0 {
			s.b.mu.Lock()
			s.calls++
			k := stepKey{op: "receive", name: s.name, who: s.n, n: s.calls}
			s.b.mu.Unlock()
			s.b.step(k)
		}
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		ds, wake, at, err := s.tryReceive(max)
		if len(ds) > 0 || err != nil {
			return ds, err
		}
		var due <-chan time.Time
		var timer *time.Timer
		if !at.IsZero() {
			timer = time.NewTimer(time.Until(at))
			due = timer.C
		}
		select {
		case <-ctx.Done():
		case <-wake:
		case <-due:
		}
		if timer != nil {
			timer.Stop()
		}
	}
}

func cap1(n int) int { return max(n, 1) }

func (s *base) tryReceive(max int) (ds []*brokers.Delivery, wake chan struct{}, at time.Time, err error) {
	s.b.mu.Lock()
	defer s.b.unlock()
	s.waiting = false
	switch s.state {
	case isNew:
		return nil, nil, at, fmt.Errorf("memory: Receive on %q before Open", s.name)
	case isClosed:
		return nil, nil, at, brokers.ErrClosed
	}
	now := time.Now()
	if !s.up(now) {
		s.waiting = true
		return nil, s.wake, s.downUntil, nil
	}
	if free := s.room - s.held; free > 0 && s.heldBytes < s.bytesRoom {
		if ds, err = s.self.take(now, min(max, free)); len(ds) > 0 || err != nil {
			return ds, nil, at, err
		}
	}
	s.waiting = true
	if t, ok := s.self.wakeAt(now); ok && t.After(now) {
		at = t
	}
	return nil, s.wake, at, nil
}

// up reports whether the subscription is connected, and notes that it is again.
func (s *base) up(now time.Time) bool {
	if s.downUntil.After(now) {
		return false
	}
	if !s.connected {
		s.connected = true
		s.b.record(now, Entry{Op: "connect", Name: s.name, Outcome: "ok"})
		s.emit(brokers.Event{Kind: brokers.EventConnected})
	}
	return true
}

// down notes a lost connection that heals after d.
func (s *base) down(now time.Time, cause error, d time.Duration) {
	s.connected = false
	s.downUntil = now.Add(d)
	outcome := "ok"
	if cause != nil {
		outcome = cause.Error()
	}
	s.b.record(now, Entry{Op: "disconnect", Name: s.name, Outcome: outcome})
	s.emit(brokers.Event{Kind: brokers.EventDisconnected, Err: cause})
	s.awake()
}

// full reports whether no more bytes may be handed over.
func (s *base) full() bool { return s.heldBytes >= s.bytesRoom }

func (s *base) hold(it *item)  { s.held++; s.heldBytes += it.m.Size() }
func (s *base) letGo(it *item) { s.held--; s.heldBytes -= it.m.Size(); s.awake() }
func (s *base) poke()          { nonBlocking(s.kick) }
func (s *base) emit(e brokers.Event) {
	if f := s.o.Observer; f != nil {
		s.b.later = append(s.b.later, func() { f(e) })
	}
}

// awake lets Receive look again.
func (s *base) awake() {
	if s.waiting {
		s.waiting = false
		close(s.wake)
		s.wake = make(chan struct{})
	}
}

func nonBlocking(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Settle implements [brokers.Source].
func (s *base) Settle(ctx context.Context, ss ...brokers.Settlement) []error {
	if len(ss) == 0 {
		return nil
	}
	if err := ctx.Err(); err != nil {
		return all(len(ss), err)
	}
	if d := ss[0].Delivery; d != nil && s.b.cfg.Seed != 0 {
		s.b.step(stepKey{op: ss[0].Verb.String(), name: d.Lane.String(), id: d.ID, who: s.n, n: serial(d)})
	}
	s.b.mu.Lock()
	defer s.b.unlock()
	switch s.state {
	case isNew:
		return all(len(ss), fmt.Errorf("memory: Settle on %q before Open", s.name))
	case isClosed:
		return all(len(ss), brokers.ErrClosed)
	}
	errs := make([]error, len(ss))
	s.self.settle(time.Now(), ss, errs)
	return errs
}

// serial tells the deliveries of one message on one lane apart.
func serial(d *brokers.Delivery) uint64 {
	switch h := d.Handle.(type) {
	case *lease:
		return h.handle
	case *tag:
		return h.n
	case *record:
		return uint64(h.it.pos)
	}
	return 0
}

// lost is the answer to a settlement that comes too late.
func (s *base) lost(now time.Time, d *brokers.Delivery) error {
	e := Entry{Op: "settle", Name: s.name, Outcome: "lost"}
	var lane brokers.Lane
	if d != nil {
		e.ID, e.Lane, lane = d.ID, d.Lane, d.Lane
	}
	s.b.record(now, e)
	s.emit(brokers.Event{Kind: brokers.EventSettleLost, Lane: lane, Count: 1})
	return brokers.ErrOwnershipLost
}

func unknownVerb(v brokers.Verb) error {
	return &brokers.Error{Class: brokers.Permanent, Op: "settle", Err: fmt.Errorf("unknown verb %v: use Done, Retry, Release or Reject", v)}
}

func unsupported(v brokers.Verb, why string) error {
	return &brokers.Error{Class: brokers.Permanent, Op: v.String(), Err: brokers.ErrUnsupported, Hint: why}
}

// Status implements [brokers.Source].
func (s *base) Status(ctx context.Context) (brokers.Status, error) {
	if err := ctx.Err(); err != nil {
		return brokers.Status{}, err
	}
	s.b.mu.Lock()
	defer s.b.unlock()
	if s.state != isOpen {
		return brokers.Status{}, brokers.ErrClosed
	}
	now := time.Now()
	return brokers.Status{Connected: !s.downUntil.After(now), Lanes: s.self.status(now)}, nil
}

// Close implements [brokers.Source].
func (s *base) Close(ctx context.Context) error {
	s.b.step(stepKey{op: "close", name: s.name, who: s.n})
	s.b.mu.Lock()
	was := s.state
	s.state = isClosed
	if was == isOpen {
		now := time.Now()
		s.self.leave(now)
		s.b.record(now, Entry{Op: "close", Name: s.name, Outcome: "ok"})
		s.waiting = true
		s.awake()
		close(s.stop)
	}
	s.b.unlock()
	if was == isNew {
		return nil
	}
	select {
	case <-s.done:
	case <-ctx.Done(): // the pump ends by itself: it waits for nothing but time
	}
	return nil
}

// pump does what is due: heartbeats, leases that run out, rebalances.
func (s *base) pump() {
	defer close(s.done)
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	n := uint64(0) // works done, not turns of the loop: kicks may or may not coalesce
	for {
		s.b.mu.Lock()
		open := s.state == isOpen
		var at time.Time
		ok := false
		if open {
			at, ok = s.self.next()
		}
		s.b.unlock()
		if !open {
			return
		}
		if ok && !at.After(time.Now()) {
			n++
			s.b.step(stepKey{op: "work", name: s.name, who: s.n, n: n})
			s.b.mu.Lock()
			if s.state == isOpen {
				s.self.work(time.Now())
			}
			s.b.unlock()
			continue
		}
		if ok {
			timer.Reset(time.Until(at))
		} else {
			timer.Reset(time.Hour)
		}
		select {
		case <-timer.C:
		case <-s.kick:
		case <-s.stop:
			return
		}
	}
}

// Pause implements [brokers.LanePauser]: nothing more of the lanes is handed over.
func (s *base) Pause(lanes ...string) {
	s.b.mu.Lock()
	defer s.b.unlock()
	if s.paused == nil {
		s.paused = map[string]bool{}
	}
	for _, l := range lanes {
		s.paused[l] = true
	}
}

// Resume implements [brokers.LanePauser].
func (s *base) Resume(lanes ...string) {
	s.b.mu.Lock()
	defer s.b.unlock()
	for _, l := range lanes {
		delete(s.paused, l)
	}
	s.awake()
}
