package chaos

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/internal/devenv"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
)

// plan says how large a run is and how often what is broken.
type plan struct {
	messages, keys    int
	consumers, relays int
	seed              uint64

	consumerKills, cuts, databaseStops, relayKills, brokerKills, rebalances int

	// churn lets a further consumer join and leave every second, all the time.
	churn bool

	// ahead is how many messages are on their way beyond the next fault, at least: so
	// that every fault meets work.
	ahead int
}

// Names of faults.
const (
	killConsumer = "consumer killed"
	killRelay    = "relay killed"
	cutBroker    = "connections cut"
	stopDatabase = "database stopped"
	killBroker   = "broker killed"
	rebalance    = "partitions moved"
)

// faults returns the faults of the run in the order of its seed.
func (p plan) faults() []string {
	var fs []string
	for _, f := range []struct {
		name string
		n    int
	}{{killConsumer, p.consumerKills}, {cutBroker, p.cuts}, {stopDatabase, p.databaseStops}, {killRelay, p.relayKills}, {killBroker, p.brokerKills}, {rebalance, p.rebalances}} {
		fs = append(fs, slices.Repeat([]string{f.name}, f.n)...)
	}
	r := rand.New(rand.NewPCG(p.seed, 0))
	r.Shuffle(len(fs), func(i, j int) { fs[i], fs[j] = fs[j], fs[i] })
	return fs
}

// driver runs workers and breaks things.
type driver struct {
	t       *testing.T
	plan    plan
	broker  broker
	pg      *devenv.Postgres
	db      *database[pgx.Tx]
	rand    *rand.Rand
	workers []*process
	all     tally
	fig     figures
	config  workerConfig
	prod    *producer

	churning sync.WaitGroup

	// How the workers run: as processes, or in this one.
	launch  func() error
	land    func() error // in good order
	idle    func() error // before the end is looked at; nil: nothing
	strikes map[string]func(ctx context.Context) error
}

// newDriver starts the servers and makes the tables.
func newDriver(t *testing.T, p plan, b broker) *driver {
	t.Logf("seed %d (%s)", p.seed, envSeed)
	d := &driver{t: t, plan: p, broker: b, rand: rand.New(rand.NewPCG(p.seed, 1))}
	d.fig.struck = map[string]int{}
	b.start(t)
	d.pg = devtest.OwnPostgres(t)
	var err error
	d.db, err = openPostgres(t.Context(), d.pg.URL(), 30)
	require.NoError(t, err)
	t.Cleanup(d.db.close)
	require.NoError(t, d.db.setup(t.Context(), effectsTable+";"+businessTables))
	d.config = workerConfig{DSN: d.pg.URL(), Broker: b.endpoint(), Seed: p.seed, Log: filepath.Join(t.TempDir(), "log")}
	d.prod = &producer{db: d.db, topic: b.endpoint().Name, keys: p.keys, total: p.messages, seed: p.seed}
	d.strikes = map[string]func(ctx context.Context) error{
		cutBroker:    d.cut,
		stopDatabase: func(ctx context.Context) error { return errors.Join(d.pg.Stop(true), d.pg.Start(ctx)) },
		killBroker:   b.restart,
	}
	return d
}

func (d *driver) cut(ctx context.Context) error {
	n, err := d.broker.cut(ctx)
	d.fig.cutOff += n
	if n == 0 && err == nil {
		err = errors.New("there was no connection to cut")
	}
	return err
}

// runChaos runs a plan with worker processes.
func runChaos(t *testing.T, p plan, b broker) {
	d := newDriver(t, p, b)
	d.launch, d.land = d.launchProcesses, d.stopProcesses
	d.strikes[killConsumer] = func(context.Context) error { return d.killConsumer() }
	d.strikes[killRelay] = d.killRelay
	defer d.killAll()
	if p.churn {
		churning, stop := context.WithCancel(t.Context())
		d.churning.Go(func() { d.churn(churning) })
		defer d.churning.Wait()
		defer stop()
		d.idle = func() error { // the end is looked at in peace
			stop()
			d.churning.Wait()
			return nil
		}
	}
	d.run()
}

// churn lets a further consumer join and leave, each about a second after the other.
func (d *driver) churn(ctx context.Context) {
	for pause(ctx, time.Second) {
		p, err := startProcess("consumer", d.config, &d.all)
		if err != nil {
			d.t.Errorf("a consumer that joins: %v", err)
			return
		}
		// A fault may keep it from joining.
		for i := 0; i < 50 && !p.joined() && !p.ended() && pause(ctx, 100*time.Millisecond); i++ {
		}
		if p.joined() {
			d.fig.joined.Add(1)
			pause(ctx, time.Second)
		}
		if err := p.stop(); err != nil {
			d.t.Logf("a consumer that left: %v", err)
		}
	}
}

// run carries the plan out and checks what is left.
func (d *driver) run() {
	began := time.Now()
	err := d.launch()
	producing, stopProducing := context.WithCancel(d.t.Context())
	defer stopProducing()
	produced := make(chan error, 1)
	go func() { produced <- d.prod.run(producing) }()
	if err == nil {
		err = d.drive()
	}
	if err != nil {
		stopProducing()
	}
	if err = errors.Join(err, <-produced); err == nil {
		err = d.finish()
	}
	d.fig.took = time.Since(began)
	d.check(d.prod, err)
}

