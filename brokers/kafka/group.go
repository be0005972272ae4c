package kafka

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/segmentio/kafka-go"

	"github.com/twiceproof/twiceproof/brokers"
)

type phase uint8

const (
	active phase = iota
	draining
	fenced
)

// generation is one membership of the group between two rebalances: the lanes that
// were assigned, and the only way to commit for them.
type generation struct {
	s          *Source
	c          *client
	g          *kafka.Generation
	epoch      uint64
	lanes      []*lane
	fetchBytes int

	drain   chan struct{} // closed when the lanes are about to go
	ended   chan struct{} // closed by restart: the Source ends the generation
	endOnce sync.Once
	change  chan struct{} // cap 1: something was settled, or the generation is fenced
	sem     chan struct{} // one commit at a time
	readers sync.WaitGroup
	stop    context.CancelFunc // of the readers

	// guarded by the Source's mutex
	phase phase
	open  int // handed over and unsettled
}

// begin makes a generation of what the group assigned and starts to read.
func (s *Source) begin(c *client, g *kafka.Generation) *generation {
	gen := &generation{
		s: s, c: c, g: g,
		drain: make(chan struct{}), ended: make(chan struct{}), change: make(chan struct{}, 1), sem: make(chan struct{}, 1),
	}
	type start struct {
		l  *lane
		at int64
	}
	var starts []start
	for topic, parts := range g.Assignments {
		for _, p := range parts {
			l := &lane{g: gen, topic: topic, num: p.ID, committed: none, wake: make(chan struct{}, 1), unpacker: unpacker{limit: s.cfg.MaxBatchBytes}, fetchedAt: time.Now()}
			starts = append(starts, start{l, p.Offset})
		}
	}
	slices.SortFunc(starts, func(a, b start) int {
		return cmp.Or(cmp.Compare(a.l.topic, b.l.topic), cmp.Compare(a.l.num, b.l.num))
	})
	ctx, stop := context.WithCancel(context.Background()) // ends with the drain
	gen.stop = stop

	s.mu.Lock()
	// The group counts from 1 again when it was empty for long.
	s.epoch = max(s.epoch+1, uint64(max(g.ID, 0)))
	gen.epoch = s.epoch
	gen.fetchBytes = s.cfg.FetchBytes
	if n := int64(len(starts)); n > 0 {
		gen.fetchBytes = min(gen.fetchBytes, int(max(s.roomBytes/(2*n), minFetchBytes)))
	}
	for _, st := range starts {
		l := st.l
		l.name = brokers.Lane{Name: l.topic + "/" + strconv.Itoa(l.num), Epoch: gen.epoch}
		l.low = int64(gen.fetchBytes / 2)
		l.ctx, l.cancel = context.WithCancelCause(context.Background())
		gen.lanes = append(gen.lanes, l)
	}
	closed := s.state == sourceClosed
	if !closed {
		s.gen = gen
	}
	s.mu.Unlock()

	for _, l := range gen.lanes {
		s.emit(brokers.Event{Kind: brokers.EventLaneAssigned, Lane: l.name})
	}
	if !closed {
		for i, l := range gen.lanes {
			gen.readers.Go(func() { l.run(ctx, starts[i].at) })
		}
	}
	g.Start(gen.guard) // the only one: each further function would end the generation
	return gen
}

// restart ends the generation from our side; the member joins the group again.
func (g *generation) restart(why string) {
	g.endOnce.Do(func() {
		select {
		case <-g.drain: // it ends already
		default:
			g.s.log.Warn("joining the group again", "why", why, "generation", g.g.ID)
		}
		close(g.ended)
	})
}

// guard lives as long as the generation. When it returns, kafka-go joins the group
// again; until then nobody else can have the partitions, as long as commits go out.
func (g *generation) guard(gctx context.Context) {
	s := g.s
	began := time.Now()
	select {
	case <-gctx.Done():
	case <-g.ended:
	case <-s.closing:
	}
	s.mu.Lock()
	if g.phase == active {
		g.phase = draining
		close(g.drain)
		for _, l := range g.lanes {
			l.buf, l.bufBytes = nil, 0
		}
	}
	s.mu.Unlock()
	g.stop()
	g.readers.Wait() // at once: every wait of theirs ends with stop
	g.awaitStarted()
	g.fence(brokers.ErrOwnershipLost)
	s.mu.Lock()
	if s.gen == g {
		s.gen = nil
	}
	s.mu.Unlock()
	for _, l := range g.lanes {
		s.emit(brokers.Event{Kind: brokers.EventLaneRevoked, Lane: l.name})
	}
	// A group that cannot keep a generation (its topic is gone, for example) must not
	// spin: kafka-go joins again at once.
	if lived := time.Since(began); lived < minGeneration {
		select {
		case <-s.closing:
		case <-time.After(minGeneration - lived):
		}
	}
}

