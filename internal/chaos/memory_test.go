package chaos

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/brokers/memory"
	"github.com/twiceproof/twiceproof/outbox"
)

const (
	memoryTopic = "chaos"
	memoryGroup = "chaos"
	partitions  = 8
)

// memoryBroker is the memory broker as a partitioned log, which lives in this process.
type memoryBroker struct {
	b      *memory.Broker
	cutOff func(ctx context.Context) (int, error) // of the run, which knows the source
}

func (m *memoryBroker) start(testing.TB)                     {}
func (m *memoryBroker) endpoint() endpoint                   { return endpoint{"memory", "", memoryTopic, true} }
func (m *memoryBroker) cut(ctx context.Context) (int, error) { return m.cutOff(ctx) }
func (m *memoryBroker) restart(context.Context) error        { m.b.Restart(); return nil }
func (m *memoryBroker) ordered() bool                        { return true }
func (m *memoryBroker) left(context.Context) (int, error) {
	n := m.b.Len(memoryTopic)
	for i := range partitions {
		n -= int(max(0, m.b.Committed(memoryTopic, memoryGroup, i)))
	}
	return n, nil
}

// memoryRun is a run in this process: one consumer at a time, which is crashed by
// taking its source away, and other members of its group that come and go.
type memoryRun struct {
	*driver
	b        *memory.Broker
	log      *slog.Logger
	consumer *memoryConsumer
	relay    func() error // stops it
	seen     sync.Map     // ids that were delivered
	ghosts   int
}

// memoryConsumer is a consumer that can be crashed.
type memoryConsumer struct {
	src     *crashable
	inner   brokers.Source
	work    *process // only what it has in work
	stop    context.CancelFunc
	done    chan error
	crashed atomic.Bool
}

// crashable is a source that nothing passes any more once its consumer has crashed.
type crashable struct {
	brokers.Source
	c    *memoryConsumer
	seen *sync.Map
	rep  reporter
}

func (s *crashable) Receive(ctx context.Context, n int) ([]*brokers.Delivery, error) {
	ds, err := s.Source.Receive(ctx, n)
	for _, d := range ds {
		if _, again := s.seen.LoadOrStore(d.ID, true); again {
			s.rep(reportRedelivered, d.ID)
		}
	}
	return ds, err
}

func (s *crashable) Settle(ctx context.Context, ss ...brokers.Settlement) []error {
	if !s.c.crashed.Load() {
		return s.Source.Settle(ctx, ss...)
	}
	errs := make([]error, len(ss))
	for i := range errs {
		errs[i] = brokers.ErrClosed
	}
	return errs
}

func (m *memoryRun) startConsumer() error {
	c := &memoryConsumer{work: &process{open: map[string]bool{}}, done: make(chan error, 1)}
	rep := func(kind byte, id string) { c.work.heard(kind, id); m.all.add(kind, id) }
	c.inner = m.b.Source(memoryTopic, memory.Group(memoryGroup), memory.DrainFor(500*time.Millisecond))
	c.src = &crashable{c.inner, c, &m.seen, rep}
	r, err := newConsumer(m.db, c.src, m.plan.seed, rep, m.log, true, time.Millisecond)
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(m.t.Context())
	c.stop = stop
	go func() { c.done <- r.Run(ctx) }()
	m.consumer = c
	return nil
}

// crash ends the consumer in the middle of its work: nothing is acknowledged any
// more, its handlers are cut off, and its group believes it dead.
func (m *memoryRun) crash(context.Context) error {
	for range 1000 {
		c := m.consumer
		if err := m.await("the consumer has work", func() bool { return c.work.inWork() > 0 }); err != nil {
			return err
		}
		c.crashed.Store(true)
		n := c.work.inWork()
		m.b.EvictMember(c.inner)
		c.stop()
		if err := <-c.done; err != nil {
			m.t.Logf("the crashed consumer ended with: %v", err)
		}
		if err := m.startConsumer(); err != nil {
			return err
		}
		if n > 0 {
			m.fig.inWork += n
			return nil
		}
		m.fig.misses++
	}
	return errors.New("no crash hit any work")
}