func (d *driver) allowed(n int) { d.prod.allowed.Store(int64(n)) }

func (d *driver) launchProcesses() error {
	for range d.plan.consumers {
		d.workers = append(d.workers, d.start("consumer"))
	}
	for range d.plan.relays {
		d.workers = append(d.workers, d.start("relay"))
	}
	return nil
}

func (d *driver) stopProcesses() error {
	var errs []error
	for _, w := range d.workers {
		errs = append(errs, w.stop())
	}
	d.workers = nil
	return errors.Join(errs...)
}

func (d *driver) start(kind string) *process {
	p, err := startProcess(kind, d.config, &d.all)
	require.NoError(d.t, err)
	return p
}

// drive strikes each fault when its part of the messages is done. The producer is
// never further than that and a bit.
func (d *driver) drive() error {
	fs := d.plan.faults()
	for i, f := range fs {
		// The last fault, too, has messages before it that are still to be enqueued.
		at := (d.plan.messages - 3*d.plan.ahead) * (i + 1) / (len(fs) + 1)
		d.allowed(at + d.plan.ahead)
		if err := d.await(fmt.Sprintf("%d messages are done, for fault %d of %d (%s)", at, i+1, len(fs), f), func() bool { return d.all.processed() >= at }); err != nil {
			return err
		}
		if f == killRelay { // it shall have something to publish when it dies
			d.allowed(at + 2*d.plan.ahead)
		}
		if err := d.strike(f); err != nil {
			return fmt.Errorf("fault %d (%s): %w", i+1, f, err)
		}
		d.fig.struck[f]++
	}
	d.allowed(d.plan.messages)
	return nil
}

// patience is how long a run may stand still.
const patience = 60 * time.Second

// await polls until ok, as long as the run makes progress and its workers live.
func (d *driver) await(what string, ok func() bool) error {
	last, since := -1, time.Now()
	for !ok() {
		if n := d.all.processed(); n != last {
			last, since = n, time.Now()
		}
		if time.Since(since) > patience {
			return fmt.Errorf("stuck for %s before %s: %d done", patience, what, last)
		}
		for i, w := range d.workers {
			if w.ended() {
				// One that starts while the database is away may end; a supervisor starts it again.
				d.t.Logf("%s ended by itself: %v", w.kind, w.stop())
				d.workers[i] = d.start(w.kind)
			}
		}
		if !pause(d.t.Context(), 10*time.Millisecond) {
			return context.Cause(d.t.Context())
		}
	}
	return nil
}

func (d *driver) strike(fault string) error {
	ctx, cancel := context.WithTimeout(d.t.Context(), time.Minute)
	defer cancel()
	return d.strikes[fault](ctx)
}

// killConsumer kills one that has transactions open. A kill that hit none does not
// count, and another one follows.
func (d *driver) killConsumer() error {
	for range 20 {
		var busy []int
		err := d.await("a consumer has work", func() bool {
			busy = busy[:0]
			for i, w := range d.workers {
				if w.kind == "consumer" && !w.ended() && w.inWork() > 0 {
					busy = append(busy, i)
				}
			}
			return len(busy) > 0
		})
		if err != nil {
			return err
		}
		i := busy[d.rand.IntN(len(busy))]
		n, err := d.workers[i].kill()
		if err != nil {
			return err
		}
		d.workers[i] = d.start("consumer")
		if n > 0 {
			d.fig.inWork += n
			return nil
		}
		d.fig.misses++
	}
	return errors.New("20 kills hit no work")
}

func (d *driver) killRelay(ctx context.Context) error {
	var relays []int
	for i, w := range d.workers {
		if w.kind == "relay" {
			relays = append(relays, i)
		}
	}
	i := relays[d.rand.IntN(len(relays))]
	n := 0
	for n == 0 {
		var err error
		if n, err = d.db.count(ctx, `SELECT count(*) FROM outbox_messages`); err != nil {
			return fmt.Errorf("nothing in the outbox: %w", err)
		}
	}
	d.fig.backlog += n
	if _, err := d.workers[i].kill(); err != nil {
		return err
	}
	d.workers[i] = d.start("relay")
	return nil
}

// finish waits until nothing is left to do, and ends the workers in good order.
func (d *driver) finish() error {
	if d.idle != nil {
		if err := d.idle(); err != nil {
			return err
		}
	}
	looked := time.Time{}
	err := d.await("everything is done", func() bool {
		if time.Since(looked) < 100*time.Millisecond {
			return false
		}
		looked = time.Now()
		ctx, cancel := context.WithTimeout(d.t.Context(), 10*time.Second)
		defer cancel()
		open, err := d.db.count(ctx, `SELECT (SELECT count(*) FROM outbox_messages) + (SELECT count(*) FROM held_messages)
			+ (SELECT count(*) FROM orders o WHERE NOT EXISTS (SELECT FROM processed_messages p WHERE p.message_id = o.id))`)
		if err != nil || open > 0 {
			return false
		}
		left, err := d.broker.left(ctx)
		return err == nil && left == 0
	})
	return errors.Join(err, d.land())
}

func (d *driver) killAll() {
	for _, w := range d.workers {
		_ = w.cmd.Process.Kill()
		<-w.read
		_ = w.cmd.Wait()
	}
}
