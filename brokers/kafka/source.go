package kafka

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
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

// member serves one membership after the other; there is another one only after a
// stall.
func (s *Source) member(ctx context.Context, c *client) {
	for {
		s.mu.Lock()
		s.c = c
		s.mu.Unlock()
		s.join(ctx, c)
		c.free()
		if ctx.Err() != nil {
			return
		}
		c = newClient(s.cfg.Brokers, s.cfg.Security, s.clientID(), s.cfg.Topics)
	}
}

// join is a member of the group until ctx ends or the membership stalls.
func (s *Source) join(ctx context.Context, c *client) {
	cg, err := kafka.NewConsumerGroup(kafka.ConsumerGroupConfig{
		ID: s.cfg.Group, Brokers: s.cfg.Brokers, Dialer: c.dialer, Topics: s.cfg.Topics,
		HeartbeatInterval: s.cfg.HeartbeatInterval, SessionTimeout: s.cfg.SessionTimeout, RebalanceTimeout: s.cfg.RebalanceTimeout,
		// The watch is ours: kafka-go's would create a topic that was deleted, and spins.
		JoinGroupBackoff: time.Second, Timeout: 5 * time.Second, WatchPartitionChanges: false,
		// RetentionTime stays unset: sent, it would expire the offsets of a living group.
	})
	if err != nil {
		s.fail(brokers.NewFatal("kafka.SourceConfig", err, ""))
		return
	}
	// Close waits for the broker: bounded by kafka-go's own timeouts, and by our Close.
	defer func() { _ = cg.Close() }()
	for {
		g, err := cg.Next(ctx)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			s.disconnected(classify(fmt.Sprintf("join group %q", s.cfg.Group), err))
			continue
		}
		gen := s.begin(c, g)
		s.log.Info("joined", "generation", g.ID, "lanes", len(gen.lanes))
		s.mu.Lock()
		s.connected, s.refusedAt = true, time.Time{}
		s.mu.Unlock()
		s.emit(brokers.Event{Kind: brokers.EventConnected})
		s.once.Do(func() { close(s.ready) })
		if stalled := gen.supervise(ctx); stalled {
			return
		}
	}
}

// supervise waits for the generation's end. It reports whether the connections are to
// be made anew.
func (g *generation) supervise(ctx context.Context) (stalled bool) {
	s := g.s
	t := time.NewTicker(max(s.cfg.StallAfter/4, 10*time.Millisecond))
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return false
		case <-g.drain:
			return false
		case <-t.C:
		}
		if l, err := g.stall(); l != nil {
			s.log.Error("the partition stalls: connecting afresh", "lane", l.name.Name, "error", err)
			s.emit(brokers.Event{Kind: brokers.EventStalled, Lane: l.name, Err: err})
			return true
		}
	}
}

// stall finds a lane that wants to read and could not for too long.
func (g *generation) stall() (*lane, error) {
	g.s.mu.Lock()
	defer g.s.mu.Unlock()
	for _, l := range g.lanes {
		waiting := len(l.buf) > 0 // there is enough to hand over
		if waiting {
			l.fetchedAt = time.Now()
		}
		if !waiting && time.Since(l.fetchedAt) > g.s.cfg.StallAfter {
			return l, l.fetchErr
		}
	}
	return nil, nil
}

// disconnected reports that the member could not join.
func (s *Source) disconnected(err error) {
	s.log.Warn("cannot join the group; trying again", "error", err)
	s.mu.Lock()
	was := s.connected
	s.connected = false
	s.mu.Unlock()
	if was {
		s.emit(brokers.Event{Kind: brokers.EventDisconnected, Err: err})
	}
	if brokers.ClassOf(err) == brokers.Fatal {
		s.refused(err)
	}
}