func (m *memoryRun) startRelay() error {
	pub := m.b.Publisher()
	r, err := outbox.NewRelay(m.db.outbox, pub, outbox.RelayConfig{Lease: 3 * time.Second, Backoff: 20 * time.Millisecond, MaxBackoff: 200 * time.Millisecond, Logger: m.log})
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(m.t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	m.relay = func() error { stop(); return <-done }
	return nil
}

// replaceRelay ends the relay, whatever it is publishing.
func (m *memoryRun) replaceRelay(ctx context.Context) error {
	n := 0
	for n == 0 {
		var err error
		if n, err = m.db.count(ctx, `SELECT count(*) FROM outbox_messages`); err != nil {
			return err
		}
	}
	m.fig.backlog += n
	return errors.Join(m.relay(), m.startRelay())
}

func (m *memoryRun) cutOff(context.Context) (int, error) {
	m.b.Disconnect(m.consumer.inner, errors.New("cut"), 50*time.Millisecond)
	return 1, nil
}

// move lets another member join the group, take messages and leave without having
// settled any; each second time the coordinator begins a rebalance by itself.
func (m *memoryRun) move(ctx context.Context) error {
	if m.ghosts++; m.ghosts%2 == 0 {
		m.b.Rebalance(memoryTopic, memoryGroup)
		return nil
	}
	ghost := m.b.Source(memoryTopic, memory.Group(memoryGroup))
	if _, err := ghost.Open(ctx, brokers.OpenOptions{Consumer: "ghost"}); err != nil {
		return err
	}
	some, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	ds, err := ghost.Receive(some, 10)
	for _, d := range ds {
		m.seen.Store(d.ID, true)
	}
	if errors.Is(err, context.DeadlineExceeded) {
		err = nil
	}
	return errors.Join(err, ghost.Close(ctx))
}

// TestChaosInMemory is a run on the memory broker as a log: duplicates, lost and
// failed commits, unknown publishes, rebalances, crashed consumers, a database that
// stops. The order of each key is kept.
func TestChaosInMemory(t *testing.T) {
	p := planOf(t)
	p.rebalances, p.brokerKills = p.cuts, p.relayKills
	b := memory.New(memory.Config{Chaos: memory.Chaos{Seed: p.seed, Duplicate: 0.2, LoseAck: 0.1, FailAck: 0.05, Delay: 0.02,
		MaxDelay: 5 * time.Millisecond, Disconnect: 0.0005, PublishUnknown: 0.02, PublishNack: 0.01}})
	b.Topic(memoryTopic, memory.TopicConfig{Partitions: partitions, SessionTimeout: time.Second, HeartbeatEvery: 50 * time.Millisecond,
		RebalanceTimeout: 2 * time.Second})
	l := &memoryBroker{b: b}
	d := newDriver(t, p, l)
	f, err := os.Create(d.config.Log)
	require.NoError(t, err)
	defer f.Close()
	m := &memoryRun{driver: d, b: b, log: slog.New(slog.NewTextHandler(f, nil))}
	l.cutOff = m.cutOff
	d.launch = func() error { return errors.Join(m.startConsumer(), m.startRelay()) }
	d.land = func() error { return errors.Join(m.stopConsumer(), m.relay()) }
	d.strikes[killConsumer], d.strikes[killRelay], d.strikes[rebalance] = m.crash, m.replaceRelay, m.move
	d.idle = m.flushCommits
	d.run()
	require.NoError(t, b.Check())
	require.Empty(t, overtaken(b), "published out of order: the relay's fault, not the consumer's")
}

// overtaken returns the messages that were published after a later one of their key,
// and not before.
func overtaken(b *memory.Broker) (late []string) {
	last, seen := map[string]int{}, map[string]bool{}
	for _, m := range b.Messages(memoryTopic) {
		if seen[m.ID] {
			continue
		}
		seen[m.ID] = true
		n, _ := strconv.Atoi(string(m.Payload))
		if before, ok := last[m.Key]; ok && before > n {
			late = append(late, fmt.Sprintf("%s: %d of %s after %d", m.ID, n, m.Key, before))
		}
		last[m.Key] = n
	}
	return late
}

func (m *memoryRun) stopConsumer() error {
	m.consumer.stop()
	return <-m.consumer.done
}

// flushCommits ends the faults and lets the consumer begin again from what is
// committed: the last commit may have been one of the lost.
func (m *memoryRun) flushCommits() error {
	m.b.SetChaos(memory.Chaos{})
	return errors.Join(m.stopConsumer(), m.startConsumer())
}
