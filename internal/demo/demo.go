// Package demo breaks things on purpose and counts what is left: an outbox relay
// publishes top-ups of wallets, a faulty broker delivers everything at least twice
// and out of order and loses acks, and the consumer is crashed again and again,
// in its handlers and between commit and ack. Beside it a naive consumer works on
// the same deliveries.
//
// All figures are counted from the database afterwards.
package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/consumer"
	"github.com/twiceproof/twiceproof/inbox"
	"github.com/twiceproof/twiceproof/outbox"
)

// Topic is where the demo's messages go.
const Topic = "twiceproof.demo.topups"

// Config says what to run.
type Config struct {
	Messages int // 0: 500
	Crashes  int // 0: 6
	Out      io.Writer
	Logger   *slog.Logger
	Timeout  time.Duration // 0: 60 s
}

// Broker is the broker of the demo.
type Broker struct {
	Name      string
	Publisher brokers.Publisher
	// Source returns a new subscription.
	Source func() brokers.Source
	// Empty reports whether the broker stores nothing. It may leave out what a
	// consumer has in hand: it is asked again when there is none.
	Empty func(ctx context.Context) (bool, error)
}

// consumerName is the consumer's name in the inbox.
const consumerName = "demo"

// Database is the database of the demo, with its transaction type.
type Database[Tx any] struct {
	Name   string
	Store  inbox.Store[Tx]
	Outbox interface {
		outbox.Writer[Tx]
		outbox.Queue
	}
	// ExecTx runs a statement in the handler's transaction, Exec outside; Count
	// returns the number a query answers. Statements use $1 for parameters.
	ExecTx func(ctx context.Context, tx Tx, sql string, args ...any) error
	Exec   func(ctx context.Context, sql string, args ...any) error
	Count  func(ctx context.Context, sql string) (int, error)
}

// Result is what the demo ends with, all of it counted by SQL.
type Result struct {
	Broker             string `json:"broker"`
	Database           string `json:"database"`
	Messages           int    `json:"messages"`            // top-ups the producer committed
	Deliveries         int    `json:"deliveries"`          // hand-overs to the consumers
	DuplicatesAbsorbed int    `json:"duplicates_absorbed"` // deliveries without an effect of their own
	Effects            int    `json:"effects"`             // rows in the ledger
	Lost               int    `json:"lost"`                // messages without an effect
	Doubled            int    `json:"doubled"`             // messages with more than one
	NaiveDoubled       int    `json:"naive_doubled"`       // the same for the naive consumer
	Balance            int    `json:"balance"`             // cents in our wallets; 100 a message is right
	NaiveBalance       int    `json:"naive_balance"`
	Crashes            int    `json:"crashes"`
	Held               int    `json:"held"`
}

// OK reports whether nothing is lost or doubled.
func (r Result) OK() bool { return r.Lost == 0 && r.Doubled == 0 && r.Messages > 0 }

const schema = `CREATE TABLE IF NOT EXISTS demo_topups (id TEXT, wallet TEXT, cents INTEGER);
CREATE TABLE IF NOT EXISTS demo_ledger (id TEXT, wallet TEXT, cents INTEGER);
CREATE TABLE IF NOT EXISTS demo_naive_ledger (id TEXT, wallet TEXT, cents INTEGER);
CREATE TABLE IF NOT EXISTS demo_crashes (n INTEGER)`

// Schema is the demo's own tables.
func Schema() string { return schema }

type topUp struct {
	ID     string `json:"id"`
	Wallet string `json:"wallet"`
	Cents  int    `json:"cents"`
}

// Run runs the demo.
func Run[Tx any](ctx context.Context, cfg Config, b Broker, db Database[Tx]) (Result, error) {
	if cfg.Messages <= 0 {
		cfg.Messages = 500
	}
	if cfg.Crashes == 0 {
		cfg.Crashes = 6
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = time.Minute
	}
	if cfg.Out == nil {
		cfg.Out = io.Discard
	}
	ctx, cancel := context.WithTimeout(ctx, cfg.Timeout)
	defer cancel()
	d := &demo[Tx]{cfg: cfg, b: b, db: db}
	fmt.Fprintf(cfg.Out, "%d top-ups of 1.00 each, through %s and %s.\n", cfg.Messages, b.Name, db.Name)

	relay, err := outbox.NewRelay(db.Outbox, b.Publisher, outbox.RelayConfig{})
	if err != nil {
		return Result{}, err
	}
	relayCtx, stopRelay := context.WithCancel(ctx)
	var wg sync.WaitGroup
	var relayErr error
	wg.Go(func() { relayErr = relay.Run(relayCtx) })
	err = errors.Join(d.produce(ctx), d.consume(ctx))
	stopRelay()
	wg.Wait()
	if err = errors.Join(err, relayErr); err != nil {
		return Result{}, err
	}
	r, err := d.count(context.WithoutCancel(ctx))
	if err == nil {
		r.print(cfg.Out)
	}
	return r, err
}

