package chaos

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/consumer"
	"github.com/twiceproof/twiceproof/inbox"
	"github.com/twiceproof/twiceproof/outbox"
)

// workerConfig is what a consumer or relay process is told.
type workerConfig struct {
	DSN    string
	Broker endpoint
	Seed   uint64
	Log    string // file
}

// effectsTable is what handlers write. No constraint hides a second effect; seq says
// in which order the effects of a key came.
const effectsTable = `CREATE TABLE effects (seq bigint GENERATED ALWAYS AS IDENTITY, id text NOT NULL, key text NOT NULL, n integer NOT NULL)`

// What workers report, one line each.
const (
	reportBegun       = 's' // a transaction has claimed the message, or runs a held one
	reportEnded       = 'e' // and has ended without a commit
	reportDone        = 'd' // and is committed
	reportHeld        = 'h'
	reportDead        = 'x'
	reportRedelivered = 'r'
	reportOpened      = 'o' // the broker has taken the consumer
	reportDelivered   = 'g' // with its place on the broker, where the broker does not count
)

// reporter tells the driver what happens. A line that is written survives the
// process, so that the driver knows what it killed.
type reporter func(kind byte, id string)

func report(w io.Writer) reporter {
	return func(kind byte, id string) { _, _ = io.WriteString(w, string(kind)+" "+id+"\n") } // one write: whole or not at all
}

// workerMain runs a consumer or a relay until SIGTERM, or until the driver is gone.
func workerMain(kind string, c workerConfig) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin) // the driver's end of the pipe
		os.Exit(4)
	}()
	f, err := os.OpenFile(c.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer f.Close() //nolint:errcheck // a log
	log := slog.New(slog.NewTextHandler(f, nil)).With("pid", os.Getpid())
	db, err := openPostgres(ctx, c.DSN, workerConns)
	if err != nil {
		return err
	}
	defer db.close()
	if kind == "relay" {
		return relayMain(ctx, c, db, log)
	}
	src, err := c.Broker.source()
	if err != nil {
		return err
	}
	return untilDone(ctx, func() error {
		r, err := newConsumer(db, src, c.Seed, report(os.Stdout), log, c.Broker.Ordered, 0)
		if err != nil {
			return err
		}
		return r.Run(ctx)
	})
}

const (
	workerConcurrency = 8
	workerConns       = workerConcurrency + 2
)

// untilDone lets a process that starts while the database is away start again, as a
// supervisor does.
func untilDone(ctx context.Context, run func() error) error {
	err := run()
	if err != nil && ctx.Err() == nil {
		return fmt.Errorf("ended by itself: %w", err)
	}
	return err
}

func relayMain(ctx context.Context, c workerConfig, db *database[pgx.Tx], log *slog.Logger) error {
	pub, err := c.Broker.publisher()
	if err != nil {
		return err
	}
	r, err := outbox.NewRelay(db.outbox, pub, outbox.RelayConfig{Lease: 3 * time.Second, Logger: log})
	if err != nil {
		return err
	}
	err = untilDone(ctx, func() error { return r.Run(ctx) })
	closing, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	return errors.Join(err, pub.Close(closing))
}

