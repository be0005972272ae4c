package chaos

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/brokers/memory"
	"github.com/twiceproof/twiceproof/consumer"
	"github.com/twiceproof/twiceproof/inbox"
	"github.com/twiceproof/twiceproof/outbox"
)

// crashConfig is what the child of a crash test is told.
type crashConfig struct {
	Database, DSN string
	Broker        endpoint // without a Kind: a memory broker that starts with Kept
	Topic         string   // topic or queue
	Kept          []*brokers.Message
	Fails         int    // how many runs of the victim fail
	Point         string // where to die; empty: nowhere
	Marker        string // file that is written just before
	Messages      int    // the number of effects that end the run
	Deliveries    int    // and the least number of deliveries
}

// victim is the message at whose points the child dies. Its key has a second
// message.
const victim = "victim"

// crashEffects is what handlers write. No constraint hides a second effect.
const crashEffects = `CREATE TABLE effects (seq BIGINT, id TEXT)`

// grave is the point where the process dies.
type grave struct{ point, marker string }

// at ends the process if point is the one: with SIGKILL, so that nothing is
// deferred, flushed or closed.
func (g grave) at(point string) {
	if g.point != point {
		return
	}
	if err := os.WriteFile(g.marker, []byte(point), 0o600); err != nil {
		panic(err)
	}
	self, err := os.FindProcess(os.Getpid())
	if err == nil {
		err = self.Kill()
	}
	if err != nil {
		panic(err)
	}
	select {} // the signal is on its way
}

// crashStore dies around the statements of a store.
type crashStore[Tx any] struct {
	inbox.Store[Tx]
	g grave
}

// SingleWriter hands on what consumer.New asks of a store.
func (s crashStore[Tx]) SingleWriter() bool {
	w, ok := s.Store.(interface{ SingleWriter() bool })
	return ok && w.SingleWriter()
}

func (s crashStore[Tx]) Begin(ctx context.Context, u inbox.Unit) (inbox.Attempt[Tx], []inbox.Verdict, error) {
	mine := u.Items[0].ID == victim
	if mine {
		s.g.at("before the claim")
	}
	a, vs, err := s.Store.Begin(ctx, u)
	if !mine || a == nil {
		return a, vs, err
	}
	s.g.at("after the claim")
	return crashAttempt[Tx]{a, s.g, ""}, vs, err
}

func (s crashStore[Tx]) Record(ctx context.Context, u inbox.Unit, outcomes ...inbox.Outcome[Tx]) ([]inbox.Verdict, error) {
	mine := u.Items[0].ID == victim
	if mine {
		s.g.at("between rollback and hold")
	}
	vs, err := s.Store.Record(ctx, u, outcomes...)
	if mine && err == nil {
		s.g.at("after the hold")
	}
	return vs, err
}

func (s crashStore[Tx]) TakeHeads(ctx context.Context, q inbox.HeadQuery) ([]*inbox.Head, error) {
	hs, err := s.Store.TakeHeads(ctx, q)
	for _, h := range hs {
		if h.Item.ID == victim {
			s.g.at("retry: start marked")
		}
	}
	return hs, err
}

func (s crashStore[Tx]) BeginRetry(ctx context.Context, h *inbox.Head, u inbox.Unit) (inbox.Attempt[Tx], error) {
	a, err := s.Store.BeginRetry(ctx, h, u)
	if h.Item.ID != victim || err != nil {
		return a, err
	}
	s.g.at("retry: transaction begun")
	return crashAttempt[Tx]{a, s.g, "retry: "}, nil
}

// crashAttempt dies around the end of a transaction.
type crashAttempt[Tx any] struct {
	inbox.Attempt[Tx]
	g      grave
	prefix string
}

func (a crashAttempt[Tx]) Commit(ctx context.Context) (inbox.CommitResult, error) {
	a.g.at(a.prefix + "before the commit")
	r, err := a.Attempt.Commit(ctx)
	if r == inbox.CommitYes {
		a.g.at(a.prefix + "after the commit")
	}
	return r, err
}

func (a crashAttempt[Tx]) Rollback(ctx context.Context) error {
	a.g.at(a.prefix + "before the rollback")
	return a.Attempt.Rollback(ctx)
}

func (a crashAttempt[Tx]) Fail(ctx context.Context, o inbox.Outcome[Tx]) error {
	a.g.at(a.prefix + "before the failure is kept")
	err := a.Attempt.Fail(ctx, o)
	if err == nil {
		a.g.at(a.prefix + "after the failure is kept")
	}
	return err
}

// crashSource dies around settlements, and counts what is not settled.
type crashSource struct {
	brokers.Source
	g         grave
	received  *atomic.Int64
	unsettled *atomic.Int64
}

func (s crashSource) Receive(ctx context.Context, n int) ([]*brokers.Delivery, error) {
	ds, err := s.Source.Receive(ctx, n)
	s.received.Add(int64(len(ds)))
	s.unsettled.Add(int64(len(ds)))
	return ds, err
}