type demo[Tx any] struct {
	cfg Config
	b   Broker
	db  Database[Tx]
}

// produce writes top-ups and their messages, each pair in one transaction.
func (d *demo[Tx]) produce(ctx context.Context) error {
	for i := range d.cfg.Messages {
		t := topUp{fmt.Sprintf("topup-%05d", i), fmt.Sprintf("wallet-%d", i%10), 100}
		body, err := json.Marshal(t)
		if err != nil {
			return err
		}
		err = outbox.InTx(ctx, d.db.Outbox, func(ctx context.Context, tx Tx) error {
			if err := d.db.ExecTx(ctx, tx, `INSERT INTO demo_topups VALUES ($1, $2, $3)`, t.ID, t.Wallet, t.Cents); err != nil {
				return err
			}
			return d.db.Outbox.Enqueue(ctx, tx, &brokers.Message{ID: t.ID, Topic: Topic, Key: t.Wallet, Type: "wallet.topped-up",
				ContentType: "application/json", Payload: body})
		})
		if err != nil {
			return fmt.Errorf("produce: %w", err)
		}
	}
	fmt.Fprintf(d.cfg.Out, "The producer committed %d top-ups with their outbox rows; the relay publishes them.\n", d.cfg.Messages)
	return nil
}

// consume runs the consumer, crashing it on the way, until the broker is empty.
func (d *demo[Tx]) consume(ctx context.Context) error {
	for n := 1; ; n++ {
		store, src := breakRunner(d.db.Store, d.b.Source())
		tap := &tap[Tx]{Source: src, d: d}
		if n <= d.cfg.Crashes {
			tap.crashAfter = int64(max(3, d.cfg.Messages/(d.cfg.Crashes+2)))
			tap.inHandler = n%2 == 0
		}
		r, err := consumer.New(store, tap, tap.handle, consumer.Config{Name: consumerName, DrainTimeout: time.Millisecond,
			Backoff: 20 * time.Millisecond, MaxBackoff: 100 * time.Millisecond, Concurrency: d.concurrency(), Logger: d.cfg.Logger})
		if err != nil {
			return err
		}
		run, crash := context.WithCancel(ctx)
		tap.crash = crash
		done := make(chan error, 1)
		go func() { done <- r.Run(run) }()
		finished := d.wait(run)
		crash()
		if err := <-done; err != nil && !tap.crashed.Load() {
			return err
		}
		if !tap.crashed.Load() {
			// Now that nobody has anything in hand, the broker's count is exact, unless it
			// is still taking back what the consumer gave back at its end: one more look.
			empty, err := d.empty(ctx)
			if empty && tap.unsettled.Load() == 0 || err != nil || finished != nil {
				return errors.Join(finished, err)
			}
			continue
		}
		if ctx.Err() != nil {
			return fmt.Errorf("not finished after %s", d.cfg.Timeout)
		}
		if err := d.db.Exec(ctx, `INSERT INTO demo_crashes VALUES ($1)`, n); err != nil {
			return err
		}
		where := "between commit and ack"
		if tap.inHandler {
			where = "inside its handlers"
		}
		fmt.Fprintf(d.cfg.Out, "Crash %d: the consumer died %s; a new one starts.\n", n, where)
	}
}

func (d *demo[Tx]) concurrency() int {
	if d.db.Store.PoolSize() == 0 {
		return 1
	}
	return 4
}

// wait returns once everything looks published, delivered and settled.
func (d *demo[Tx]) wait(ctx context.Context) error {
	for quiet := 0; quiet < 3; {
		select {
		case <-ctx.Done():
			return fmt.Errorf("not finished after %s", d.cfg.Timeout)
		case <-time.After(100 * time.Millisecond):
		}
		empty, err := d.empty(ctx)
		switch {
		case err != nil && ctx.Err() == nil:
			return err
		case empty:
			quiet++
		default:
			quiet = 0
		}
	}
	return nil
}

// empty reports whether nothing waits to be published, retried or delivered.
func (d *demo[Tx]) empty(ctx context.Context) (bool, error) {
	// In this order: what leaves the outbox is on the broker by then.
	left, err := d.db.Count(ctx, `SELECT (SELECT count(*) FROM outbox_messages WHERE published_at IS NULL) + (SELECT count(*) FROM held_messages)`)
	if err != nil || left > 0 {
		return false, err
	}
	return d.b.Empty(ctx)
}

// tap is the place on the wire where the demo breaks things: it lets a naive
// consumer work on the same deliveries, and crashes the consumer.
type tap[Tx any] struct {
	brokers.Source
	d          *demo[Tx]
	crashAfter int64
	inHandler  bool
	crash      context.CancelFunc
	settles    atomic.Int64
	unsettled  atomic.Int64 // received, and not settled as done: it comes again
	crashed    atomic.Bool
}