// newConsumer makes the consumer of a run: its handler writes one effect, and 2 % of
// the messages fail once or twice after that.
func newConsumer(db *database[pgx.Tx], src brokers.Source, seed uint64, rep reporter, log *slog.Logger, ordered bool, drain time.Duration) (*consumer.Runner, error) {
	handler := func(ctx context.Context, tx pgx.Tx, m *consumer.Message) error {
		n, err := strconv.Atoi(string(m.Payload))
		if err != nil {
			return consumer.Permanent(err)
		}
		if err := db.exec(ctx, tx, `INSERT INTO effects (id, key, n) VALUES ($1, $2, $3)`, m.ID, m.Key, n); err != nil {
			return err
		}
		if m.Attempt <= failures(seed, m.ID) {
			return fmt.Errorf("run %d fails", m.Attempt)
		}
		return nil
	}
	return consumer.New[pgx.Tx](reportingStore[pgx.Tx]{db.store, rep}, reportingSource{src, rep}, handler, consumer.Config{
		Name: "chaos", Concurrency: workerConcurrency, RequireOrder: ordered, Tries: 1,
		Backoff: 50 * time.Millisecond, MaxBackoff: 500 * time.Millisecond,
		DrainTimeout: drain, HandlerTimeout: 2 * time.Second, ClaimTimeout: 2 * time.Second, Grace: 500 * time.Millisecond,
		Logger: log, Hooks: consumer.Hooks{Held: func(m *consumer.Message, reason string, _ error) {
			rep(reportHeld, m.ID)
			if reason == inbox.ReasonDead || reason == inbox.ReasonCrashLoop || reason == inbox.ReasonConflict || reason == inbox.ReasonTxEnded {
				rep(reportDead, m.ID+" "+reason)
			}
		}}})
}

// failures says how many runs of a message fail.
func failures(seed uint64, id string) int {
	h := fnv.New64a()
	fmt.Fprintf(h, "%d/%s", seed, id)
	switch h.Sum64() % 100 {
	case 0:
		return 1
	case 1:
		return 2
	}
	return 0
}

// reportingStore reports transactions.
type reportingStore[Tx any] struct {
	inbox.Store[Tx]
	report reporter
}

func (s reportingStore[Tx]) Begin(ctx context.Context, u inbox.Unit) (inbox.Attempt[Tx], []inbox.Verdict, error) {
	a, vs, err := s.Store.Begin(ctx, u)
	if a == nil {
		return a, vs, err
	}
	s.report(reportBegun, u.Items[0].ID)
	return reportingAttempt[Tx]{a, s.report, u.Items[0].ID}, vs, err
}

func (s reportingStore[Tx]) BeginRetry(ctx context.Context, h *inbox.Head, u inbox.Unit) (inbox.Attempt[Tx], error) {
	a, err := s.Store.BeginRetry(ctx, h, u)
	if err != nil {
		return a, err
	}
	s.report(reportBegun, h.Item.ID)
	return reportingAttempt[Tx]{a, s.report, h.Item.ID}, nil
}

type reportingAttempt[Tx any] struct {
	inbox.Attempt[Tx]
	report reporter
	id     string
}

func (a reportingAttempt[Tx]) Commit(ctx context.Context) (inbox.CommitResult, error) {
	r, err := a.Attempt.Commit(ctx)
	if r == inbox.CommitYes {
		a.report(reportDone, a.id)
	} else {
		a.report(reportEnded, a.id)
	}
	return r, err
}

func (a reportingAttempt[Tx]) Rollback(ctx context.Context) error {
	defer a.report(reportEnded, a.id)
	return a.Attempt.Rollback(ctx)
}

func (a reportingAttempt[Tx]) Fail(ctx context.Context, o inbox.Outcome[Tx]) error {
	defer a.report(reportEnded, a.id)
	return a.Attempt.Fail(ctx, o)
}

// reportingSource reports redeliveries; where the broker does not tell, the driver finds
// them by their places.
type reportingSource struct {
	brokers.Source
	report reporter
}

func (s reportingSource) Open(ctx context.Context, o brokers.OpenOptions) (brokers.Capabilities, error) {
	c, err := s.Source.Open(ctx, o)
	if err == nil {
		s.report(reportOpened, "-")
	}
	return c, err
}

func (s reportingSource) Receive(ctx context.Context, n int) ([]*brokers.Delivery, error) {
	ds, err := s.Source.Receive(ctx, n)
	for _, d := range ds {
		switch {
		case d.Attempt > 1:
			s.report(reportRedelivered, d.ID)
		case d.Attempt == 0:
			s.report(reportDelivered, d.Coordinates)
		}
	}
	return ds, err
}
