package rabbitmq

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/twiceproof/twiceproof/brokers"
)

const (
	minBackoff = 200 * time.Millisecond
	maxBackoff = 10 * time.Second
	// missingPoll is how often a missing queue is looked for.
	missingPoll = 400 * time.Millisecond
	// settledAfter is how long a subscription must live for the backoff to start afresh.
	settledAfter = 60 * time.Second
	// fatalTries and fatalFor: a refusal (credentials, permissions) is believed when it
	// was repeated so often and, once the Source had been subscribed, for so long; a
	// broker that is starting refuses too.
	fatalTries = 3
	fatalFor   = 30 * time.Second
)

// Source consumes one queue. Make one by [NewSource].
type Source struct {
	cfg      SourceConfig
	cc       connConfig
	prefetch int
	log      *slog.Logger
	observe  func(brokers.Event)
	epoch    atomic.Uint64

	mu      sync.Mutex
	state   sourceState
	conn    *conn
	sess    *session // the live one; nil while there is none
	buf     []*brokers.Delivery
	waiting int // Receives that wait
	fatal   error
	arrived chan struct{} // cap 1: something for Receive to look at
	wanted  chan struct{} // cap 1: a Receive waits
	stop    context.CancelCauseFunc
	done    chan struct{} // closed when run has ended
}

type sourceState uint8

const (
	sourceNew sourceState = iota
	sourceOpen
	sourceClosed
)

// NewSource returns a Source for the configuration, or everything that is wrong
// with it. It does no I/O.
func NewSource(cfg SourceConfig) (*Source, error) {
	cfg, cc, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	return &Source{cfg: cfg, cc: cc, log: slog.New(slog.DiscardHandler), arrived: make(chan struct{}, 1), wanted: make(chan struct{}, 1), done: make(chan struct{})}, nil
}

// Open implements [brokers.Source]. A broker that cannot be reached is tried again
// until ctx ends; wrong credentials, a missing queue (brokers.ErrNoRoute) and a
// queue with other arguments are errors of class Fatal within seconds.
func (s *Source) Open(ctx context.Context, o brokers.OpenOptions) (brokers.Capabilities, error) {
	s.mu.Lock()
	if s.state != sourceNew {
		s.mu.Unlock()
		return brokers.Capabilities{}, brokers.NewFatal("open", errors.New("a Source serves one Open"), "make another one")
	}
	s.state = sourceOpen
	runCtx, stop := context.WithCancelCause(context.Background())
	s.stop = stop
	s.mu.Unlock()

	if o.Room <= 0 {
		o.Room = defaultRoom
	}
	s.prefetch = min(o.Room, maxPrefetch)
	s.observe = o.Observer
	if o.Logger != nil {
		s.log = o.Logger.With("queue", s.cfg.Queue)
	}
	s.cc.name = "twiceproof consumer " + o.Consumer
	if s.cfg.Topology != Declare {
		s.log.Info("the queue's arguments cannot be read over AMQP: make sure of a dead-letter exchange and x-delivery-limit, or set Topology to Declare",
			"topology", s.cfg.Topology.String())
	}
	// The first subscription belongs to Open, so that mistakes come out here.
	first, err := s.resubscribe(ctx, runCtx, time.Time{})
	if err != nil {
		close(s.done)
		return brokers.Capabilities{}, errors.Join(err, s.Close(ctx))
	}
	go func() { // ends with stop; Close waits for done
		defer close(s.done)
		s.run(runCtx, first)
	}()
	return s.cfg.capabilities(), nil
}