// Receive gives each delivery to the naive consumer as well, which trusts that it
// comes once.
func (t *tap[Tx]) Receive(ctx context.Context, n int) ([]*brokers.Delivery, error) {
	ds, err := t.Source.Receive(ctx, n)
	t.unsettled.Add(int64(len(ds)))
	for _, d := range ds {
		var u topUp
		if json.Unmarshal(d.Payload, &u) == nil {
			e := t.d.db.Exec(context.WithoutCancel(ctx), `INSERT INTO demo_naive_ledger VALUES ($1, $2, $3)`, u.ID, u.Wallet, u.Cents)
			err = errors.Join(err, e)
		}
	}
	return ds, err
}

// Settle is where a crash between commit and ack happens: from then on nothing
// reaches the broker.
func (t *tap[Tx]) Settle(ctx context.Context, ss ...brokers.Settlement) []error {
	if n := t.settles.Add(int64(len(ss))); t.crashAfter > 0 && !t.inHandler && n >= t.crashAfter {
		t.die()
	}
	if t.crashed.Load() {
		errs := make([]error, len(ss))
		for i := range errs {
			errs[i] = brokers.ErrClosed
		}
		return errs
	}
	errs := t.Source.Settle(ctx, ss...)
	for i, s := range ss {
		if s.Verb == brokers.Done && (errs == nil || errs[i] == nil) {
			t.unsettled.Add(-1)
		}
	}
	return errs
}

func (t *tap[Tx]) die() {
	t.crashed.Store(true)
	t.crash()
}

// handle is the consumer's handler: one ledger row for each top-up.
func (t *tap[Tx]) handle(ctx context.Context, tx Tx, m *consumer.Message) error {
	var u topUp
	if err := json.Unmarshal(m.Payload, &u); err != nil {
		return consumer.Permanent(err)
	}
	if err := t.d.db.ExecTx(ctx, tx, `INSERT INTO demo_ledger VALUES ($1, $2, $3)`, u.ID, u.Wallet, u.Cents); err != nil {
		return err
	}
	if t.crashAfter > 0 && t.inHandler && t.settles.Load() >= t.crashAfter {
		t.die()
		<-ctx.Done() // the crash takes the handler with it
		return context.Cause(ctx)
	}
	return nil
}

func (d *demo[Tx]) count(ctx context.Context) (r Result, err error) {
	r.Broker, r.Database = d.b.Name, d.db.Name
	for _, c := range []struct {
		into *int
		sql  string
	}{
		{&r.Messages, `SELECT count(*) FROM demo_topups`},
		{&r.Deliveries, `SELECT count(*) FROM demo_naive_ledger`},
		{&r.Effects, `SELECT count(*) FROM demo_ledger`},
		{&r.Lost, `SELECT count(*) FROM demo_topups t WHERE NOT EXISTS (SELECT 1 FROM demo_ledger l WHERE l.id = t.id)`},
		{&r.Doubled, `SELECT count(*) FROM (SELECT id FROM demo_ledger GROUP BY id HAVING count(*) > 1) x`},
		{&r.NaiveDoubled, `SELECT count(*) FROM (SELECT id FROM demo_naive_ledger GROUP BY id HAVING count(*) > 1) x`},
		{&r.Balance, `SELECT coalesce(sum(cents), 0) FROM demo_ledger`},
		{&r.NaiveBalance, `SELECT coalesce(sum(cents), 0) FROM demo_naive_ledger`},
		{&r.Crashes, `SELECT count(*) FROM demo_crashes`},
		{&r.Held, `SELECT count(*) FROM held_messages`},
	} {
		if *c.into, err = d.db.Count(ctx, c.sql); err != nil {
			return r, fmt.Errorf("count: %w", err)
		}
	}
	r.DuplicatesAbsorbed = r.Deliveries - r.Effects
	return r, nil
}

func (r Result) print(w io.Writer) {
	fmt.Fprintf(w, `
Counted from the database:
  messages              %6d
  deliveries            %6d
  duplicates absorbed   %6d
  effects               %6d
  lost                  %6d
  doubled               %6d
  held                  %6d

  balance, twiceproof   %9.2f
  balance, naive        %9.2f   (%d messages doubled)
  balance, right        %9.2f
`, r.Messages, r.Deliveries, r.DuplicatesAbsorbed, r.Effects, r.Lost, r.Doubled, r.Held,
		float64(r.Balance)/100, float64(r.NaiveBalance)/100, r.NaiveDoubled, float64(r.Messages))
	if r.OK() {
		fmt.Fprintln(w, "\nEvery message has exactly one effect.")
	} else {
		fmt.Fprintln(w, "\nFAILED: messages were lost or doubled.")
	}
}
