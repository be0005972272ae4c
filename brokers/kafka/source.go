package kafka

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/segmentio/kafka-go"

	"github.com/twiceproof/twiceproof/brokers"
)

const (
	// minFetchBytes is what a fetch of one partition may always bring.
	minFetchBytes = 64 << 10
	// minGeneration is the least time between two joins of the group.
	minGeneration = 500 * time.Millisecond
	// fatalTries and fatalFor: a refusal (credentials, permissions) is believed at Open
	// when it was repeated so often, and later when it went on for so long; a broker
	// that is starting refuses too.
	fatalTries = 3
	fatalFor   = 30 * time.Second
)

// Source is a member of a consumer group. Make one by [NewSource].
type Source struct {
	cfg     SourceConfig
	log     *slog.Logger
	observe func(brokers.Event)

	mu        sync.Mutex
	state     sourceState
	consumer  string
	room      int
	roomBytes int64
	c         *client     // of the living membership
	gen       *generation // the living one; nil while joining
	epoch     uint64
	first     int // lane to look at first
	paused    map[string]bool
	fatal     error
	refusedAt time.Time // since when the broker refuses; zero if it does not
	connected bool

	arrived chan struct{} // cap 1: something for Receive to look at
	lookNow chan struct{} // cap 1: something for watch to look at
	ready   chan struct{} // closed with the first generation, or fatal
	once    sync.Once
	closing chan struct{}
	stopRun context.CancelCauseFunc
	works   sync.WaitGroup
}

type sourceState uint8

const (
	sourceNew sourceState = iota
	sourceOpen
	sourceClosed
)

var _ brokers.LanePauser = (*Source)(nil)

// NewSource returns a Source for the configuration, or everything that is wrong with
// it. It does no I/O.
func NewSource(cfg SourceConfig) (*Source, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	return &Source{
		cfg: cfg, log: slog.New(slog.DiscardHandler), paused: map[string]bool{},
		arrived: make(chan struct{}, 1), lookNow: make(chan struct{}, 1), ready: make(chan struct{}), closing: make(chan struct{}),
	}, nil
}

// Open implements [brokers.Source]. It returns once the member has its first
// assignment, which may be empty when the group has more members than partitions. A
// cluster that cannot be reached is tried again until ctx ends; wrong credentials, a
// missing permission and a missing topic (brokers.ErrNoRoute) are errors of class
// Fatal within seconds. A missing topic is not created.
func (s *Source) Open(ctx context.Context, o brokers.OpenOptions) (brokers.Capabilities, error) {
	s.mu.Lock()
	if s.state != sourceNew {
		s.mu.Unlock()
		return brokers.Capabilities{}, brokers.NewFatal("open", errors.New("a Source serves one Open"), "make another one")
	}
	s.state = sourceOpen
	s.consumer, s.observe = o.Consumer, o.Observer
	s.room, s.roomBytes = orDefault(o.Room, defaultRoom), orDefault(o.RoomBytes, defaultRoomBytes)
	if o.Logger != nil {
		s.log = o.Logger.With("group", s.cfg.Group)
	}
	runCtx, stop := context.WithCancelCause(context.Background())
	s.stopRun = stop
	s.mu.Unlock()

	caps, err := s.open(ctx, runCtx)
	if err != nil {
		return brokers.Capabilities{}, errors.Join(err, s.Close(ctx))
	}
	return caps, nil
}

func orDefault[N int | int64](n, zero N) N {
	if n <= 0 {
		return zero
	}
	return n
}