// run serves one subscription after the other.
func (s *Source) run(ctx context.Context, ss *session) {
	for tries := 0; ; {
		began := time.Now()
		err := ss.serve(ctx)
		if ctx.Err() != nil {
			return // Close ends the session, in order and within its own context
		}
		ss.close(ctx, err)
		s.mu.Lock()
		s.sess = nil
		s.mu.Unlock()
		s.log.Warn("the subscription ended; subscribing again", "epoch", ss.lane.Epoch, "error", err)
		s.emit(brokers.Event{Kind: brokers.EventDisconnected, Lane: ss.lane, Err: err})
		// One that got work done was no failure, however short it was.
		if ss.lastAck.Load() != 0 || time.Since(began) >= settledAfter {
			tries = 0
		}
		if !sleep(ctx, backoff(tries)) {
			return
		}
		if errors.Is(err, errGivenBack) && !s.awaitReceive(ctx) {
			return
		}
		tries++
		if ss, err = s.resubscribe(ctx, ctx, time.Now()); err != nil {
			if ctx.Err() == nil {
				s.log.Error("giving up", "error", err)
				s.fail(err)
			}
			return
		}
	}
}

// resubscribe tries until there is a live session, ctx ends, or a refusal is to be
// believed. since is when the last session ended; zero for the first one.
func (s *Source) resubscribe(ctx, runCtx context.Context, since time.Time) (*session, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(runCtx, func() { cancel(context.Cause(runCtx)) })()
	var judge judge
	var last error // of a try that ctx did not cut short
	for n := 0; ; n++ {
		ss, err := s.try(ctx, n)
		if err == nil {
			s.log.Info("subscribed", "epoch", ss.lane.Epoch, "prefetch", s.prefetch)
			s.emit(brokers.Event{Kind: brokers.EventConnected, Lane: ss.lane})
			return ss, nil
		}
		if ctx.Err() != nil {
			return nil, &brokers.Error{Class: brokers.Retryable, Op: "open", Err: errors.Join(context.Cause(ctx), cmp.Or(last, err))}
		}
		last = err
		if judge.fatal(err, since, s.cfg.MissingFor) {
			return nil, err
		}
		s.log.Warn("cannot subscribe; trying again", "try", n+1, "error", err)
		pause := backoff(n)
		if isNoQueue(err) || since.IsZero() && brokers.ClassOf(err) == brokers.Fatal {
			pause = min(pause, missingPoll)
		}
		sleep(ctx, pause)
	}
}

// judge decides when a refusal is to be believed.
type judge struct {
	tries int
	first time.Time
}

func (j *judge) fatal(err error, since time.Time, missingFor time.Duration) bool {
	if brokers.ClassOf(err) != brokers.Fatal {
		*j = judge{}
		return false
	}
	if j.tries++; j.tries == 1 {
		j.first = time.Now()
	}
	var ae *amqp.Error
	inequivalent := errors.As(err, &ae) && ae.Code == amqp.PreconditionFailed
	switch {
	case since.IsZero():
		// The broker says it clearly; the other refusals also come while it starts.
		return inequivalent || j.tries >= fatalTries
	case isNoQueue(err):
		return time.Since(since) >= missingFor
	}
	return j.tries >= fatalTries && time.Since(j.first) >= fatalFor
}

// try makes one attempt: on the connection there is, or on a new one to the next node.
func (s *Source) try(ctx context.Context, n int) (*session, error) {
	s.mu.Lock()
	cn := s.conn
	s.mu.Unlock()
	if !cn.alive() {
		cn.close(ctx)
		var err error
		if cn, err = s.cc.connect(ctx, n); err != nil {
			return nil, err
		}
		s.mu.Lock()
		s.conn = cn
		s.mu.Unlock()
	}
	ss, err := s.subscribe(ctx, cn)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	s.sess = ss
	s.mu.Unlock()
	return ss, nil
}

