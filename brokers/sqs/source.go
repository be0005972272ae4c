package sqs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/sqs"
	"github.com/aws/aws-sdk-go-v2/service/sqs/types"

	"github.com/twiceproof/twiceproof/brokers"
)

// Source consumes one queue. Make one by [NewSource].
type Source struct {
	cfg     SourceConfig
	client  *sqs.Client
	free    func() // closes the idle connections of a transport of ours
	url     string
	fifo    bool
	maxHold time.Duration
	margin  time.Duration // by which ownership ends before the visibility does
	log     *slog.Logger
	observe func(brokers.Event)

	mu        sync.Mutex
	state     sourceState
	room      int
	roomBytes int64
	credit    int   // room that is neither held nor reserved by a poller
	bytes     int64 // of what is held
	wanted    int   // what the waiting Receive asks for; 0 while none waits
	leases    map[*lease]struct{}
	groups    map[string][]*lease // FIFO: what is in hand of a group, in order
	buf       []*lease            // received and not handed over
	epoch     uint64
	serial    uint64
	fatal     error
	connected bool
	failing   time.Time     // since when polls fail; zero if they do not
	arrived   chan struct{} // cap 1: something for Receive to look at
	change    chan struct{} // closed and replaced when credit or wanted grew

	pollers int
	fulls   int
	polls   sync.WaitGroup // pollers; Add under mu while open
	calls   sync.WaitGroup // Settle calls; the same
	works   sync.WaitGroup // heartbeat, extensions and give-backs of the source's own

	stopPolls chan struct{}           // closed by Close: no new poll
	pollCtx   context.Context         // ends the polls in flight
	cutPolls  context.CancelCauseFunc //
	runCtx    context.Context         // ends everything else
	cutRun    context.CancelCauseFunc
}

type sourceState uint8

const (
	sourceNew sourceState = iota
	sourceOpen
	sourceClosed
)

// NewSource returns a Source for the configuration, or everything that is wrong with
// it. It does no I/O.
func NewSource(cfg SourceConfig) (*Source, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	s := &Source{
		cfg: cfg, maxHold: maxVisibility, margin: min(2*time.Second, cfg.Visibility/10), log: slog.New(slog.DiscardHandler),
		leases: map[*lease]struct{}{}, groups: map[string][]*lease{}, epoch: 1,
		arrived: make(chan struct{}, 1), change: make(chan struct{}), stopPolls: make(chan struct{}),
	}
	s.client, s.free = newClient(cfg.Client, cfg.AWS, 2*(cfg.MaxPollers+4))
	s.pollCtx, s.cutPolls = context.WithCancelCause(context.Background())
	s.runCtx, s.cutRun = context.WithCancelCause(context.Background())
	return s, nil
}

// Open implements [brokers.Source]. It reads the queue's attributes: a queue that does
// not exist (brokers.ErrNoRoute) and credentials that may not read them are errors of
// class Fatal.
func (s *Source) Open(ctx context.Context, o brokers.OpenOptions) (brokers.Capabilities, error) {
	s.mu.Lock()
	if s.state != sourceNew {
		s.mu.Unlock()
		return brokers.Capabilities{}, brokers.NewFatal("open", errors.New("a Source serves one Open"), "make another one")
	}
	s.state = sourceOpen
	s.room, s.roomBytes = orDefault(o.Room, defaultRoom), orDefault(o.RoomBytes, defaultRoomBytes)
	s.credit, s.observe = s.room, o.Observer
	if o.Logger != nil {
		s.log = o.Logger.With("queue", nameOf(s.cfg.Queue))
	}
	s.mu.Unlock()
	horizon, err := s.inspect(ctx)
	if err != nil {
		return brokers.Capabilities{}, errors.Join(err, s.Close(ctx))
	}
	s.mu.Lock()
	if s.state != sourceOpen {
		s.mu.Unlock()
		return brokers.Capabilities{}, brokers.ErrClosed
	}
	s.connected = true
	s.works.Go(s.beat)
	s.startPoller()
	s.mu.Unlock()
	s.emit(brokers.Event{Kind: brokers.EventConnected})
	caps := brokers.Capabilities{
		GiveBack: brokers.GiveBackMessage, MaxRetryDelay: s.maxHold - s.cfg.Visibility, MaxHold: s.maxHold, RedeliveryHorizon: horizon,
		Counting: brokers.CountsDeliveries, StableCoordinates: true, SettleBatch: maxBatch, SettleLinger: 20 * time.Millisecond,
	}
	if s.fifo {
		caps.GiveBack, caps.LaneOrdered = brokers.GiveBackLane, true
	}
	if caps.MaxRetryDelay < time.Second {
		caps.MaxRetryDelay = time.Second
	}
	return caps, nil
}

func orDefault[N int | int64](n, zero N) N {
	if n <= 0 {
		return zero
	}
	return n
}