// refused notes an error of class Fatal, which is believed after a while.
func (s *Source) refused(err error) {
	s.mu.Lock()
	if s.refusedAt.IsZero() {
		s.refusedAt = time.Now()
	}
	patience := fatalFor
	select {
	case <-s.ready:
	default:
		patience = 2 * time.Second // Open has seen the topics: only the group refuses
	}
	believed := time.Since(s.refusedAt) >= patience
	s.mu.Unlock()
	if believed {
		s.fail(err)
	}
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
		select {
		case <-s.arrived:
		case <-ctx.Done():
		}
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
	case s.fatal != nil:
		s.signal()
		return nil, s.fatal
	}
	g := s.gen
	if g == nil || g.phase != active || len(g.lanes) == 0 {
		return nil, nil
	}
	limit = min(limit, s.room-g.open)
	if limit <= 0 {
		return nil, nil // Settle signals
	}
	n := len(g.lanes)
	s.first = (s.first + 1) % n
	var ds []*brokers.Delivery
	// Every lane gets a share first; then the rest goes to those that have more.
	for _, quota := range []int{(limit + n - 1) / n, limit} {
		for i := range n {
			if len(ds) == limit {
				return ds, nil
			}
			ds = g.lanes[(s.first+i)%n].take(ds, min(quota, limit-len(ds)))
		}
	}
	return ds, nil
}

// Pause implements [brokers.LanePauser].
func (s *Source) Pause(lanes ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range lanes {
		s.paused[l] = true
	}
}

// Resume implements [brokers.LanePauser].
func (s *Source) Resume(lanes ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range lanes {
		delete(s.paused, l)
	}
	s.signal()
}

// Settle implements [brokers.Source]. Done commits the offsets that are contiguous by
// it, and is nil also where an earlier message still holds the offset back.
func (s *Source) Settle(ctx context.Context, ss ...brokers.Settlement) []error {
	errs := make([]error, len(ss))
	owed := map[*generation][]int{}
	lost := map[brokers.Lane]int{}
	s.mu.Lock()
	closed := s.state == sourceClosed
	for i, st := range ss {
		r, err := s.settleable(st)
		if err == nil {
			switch {
			case st.Verb == brokers.Release:
				s.settled(r)
			case r.state == handed:
				r.state = marked
				r.l.tracker.Done(r.off)
				fallthrough
			default:
				owed[r.l.g] = append(owed[r.l.g], i)
			}
		}
		if errors.Is(err, brokers.ErrOwnershipLost) {
			if lost[st.Delivery.Lane]++; closed {
				err = brokers.ErrClosed
			}
		}
		errs[i] = err
	}
	s.mu.Unlock()
	for g, is := range owed {
		err := g.commit(ctx, false)
		if errors.Is(err, brokers.ErrOwnershipLost) {
			lost[ss[is[0]].Delivery.Lane] += len(is)
		}
		s.mu.Lock()
		for _, i := range is {
			errs[i] = err
			if err == nil {
				s.settled(ss[i].Delivery.Handle.(*record))
			}
		}
		s.mu.Unlock()
	}
	for _, l := range slices.SortedFunc(maps.Keys(lost), func(a, b brokers.Lane) int { return int(a.Epoch) - int(b.Epoch) }) {
		s.emit(brokers.Event{Kind: brokers.EventSettleLost, Lane: l, Count: lost[l]})
	}
	return errs
}

// settleable returns the record of a settlement that may go on. The caller holds the
// lock.
func (s *Source) settleable(st brokers.Settlement) (*record, error) {
	if st.Delivery == nil {
		return nil, brokers.NewFatal("settle", errors.New("a Settlement without a Delivery"), "settle what Receive returned")
	}
	r, ok := st.Delivery.Handle.(*record)
	if !ok || r.l.g.s != s {
		return nil, brokers.NewFatal("settle", errors.New("a delivery of another Source"), "settle what Receive of this Source returned")
	}
	switch {
	case r.state == settled:
		return nil, brokers.ErrAlreadySettled
	case r.l.g.phase == fenced:
		return nil, brokers.ErrOwnershipLost
	}
	switch st.Verb {
	case brokers.Done:
		return r, nil
	case brokers.Release:
		if r.state == marked {
			return nil, brokers.ErrAlreadySettled
		}
		if r.l.g.phase == active {
			return nil, &brokers.Error{Class: brokers.Permanent, Op: "release", Err: brokers.ErrUnsupported, Hint: "Kafka takes nothing back outside Draining and Close"}
		}
		return r, nil
	}
	return nil, &brokers.Error{Class: brokers.Permanent, Op: st.Verb.String(), Err: brokers.ErrUnsupported, Hint: "Kafka takes nothing back: hold the message and settle it as Done"}
}

// settled ends a delivery. The caller holds the lock.
func (s *Source) settled(r *record) {
	if r.state == settled {
		return
	}
	r.state = settled
	if g := r.l.g; g.phase != fenced {
		g.open--
		g.changed()
		s.signal()
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