// awaitStarted lets started messages settle. The commits keep the membership: while a
// rebalance is being prepared, each counts as a heartbeat.
func (g *generation) awaitStarted() {
	s := g.s
	limit := time.NewTimer(s.cfg.DrainFor)
	defer limit.Stop()
	beat := time.NewTicker(max(s.cfg.SessionTimeout/4, 50*time.Millisecond))
	defer beat.Stop()
	ctx, cancel := context.WithTimeout(context.Background(), s.cfg.DrainFor)
	defer cancel()
	for {
		// The first one tells whether the membership still lives. Where it does not, or
		// the connection is gone, nothing can be settled any more.
		if err := g.commit(ctx, true); err != nil {
			return
		}
		if g.idle() && !g.owes() {
			return
		}
		for again := false; !again; {
			select {
			case <-g.change:
				again = g.idle()
			case <-beat.C:
				again = true
			case <-limit.C:
				return
			case <-s.closing:
				return
			}
		}
	}
}

// idle: nothing is handed over and unsettled.
func (g *generation) idle() bool {
	g.s.mu.Lock()
	defer g.s.mu.Unlock()
	return g.open == 0 || g.phase == fenced
}

func (g *generation) owes() bool {
	g.s.mu.Lock()
	defer g.s.mu.Unlock()
	return g.phase != fenced && len(g.moved(false)) > 0
}

// fence ends the ownership: nothing is committed in this generation any more.
func (g *generation) fence(cause error) {
	s := g.s
	s.mu.Lock()
	was := g.phase
	g.phase = fenced
	if was == active {
		close(g.drain)
		for _, l := range g.lanes {
			l.buf, l.bufBytes = nil, 0
		}
	}
	lost := g.open
	g.open = 0
	s.mu.Unlock()
	if was == fenced {
		return
	}
	g.stop()
	if lost > 0 {
		s.log.Warn("ownership ended before everything was settled", "generation", g.g.ID, "unsettled", lost, "cause", cause)
	}
	for _, l := range g.lanes {
		l.cancel(cause)
	}
	g.restart("its ownership ended")
	s.signal()
	g.changed()
}

func (g *generation) changed() {
	select {
	case g.change <- struct{}{}:
	default:
	}
}

// commit commits what may be committed, unless that is done already; with force also
// what is known to be committed, as a sign of life. Errors: ErrOwnershipLost when the
// generation is over, else worth another try.
func (g *generation) commit(ctx context.Context, force bool) error {
	select {
	case g.sem <- struct{}{}:
	case <-ctx.Done():
		return classify("commit", context.Cause(ctx))
	}
	g.s.mu.Lock()
	if g.phase == fenced {
		g.s.mu.Unlock()
		<-g.sem
		return brokers.ErrOwnershipLost
	}
	offsets := g.moved(force)
	g.s.mu.Unlock()
	if len(offsets) == 0 {
		<-g.sem
		return nil
	}
	done := make(chan error, 1)
	go func() { // kafka-go's call knows no ctx; it is bounded by the group's timeout
		err := g.send(offsets)
		<-g.sem
		done <- err
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return classify("commit", context.Cause(ctx))
	}
}

// moved returns what to commit. The caller holds the lock. The broker takes any number,
// lower ones and negative ones too, so that this is the check.
func (g *generation) moved(force bool) map[string]map[int]int64 {
	var offsets map[string]map[int]int64
	for _, l := range g.lanes {
		if !l.resolved {
			continue
		}
		safe := l.tracker.Safe()
		if safe < 0 || safe < l.committed || safe == l.committed && !force {
			continue
		}
		if offsets == nil {
			offsets = map[string]map[int]int64{}
		}
		if offsets[l.topic] == nil {
			offsets[l.topic] = map[int]int64{}
		}
		offsets[l.topic][l.num] = safe
	}
	return offsets
}

// send commits, with a few tries where the coordinator is only away for a moment.
func (g *generation) send(offsets map[string]map[int]int64) error {
	s := g.s
	var err error
	for try := range 3 {
		if err = g.g.CommitOffsets(offsets); err == nil {
			s.mu.Lock()
			for _, l := range g.lanes {
				if at, ok := offsets[l.topic][l.num]; ok {
					l.committed = max(l.committed, at)
				}
			}
			s.mu.Unlock()
			return nil
		}
		if !isCode(err, kafka.NotCoordinatorForGroup, kafka.GroupLoadInProgress, kafka.GroupCoordinatorNotAvailable, kafka.RequestTimedOut) {
			break
		}
		select {
		case <-s.closing:
		case <-time.After(backoff(try)):
		}
	}
	err = classify(fmt.Sprintf("commit in generation %d of group %q", g.g.ID, s.cfg.Group), err)
	switch brokers.ClassOf(err) {
	case brokers.Lost:
		s.log.Warn("the group has taken the partitions away", "generation", g.g.ID, "error", err)
		g.fence(brokers.ErrOwnershipLost)
		return brokers.ErrOwnershipLost
	case brokers.Fatal:
		s.refused(err)
	}
	return err
}