func (s *Source) open(ctx, runCtx context.Context) (brokers.Capabilities, error) {
	c, counts, err := s.inspect(ctx)
	if err != nil {
		return brokers.Capabilities{}, err
	}
	caps := brokers.Capabilities{
		GiveBack: brokers.GiveBackNone, LaneOrdered: true, PrefixSettle: true,
		RedeliveryHorizon: c.horizon(ctx, s.cfg.Topics), Counting: brokers.CountsNothing, StableCoordinates: true,
		SettleBatch: 500, SettleLinger: 100 * time.Millisecond,
	}
	s.works.Go(func() { s.member(runCtx, c) })
	s.works.Go(func() { s.watch(runCtx, counts) })
	select {
	case <-s.ready:
	case <-ctx.Done():
		return brokers.Capabilities{}, &brokers.Error{Class: brokers.Retryable, Op: fmt.Sprintf("join group %q", s.cfg.Group), Err: context.Cause(ctx)}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fatal != nil {
		return brokers.Capabilities{}, s.fatal
	}
	return caps, nil
}

// inspect connects and looks for the topics, which ConsumerGroup would create where the
// broker allows it.
func (s *Source) inspect(ctx context.Context) (*client, map[string]int, error) {
	op := fmt.Sprintf("open topics %q", s.cfg.Topics)
	refusals := 0
	var last error // of a try that ctx did not cut short
	for try := 0; ; try++ {
		// A new one each time: a transport answers from its last failure for a while.
		c := newClient(s.cfg.Brokers, s.cfg.Security, s.clientID(), s.cfg.Topics)
		counts, err := c.partitions(ctx, s.cfg.Topics)
		if err != nil && ctx.Err() == nil {
			err = c.explain(ctx, err)
		}
		if err == nil {
			if missing := s.missing(counts); len(missing) > 0 {
				err = missingTopic(brokers.Fatal, op, missing...)
			}
		}
		if err == nil {
			return c, counts, nil
		}
		c.free()
		err = classify(op, err)
		if ctx.Err() != nil {
			e := &brokers.Error{Class: brokers.Retryable, Op: op, Err: errors.Join(context.Cause(ctx), cmp.Or(last, err))}
			if hang(last) {
				e.Hint = "the broker hangs up without a word: does this port expect TLS or SASL?"
			}
			return nil, nil, e
		}
		last = err
		if brokers.ClassOf(err) == brokers.Fatal {
			if refusals++; refusals >= fatalTries {
				return nil, nil, err
			}
		} else {
			refusals = 0
		}
		s.log.Warn("cannot open; trying again", "try", try+1, "error", err)
		sleep(ctx, min(backoff(try), time.Second))
	}
}

func (s *Source) clientID() string { return "twiceproof-" + s.consumer }

func (s *Source) missing(counts map[string]int) (missing []string) {
	for _, t := range s.cfg.Topics {
		if counts[t] == 0 {
			missing = append(missing, t)
		}
	}
	return missing
}

// gapFails ends the Source by its policy.
func (s *Source) gapFails(l *lane, from, to int64) error {
	err := brokers.NewFatal("read "+l.name.Name, fmt.Errorf("the messages from offset %d to %d are gone before they were read", from, to),
		"decide where the group shall go on and set its offset there (kafka-consumer-groups --reset-offsets)")
	s.fail(err)
	return err
}

func (s *Source) fail(err error) {
	s.log.Error("giving up", "error", err)
	s.mu.Lock()
	if s.fatal == nil {
		s.fatal = err
	}
	s.mu.Unlock()
	s.once.Do(func() { close(s.ready) })
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

// Status implements [brokers.Source]. The lag of a partition counts offsets, which
// includes holes and markers, up to the last committed transaction. It covers the
// partitions of this member. The age of messages is unknown.
func (s *Source) Status(ctx context.Context) (brokers.Status, error) {
	s.mu.Lock()
	state, c, g, connected := s.state, s.c, s.gen, s.connected
	s.mu.Unlock()
	if state != sourceOpen || c == nil {
		return brokers.Status{}, brokers.ErrClosed
	}
	if g == nil {
		return brokers.Status{Connected: connected}, nil
	}
	err := g.refresh(ctx, c)
	s.mu.Lock()
	defer s.mu.Unlock()
	st := brokers.Status{Connected: connected && g.phase == active}
	for _, l := range g.lanes {
		st.Lanes = append(st.Lanes, brokers.LaneStatus{Name: l.name.Name, Lag: l.lag(), Oldest: -1})
	}
	return st, err
}

// refresh asks for the ends of the lanes: a lane that is paused or full does not know.
func (g *generation) refresh(ctx context.Context, c *client) error {
	req := &kafka.ListOffsetsRequest{Topics: map[string][]kafka.OffsetRequest{}, IsolationLevel: kafka.ReadCommitted}
	if g.s.cfg.ReadUncommitted {
		req.IsolationLevel = kafka.ReadUncommitted
	}
	for _, l := range g.lanes {
		req.Topics[l.topic] = append(req.Topics[l.topic], kafka.LastOffsetOf(l.num))
	}
	if len(req.Topics) == 0 {
		return nil
	}
	res, err := c.ListOffsets(ctx, req)
	if err != nil {
		return classify("status", causeOf(ctx, err))
	}
	g.s.mu.Lock()
	defer g.s.mu.Unlock()
	for _, l := range g.lanes {
		for _, p := range res.Topics[l.topic] {
			if p.Partition == l.num && p.Error == nil {
				l.end = max(l.end, p.LastOffset)
			}
		}
	}
	return nil
}

// Close implements [brokers.Source]. It commits what is done, ends the contexts of all
// deliveries and leaves the group, so that others get its partitions at once. When ctx
// ends first, the group notices after SessionTimeout; what still waits for the broker
// then ends by itself within seconds.
func (s *Source) Close(ctx context.Context) error {
	s.mu.Lock()
	was := s.state
	s.state = sourceClosed
	g, joined := s.gen, s.c != nil
	s.mu.Unlock()
	s.signal()
	if was != sourceOpen {
		return nil
	}
	var err error
	if g != nil {
		if cerr := g.commit(ctx, false); cerr != nil && !errors.Is(cerr, brokers.ErrOwnershipLost) {
			err = cerr
		}
		g.fence(brokers.ErrClosed)
	}
	close(s.closing)
	s.stopRun(brokers.ErrClosed)
	done := make(chan struct{})
	go func() { s.works.Wait(); close(done) }()
	select {
	case <-done:
	case <-ctx.Done():
		if joined {
			err = errors.Join(err, context.Cause(ctx))
		}
	}
	if err != nil {
		return &brokers.Error{Class: brokers.Retryable, Op: "close", Err: err, Hint: "the group notices by itself when the session times out; what is not committed is delivered again"}
	}
	return nil
}