func (s crashSource) Settle(ctx context.Context, ss ...brokers.Settlement) []error {
	mine := false
	for _, st := range ss {
		mine = mine || st.Delivery.ID == victim && st.Verb == brokers.Done
	}
	if mine {
		s.g.at("before the settle")
	}
	errs := s.Source.Settle(ctx, ss...)
	if mine {
		s.g.at("after the settle")
	}
	s.unsettled.Add(-int64(len(ss)))
	return errs
}

// crashPublisher dies around a publish.
type crashPublisher struct {
	brokers.Publisher
	g grave
}

func (p crashPublisher) Publish(ctx context.Context, ms ...*brokers.Message) []brokers.Result {
	p.g.at("relay: before the publish")
	rs := p.Publisher.Publish(ctx, ms...)
	p.g.at("relay: after the publish, before the mark")
	return rs
}

func crashMain(ctx context.Context, c crashConfig) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	if c.Database == onPostgres {
		db, err := openPostgres(ctx, c.DSN, 8)
		if err != nil {
			return err
		}
		defer db.close()
		return crashRun(ctx, c, db)
	}
	db, err := openSQL(c.DSN, c.Database)
	if err != nil {
		return err
	}
	defer db.close()
	return crashRun(ctx, c, db)
}

// crashBroker returns the child's side of the broker. A memory broker dies with the
// child, so the parent says what a real one would have kept.
func crashBroker(ctx context.Context, c crashConfig) (brokers.Source, brokers.Publisher, error) {
	if c.Broker.Kind != "" {
		src, err := c.Broker.source()
		if err != nil {
			return nil, nil, err
		}
		pub, err := c.Broker.publisher()
		return src, pub, err
	}
	b := memory.New(memory.Config{})
	b.Topic(c.Topic, memory.TopicConfig{})
	pub := b.Publisher()
	for _, r := range pub.Publish(ctx, c.Kept...) {
		if r.Err != nil {
			return nil, nil, r.Err
		}
	}
	return b.Source(c.Topic), pub, nil
}

// crashRun consumes, and publishes what is in the outbox, until everything is done.
func crashRun[Tx any](ctx context.Context, c crashConfig, db *database[Tx]) error {
	g := grave{c.Point, c.Marker}
	src, pub, err := crashBroker(ctx, c)
	if err != nil {
		return err
	}
	var order atomic.Int64
	order.Store(time.Now().UnixNano())
	handler := func(ctx context.Context, tx Tx, m *consumer.Message) error {
		if err := db.exec(ctx, tx, `INSERT INTO effects (seq, id) VALUES ({int:$1}, $2)`, order.Add(1), m.ID); err != nil {
			return err
		}
		if m.ID != victim {
			return nil
		}
		if m.Attempt <= c.Fails {
			return fmt.Errorf("run %d fails", m.Attempt)
		}
		if m.Replayed {
			g.at("retry: after the handler")
		} else {
			g.at("after the handler")
		}
		return nil
	}
	tap := crashSource{src, g, new(atomic.Int64), new(atomic.Int64)}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	r, err := consumer.New[Tx](crashStore[Tx]{db.store, g}, tap, handler, consumer.Config{Name: "crash", Tries: 1,
		Backoff: 10 * time.Millisecond, MaxBackoff: 20 * time.Millisecond, HandlerTimeout: 500 * time.Millisecond,
		ClaimTimeout: 500 * time.Millisecond, Grace: 100 * time.Millisecond, Logger: log})
	if err != nil {
		return err
	}
	relay, err := outbox.NewRelay(db.outbox, crashPublisher{pub, g}, outbox.RelayConfig{Lease: 500 * time.Millisecond, Logger: log})
	if err != nil {
		return err
	}
	run, stop := context.WithCancel(ctx)
	defer stop()
	var wg sync.WaitGroup
	var errs [2]error
	wg.Go(func() { errs[0] = r.Run(run); stop() })
	wg.Go(func() { errs[1] = relay.Run(run); stop() })
	err = crashWait(run, c, db, tap, r.Ready)
	stop()
	wg.Wait()
	return errors.Join(err, errs[0], errs[1], pub.Close(ctx))
}

func crashWait[Tx any](ctx context.Context, c crashConfig, db *database[Tx], tap crashSource, ready func() error) error {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return fmt.Errorf("not finished: %w", context.Cause(ctx))
		case <-tick.C:
		}
		n, err := db.count(ctx, fmt.Sprintf(`SELECT CASE WHEN (SELECT count(*) FROM outbox_messages) + (SELECT count(*) FROM held_messages) = 0
			AND (SELECT count(DISTINCT id) FROM effects) >= %d THEN 1 ELSE 0 END`, c.Messages))
		if err != nil {
			return err
		}
		if n == 1 && ready() == nil && tap.received.Load() >= int64(c.Deliveries) && tap.unsettled.Load() == 0 {
			return nil
		}
	}
}