// backoff is full jitter over a delay that doubles, never quite nothing.
func backoff(n int) time.Duration {
	d := maxBackoff
	if n < 6 {
		d = min(minBackoff<<n, maxBackoff)
	}
	return max(rand.N(d), minBackoff/4)
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

// push appends a delivery for Receive.
func (s *Source) push(d *brokers.Delivery) {
	s.mu.Lock()
	// Its session may have ended since it was registered: then drop has been here.
	if h := d.Handle.(*held); h.sess.alive() {
		s.buf = append(s.buf, d)
	}
	s.mu.Unlock()
	s.signal()
}

func (ss *session) alive() bool {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	return ss.cause == nil
}

// drop removes what an ended session had buffered: the broker delivers it again.
func (s *Source) drop(ss *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.buf = slices.DeleteFunc(s.buf, func(d *brokers.Delivery) bool { return d.Handle.(*held).sess == ss })
}

// forget takes back deliveries that are to go back, and returns those that were not
// handed over.
func (s *Source) forget(hs []*held) (unheard []*held) {
	gone := make(map[*held]bool, len(hs))
	for _, h := range hs {
		gone[h] = true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.buf = slices.DeleteFunc(s.buf, func(d *brokers.Delivery) bool {
		h := d.Handle.(*held)
		if gone[h] {
			unheard = append(unheard, h)
		}
		return gone[h]
	})
	return unheard
}

func (s *Source) fail(err error) {
	s.mu.Lock()
	s.fatal = err
	s.mu.Unlock()
	s.signal()
}

func (s *Source) signal() {
	select {
	case s.arrived <- struct{}{}:
	default:
	}
}

func (s *Source) emit(e brokers.Event) {
	if s.observe != nil {
		s.observe(e)
	}
}

func (s *Source) connection() *conn {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.conn
}

// Receive implements [brokers.Source].
func (s *Source) Receive(ctx context.Context, limit int) ([]*brokers.Delivery, error) {
	for {
		if err := context.Cause(ctx); err != nil {
			return nil, err
		}
		ds, err := s.take(max(limit, 1))
		if len(ds) > 0 || err != nil {
			return ds, err
		}
		s.asking(+1)
		select {
		case <-s.arrived:
		case <-ctx.Done():
		}
		s.asking(-1)
	}
}

func (s *Source) take(limit int) ([]*brokers.Delivery, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.state == sourceClosed:
		s.signal() // for the next call too
		return nil, brokers.ErrClosed
	case s.state == sourceNew:
		return nil, brokers.NewFatal("receive", errors.New("the Source is not open"), "call Open first")
	case len(s.buf) == 0 && s.fatal != nil:
		s.signal()
		return nil, s.fatal
	}
	n := min(limit, len(s.buf))
	ds := slices.Clone(s.buf[:n])
	s.buf = slices.Delete(s.buf, 0, n)
	return ds, nil
}

// Status implements [brokers.Source]. The lag does not count what was handed over;
// the age of messages is unknown to AMQP.
func (s *Source) Status(ctx context.Context) (brokers.Status, error) {
	s.mu.Lock()
	cn, ss, state := s.conn, s.sess, s.state
	s.mu.Unlock()
	if state == sourceClosed {
		return brokers.Status{}, brokers.ErrClosed
	}
	st := brokers.Status{Connected: ss != nil && ss.alive(), Lanes: []brokers.LaneStatus{{Name: s.cfg.Queue, Lag: -1, Oldest: -1}}}
	if !cn.alive() {
		return st, nil
	}
	n, err := cn.readyCount(ctx, s.cfg.Queue)
	if err != nil {
		return st, err
	}
	st.Lanes[0].Lag = n
	return st, nil
}

// Close implements [brokers.Source]. It closes the subscription, by which the
// broker puts back everything unsettled in its old order, and then the connection.
// It waits for up to 150 ms after the last acknowledgement, which the broker may
// otherwise forget.
func (s *Source) Close(ctx context.Context) error {
	s.mu.Lock()
	was := s.state
	s.state = sourceClosed
	stop := s.stop
	s.mu.Unlock()
	s.signal()
	if was != sourceOpen {
		return nil
	}
	stop(brokers.ErrClosed)
	<-s.done // every wait in run ends with stop
	s.mu.Lock()
	ss, cn := s.sess, s.conn
	s.mu.Unlock()
	if ss != nil {
		ss.close(ctx, brokers.ErrClosed)
	}
	cn.close(ctx)
	return nil
}
