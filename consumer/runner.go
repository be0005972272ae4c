package consumer

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/inbox"
	"github.com/twiceproof/twiceproof/internal/lanes"
)

// Runner takes messages from a source and runs a handler on them.
type Runner struct {
	cfg  Config
	impl interface {
		run(ctx context.Context) error
	}
	state *state
}

// state is what a Runner shows of its inner loop.
type state struct {
	stats   counters
	pause   *valve
	mu      sync.Mutex
	stop    context.CancelCauseFunc
	done    chan struct{}
	ready   bool
	health  map[string]error
	started bool
}

type counters struct {
	received, processed, duplicates, held, dead, discarded, failures, conflicts, lost, released, reruns, abandoned atomic.Int64
}

// Stats are counts since Run began.
type Stats struct {
	Received   int64 // deliveries
	Processed  int64 // committed effects
	Duplicates int64 // deliveries settled without work
	Held       int64 // messages held, dead ones included
	Dead       int64
	Discarded  int64
	Failures   int64 // failed runs
	Conflicts  int64 // IDs used for other content
	Lost       int64 // deliveries whose ownership was lost
	Released   int64 // deliveries given back
	Reruns     int64 // serialization failures and deadlocks
	Abandoned  int64 // handlers that did not return
}

// names of the runners that run in this process.
var names sync.Map

// New returns a Runner. A wrong Config is reported whole.
func New[Tx any](s inbox.Store[Tx], src brokers.Source, h Handler[Tx], cfg Config, opts ...Option[Tx]) (*Runner, error) {
	if s == nil || src == nil || h == nil {
		return nil, errors.New("consumer: store, source and handler are required")
	}
	sw, _ := s.(interface{ SingleWriter() bool })
	cfg, err := cfg.withDefaults(s.PoolSize(), sw != nil && sw.SingleWriter())
	if err != nil {
		return nil, err
	}
	st := &state{done: make(chan struct{}), health: map[string]error{}, pause: newValve()}
	l := &loop[Tx]{cfg: cfg, store: s, src: src, handler: h, st: st, jobs: lanes.New[*job](), wake: make(chan struct{}, 1)}
	l.gate, l.pause = newGate(l), st.pause
	l.budget = newBudget(cfg.RetryBudget, cfg.Concurrency)
	l.suspects = newSuspects()
	l.breaker = newBreaker(cfg.Breaker, l.downstream)
	for _, o := range opts {
		o(l)
	}
	return &Runner{cfg: cfg, impl: l, state: st}, nil
}

// Run consumes until ctx ends: then it stops receiving, lets running handlers
// finish for DrainTimeout, settles what is committed, gives back the rest and
// returns nil. Errors: a wrong configuration, found before anything is consumed, or
// an error of class Fatal from the source. A Runner runs once.
func (r *Runner) Run(ctx context.Context) error {
	r.state.mu.Lock()
	if r.state.started {
		r.state.mu.Unlock()
		return errors.New("consumer: a Runner runs once; make a new one")
	}
	r.state.started = true
	ctx, stop := context.WithCancelCause(ctx)
	r.state.stop = stop
	r.state.mu.Unlock()
	defer close(r.state.done)
	defer stop(nil)
	if _, taken := names.LoadOrStore(r.cfg.Name, r); taken {
		return fmt.Errorf("consumer: a runner named %q runs in this process already; give each its own Name, or raise Concurrency", r.cfg.Name)
	}
	defer names.Delete(r.cfg.Name)
	return r.impl.run(ctx)
}