// inspect finds the queue and reads what matters of its attributes.
func (s *Source) inspect(ctx context.Context) (horizon time.Duration, err error) {
	op := fmt.Sprintf("open queue %q", s.cfg.Queue)
	if s.url, err = queueURL(ctx, s.client, s.cfg.Queue); err != nil {
		return 0, classify(op, causeOf(ctx, err))
	}
	out, err := s.client.GetQueueAttributes(ctx, &sqs.GetQueueAttributesInput{QueueUrl: &s.url, AttributeNames: []types.QueueAttributeName{types.QueueAttributeNameAll}})
	if err != nil {
		return 0, classify(op, causeOf(ctx, err))
	}
	a := out.Attributes
	s.fifo = a["FifoQueue"] == "true" || isFIFO(s.url)
	if n, err := strconv.Atoi(a["MessageRetentionPeriod"]); err == nil {
		horizon = time.Duration(n) * time.Second
	}
	s.log.Info("queue found", "url", s.url, "fifo", s.fifo, "visibility", s.cfg.Visibility.String(), "redrive", a["RedrivePolicy"])
	if n := maxReceives(a["RedrivePolicy"]); n > 0 && n < 10 {
		s.log.Warn("the queue's maxReceiveCount is low: every receive counts, also of messages that were given back unrun; raise it to 10 or more", "maxReceiveCount", n)
	}
	return horizon, nil
}

func queueURL(ctx context.Context, c *sqs.Client, queue string) (string, error) {
	if isURL(queue) {
		return queue, nil
	}
	out, err := c.GetQueueUrl(ctx, &sqs.GetQueueUrlInput{QueueName: &queue})
	if err != nil {
		return "", err
	}
	return aws.ToString(out.QueueUrl), nil
}

// Receive implements [brokers.Source].
func (s *Source) Receive(ctx context.Context, limit int) ([]*brokers.Delivery, error) {
	limit = max(limit, 1)
	defer s.want(0)
	for {
		if err := context.Cause(ctx); err != nil {
			return nil, err
		}
		ds, err := s.take(limit)
		if len(ds) > 0 || err != nil {
			return ds, err
		}
		s.want(limit)
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
	case len(s.buf) == 0 && s.fatal != nil:
		s.signal()
		return nil, s.fatal
	}
	n := min(limit, len(s.buf))
	ds := make([]*brokers.Delivery, n)
	for i, l := range s.buf[:n] {
		ds[i] = l.d
	}
	s.buf = slices.Delete(s.buf, 0, n)
	return ds, nil
}

// want says how many messages the waiting Receive asks for.
func (s *Source) want(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.wanted != n {
		s.wanted = n
		s.changed()
	}
}

// changed lets pollers look again. The caller holds the lock.
func (s *Source) changed() {
	close(s.change)
	s.change = make(chan struct{})
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

// Status implements [brokers.Source]. The lag counts what is not handed over yet and
// what is in flight, of all consumers; SQS counts within a minute or so. The age of
// messages is unknown.
func (s *Source) Status(ctx context.Context) (brokers.Status, error) {
	s.mu.Lock()
	state, connected := s.state, s.connected
	s.mu.Unlock()
	if state != sourceOpen {
		return brokers.Status{}, brokers.ErrClosed
	}
	st := brokers.Status{Connected: connected, Lanes: []brokers.LaneStatus{{Name: nameOf(s.cfg.Queue), Lag: -1, Oldest: -1}}}
	out, err := s.client.GetQueueAttributes(ctx, &sqs.GetQueueAttributesInput{QueueUrl: &s.url, AttributeNames: []types.QueueAttributeName{
		types.QueueAttributeNameApproximateNumberOfMessages, types.QueueAttributeNameApproximateNumberOfMessagesNotVisible}})
	if err != nil {
		return st, classify("status", causeOf(ctx, err))
	}
	var lag int64
	for _, v := range out.Attributes {
		n, err := strconv.ParseInt(v, 10, 64)
		if err != nil {
			return st, nil
		}
		lag += n
	}
	st.Lanes[0].Lag = lag
	return st, nil
}

// Close implements [brokers.Source]. It starts no further receive, ends the contexts of
// all deliveries, lets the receives that wait come to their end (at most Wait), and
// makes everything unsettled visible at once. When ctx ends, the waiting receives are
// cut off and the rest becomes visible when its time is up; the error says so.
func (s *Source) Close(ctx context.Context) error {
	s.mu.Lock()
	was := s.state
	s.state = sourceClosed
	var held []*lease
	if was == sourceOpen {
		close(s.stopPolls)
		held = s.inHand()
	}
	s.buf = nil
	s.mu.Unlock()
	s.signal()
	if was != sourceOpen {
		return nil
	}
	for _, l := range slices.Backward(held) {
		l.cancel(brokers.ErrClosed)
	}
	// The heartbeat goes on meanwhile. Giving back waits for the polls: our own would
	// take the messages again.
	waiting, done := reserve(ctx)
	err := wait(waiting, &s.polls)
	done()
	s.cutPolls(brokers.ErrClosed)
	s.polls.Wait() // at once now
	err = errors.Join(err, wait(ctx, &s.calls))
	s.cutRun(brokers.ErrClosed)
	s.works.Wait()
	err = errors.Join(err, s.giveBackAll(ctx))
	s.free()
	if err != nil {
		return &brokers.Error{Class: brokers.Retryable, Op: "close", Err: err, Hint: "what was not given back becomes visible when its visibility timeout ends"}
	}
	return nil
}

// reserve keeps a part of the time that ctx leaves for giving back.
func reserve(ctx context.Context) (context.Context, context.CancelFunc) {
	deadline, ok := ctx.Deadline()
	if !ok {
		return context.WithCancel(ctx)
	}
	return context.WithDeadline(ctx, deadline.Add(-min(2*time.Second, time.Until(deadline)/3)))
}

// wait waits for the group; its error is that of ctx.
func wait(ctx context.Context, wg *sync.WaitGroup) error {
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }() // ends with the group, which Close ends in the end
	select {
	case <-done:
		return nil
	case <-ctx.Done():
	}
	select {
	case <-done:
		return nil
	default:
		return context.Cause(ctx)
	}
}