// Shutdown ends Run and waits for it, until ctx ends.
func (r *Runner) Shutdown(ctx context.Context) error {
	r.state.mu.Lock()
	stop := r.state.stop
	r.state.mu.Unlock()
	if stop == nil {
		return nil
	}
	stop(nil)
	select {
	case <-r.state.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Stats returns the counts.
func (r *Runner) Stats() Stats {
	c := &r.state.stats
	return Stats{c.received.Load(), c.processed.Load(), c.duplicates.Load(), c.held.Load(), c.dead.Load(), c.discarded.Load(),
		c.failures.Load(), c.conflicts.Load(), c.lost.Load(), c.released.Load(), c.reruns.Load(), c.abandoned.Load()}
}

// Ready returns nil once the source is open and the database usable.
func (r *Runner) Ready() error {
	r.state.mu.Lock()
	defer r.state.mu.Unlock()
	if !r.state.ready {
		return errors.New("not consuming")
	}
	return r.state.problems()
}

// Healthy returns nil unless something needs a person or has stopped the intake.
func (r *Runner) Healthy() error {
	r.state.mu.Lock()
	defer r.state.mu.Unlock()
	return r.state.problems()
}

func (s *state) problems() error {
	var errs []error
	for what, err := range s.health {
		errs = append(errs, fmt.Errorf("%s: %w", what, err))
	}
	return errors.Join(errs...)
}

func (s *state) report(what string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil {
		delete(s.health, what)
	} else {
		s.health[what] = err
	}
}

// loop is the Runner with its transaction type.
type loop[Tx any] struct {
	cfg      Config
	store    inbox.Store[Tx]
	src      brokers.Source
	handler  Handler[Tx]
	st       *state
	caps     brokers.Capabilities
	jobs     *lanes.Lanes[*job]
	room     *room
	settler  *settler
	gate     *gate
	breaker  *breaker
	suspects *suspects
	leaving  sync.WaitGroup // lanes that are being left
	budget   *budget
	pause    *valve

	deadLetter func(ctx context.Context, tx Tx, it *inbox.Item, o outcome, death int) error // nil: nobody wants it

	broken   sync.Map      // held messages that lost their connection: seq -> times in a row
	stuck    atomic.Int64  // handlers that go on past their context
	full     atomic.Bool   // MaxHeld is reached
	forgets  atomic.Int64  // the age of what the inbox may have forgotten, 0 nothing
	heads    atomic.Int64  // held messages that are taken and not finished
	busy     atomic.Int64  // workers in a job
	progress atomic.Int64  // when a job was last finished, or the first one came
	wake     chan struct{} // a head may be due

	values   context.Context // Run's values without its end
	stopping context.Context // ends with Run's ctx
	drained  context.Context // ends with the drain deadline
}

// errDraining is the cause of a handler's context at the drain deadline.
var errDraining = errors.New("the consumer is shutting down and its drain deadline has passed")

// cancelled: a stop that came while starting is a stop like any other; nothing was
// taken. A deadline is not: whoever sets one wants to know that it was not enough.
func cancelled(ctx context.Context) bool { return errors.Is(ctx.Err(), context.Canceled) }

func (l *loop[Tx]) run(ctx context.Context) error {
	if err := l.store.Check(ctx); err != nil {
		if cancelled(ctx) {
			return nil
		}
		return fmt.Errorf("consumer %s: %w", l.cfg.Name, err)
	}
	caps, err := l.src.Open(ctx, brokers.OpenOptions{Consumer: l.cfg.Name, Room: l.cfg.Room, RoomBytes: l.cfg.RoomBytes,
		Observer: l.observe, Logger: l.cfg.Logger})
	if err != nil {
		_ = l.closeSource(ctx)
		if cancelled(ctx) {
			return nil
		}
		return fmt.Errorf("consumer %s: open the source: %w", l.cfg.Name, err)
	}
	l.caps = caps
	if l.cfg.RequireOrder && !caps.LaneOrdered {
		_ = l.closeSource(ctx)
		return fmt.Errorf("consumer %s: RequireOrder is set, but this source keeps no order: use Kafka, SQS FIFO, or a RabbitMQ queue with a single active consumer", l.cfg.Name)
	}
	warning, err := inbox.CheckWindow(l.cfg.Window, caps.RedeliveryHorizon)
	if err != nil {
		_ = l.closeSource(ctx)
		return fmt.Errorf("consumer %s: %w", l.cfg.Name, err)
	}
	if warning != "" {
		l.cfg.Logger.Warn(warning)
	}
	l.values = context.WithoutCancel(ctx)
	ctx, stopped := context.WithCancel(ctx)
	defer stopped()
	l.stopping = ctx
	drained, drain := context.WithCancelCause(l.values)
	l.drained = drained
	defer drain(nil)
	l.room = newRoom(l.cfg.Room, l.cfg.RoomBytes)
	l.settler = newSettler(l)
	l.setReady(true)

	var helpers, workers sync.WaitGroup
	helpers.Go(l.settler.run)
	background, stopBackground := context.WithCancel(l.values)
	helpers.Go(func() { l.gate.run(background) })
	var tenders sync.WaitGroup
	tenders.Go(func() { l.tendHeld(ctx) })
	tenders.Go(func() { l.tendRetention(ctx) })
	for range l.cfg.Concurrency {
		workers.Go(l.work)
	}
	// The drain deadline runs from the moment ctx ends, whatever else must end first:
	// a handler may hold the one connection that the others wait for.
	defer context.AfterFunc(ctx, func() {
		if sleep(drained, l.cfg.DrainTimeout) {
			drain(errDraining)
		}
	})()
	err = l.intake(ctx)
	stopped()
	l.setReady(false)
	tenders.Wait()
	l.giveBack(l.jobs.Close())
	workers.Wait()
	stopBackground()
	l.settler.close()
	helpers.Wait()
	err = errors.Join(err, l.closeSource(ctx))
	l.leaveLanes()
	return err
}

// downstream reports that what the handler depends on is out, or is back.
func (l *loop[Tx]) downstream(err error) {
	l.st.report("handler's downstream", err)
	if err != nil {
		l.cfg.Logger.Error("nearly every run fails; consuming is paused", "error", err)
	} else {
		l.cfg.Logger.Info("a run has succeeded; consuming goes on")
	}
}

func (l *loop[Tx]) setReady(ok bool) {
	l.st.mu.Lock()
	l.st.ready = ok
	l.st.mu.Unlock()
}

func (l *loop[Tx]) closeSource(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	return l.src.Close(ctx)
}

func (l *loop[Tx]) observe(e brokers.Event) {
	switch e.Kind {
	case brokers.EventConnected:
		l.st.report("broker", nil)
	case brokers.EventLaneRevoked:
		l.revoked(e.Lane.Name)
	case brokers.EventDisconnected, brokers.EventStalled:
		err := e.Err
		if err == nil {
			err = errors.New(string(e.Kind))
		}
		l.st.report("broker", err)
	}
	l.cfg.Logger.Info("broker event", "kind", e.Kind, "lane", e.Lane.Name, "from", e.From, "to", e.To, "count", e.Count, "error", e.Err)
}

// intake receives as much as there is room for, until ctx ends.
func (l *loop[Tx]) intake(ctx context.Context) error {
	pause := 100 * time.Millisecond
	for {
		if !l.gate.wait(ctx) || !l.waitNotFull(ctx) || !l.pause.wait(ctx) {
			return nil
		}
		n, ok := l.room.free(ctx)
		if !ok {
			return nil
		}
		if l.breaker.isOpen() {
			if l.room.inHand() > 0 { // something to probe with is there
				sleep(ctx, 50*time.Millisecond)
				continue
			}
			n = 1
		}
		// A Receive that waits on, while nobody could process what it returns, would keep
		// messages from consumers that can.
		receive, cancel := l.pause.during(ctx)
		receive, cancelToo := l.gate.during(receive)
		ds, err := l.src.Receive(receive, n)
		paused := receive.Err() != nil
		cancelToo()
		cancel()
		for _, d := range ds {
			l.accept(d)
		}
		switch {
		case ctx.Err() != nil:
			return nil
		case err == nil || paused:
			pause = 100 * time.Millisecond
			continue
		case brokers.ClassOf(err) == brokers.Fatal:
			return fmt.Errorf("consumer %s: receive: %w", l.cfg.Name, err)
		}
		l.cfg.Logger.Warn("receive failed; trying again", "error", err, "pause", pause)
		sleep(ctx, pause)
		pause = min(2*pause, 5*time.Second)
	}
}

func (l *loop[Tx]) waitNotFull(ctx context.Context) bool {
	for l.full.Load() {
		if !sleep(ctx, 500*time.Millisecond) {
			return false
		}
	}
	return ctx.Err() == nil
}

// sleep waits for d, and reports false when ctx ended first.
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

// accept queues a delivery.
func (l *loop[Tx]) accept(d *brokers.Delivery) {
	n := l.st.stats.received.Add(1)
	if l.room.take(d.Size()) {
		l.progress.Store(time.Now().UnixNano())
	}
	j := &job{d: d, received: time.Now(), arrival: uint64(n)}
	var key []byte
	switch l.cfg.Order {
	case ByKey:
		key = inbox.OrderKey(d.Key)
	case ByLane:
		key = inbox.OrderKey(d.Lane.Name)
	}
	j.item, j.defect = inbox.NewItem(&d.Message, d.Coordinates, key)
	if d.Defect != nil {
		j.defect = d.Defect
	}
	if !l.jobs.Push(string(key), j) {
		l.giveBack([]*job{j})
	}
}

// giveBack releases deliveries that have not started. Where the broker has no way to
// take one back, closing the source does it.
func (l *loop[Tx]) giveBack(js []*job) {
	for _, j := range js {
		l.release(j)
	}
}

func (l *loop[Tx]) release(j *job) {
	if j.head != nil {
		l.headDone(j)
		l.returnHead(j, 0)
		return
	}
	l.st.stats.released.Add(1)
	if l.caps.GiveBack == brokers.GiveBackNone && !isClosed(j.d.Draining) {
		l.room.give(j.d.Size())
		return
	}
	l.settler.add(j, brokers.Release)
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
