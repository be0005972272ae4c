package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/spf13/cobra"
	_ "modernc.org/sqlite" // the demo's default database

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/brokers/memory"
	"github.com/twiceproof/twiceproof/brokers/rabbitmq"
	"github.com/twiceproof/twiceproof/inbox"
	"github.com/twiceproof/twiceproof/internal/demo"
	"github.com/twiceproof/twiceproof/internal/devenv"
	"github.com/twiceproof/twiceproof/internal/sqldb"
	"github.com/twiceproof/twiceproof/migrations"
	"github.com/twiceproof/twiceproof/outbox"
)

type demoFlags struct {
	broker, database string
	messages         int
	install, json    bool
}

func newDemoCommand() *cobra.Command {
	var f demoFlags
	c := &cobra.Command{
		Use:   "demo",
		Short: "Break everything on purpose and count what is left",
		Long: `An outbox relay publishes top-ups of wallets; the broker delivers everything at
least twice; the consumer is crashed in its handlers and between commit and ack.
Beside it a naive consumer works on the same deliveries. All figures are counted
from the database afterwards. The exit code is 1 unless nothing is lost or doubled.`,
		Example: `  twiceproof demo
  twiceproof demo --json
  twiceproof demo --broker rabbitmq --database postgres --install`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return runDemo(cmd.Context(), cmd.OutOrStdout(), f) },
	}
	c.Flags().StringVar(&f.broker, "broker", "memory", "memory, or kafka (KAFKA_BROKERS), rabbitmq (AMQP_URL) or sqs (SQS_ENDPOINT): the one in the variable, else one that is found or started")
	c.Flags().StringVar(&f.database, "database", "sqlite", "sqlite or postgres (DATABASE_URL, else one that is found or started)")
	c.Flags().IntVar(&f.messages, "messages", 500, "how many messages")
	c.Flags().BoolVar(&f.install, "install", false, "install services that are missing")
	c.Flags().BoolVar(&f.json, "json", false, "print one JSON object")
	return c
}

func runDemo(ctx context.Context, out io.Writer, f demoFlags) (err error) {
	cfg := demo.Config{Messages: f.messages, Out: out, Timeout: 2 * time.Minute}
	if f.json {
		cfg.Out = io.Discard
	}
	urls, stop, err := demoServices(ctx, f)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	b, closeBroker, err := demoBroker(ctx, f.broker, urls)
	if err != nil {
		return err
	}
	defer closeBroker()
	var r demo.Result
	switch f.database {
	case "sqlite":
		r, err = demoOnSQLite(ctx, cfg, b)
	case "postgres":
		r, err = demoOnPostgres(ctx, cfg, b, urls["DATABASE_URL"])
	default:
		return usageError{fmt.Errorf("--database %q: use sqlite or postgres", f.database)}
	}
	if err != nil {
		return err
	}
	if f.json {
		if err := json.NewEncoder(out).Encode(r); err != nil {
			return err
		}
	}
	if !r.OK() {
		return fmt.Errorf("%d messages lost and %d doubled", r.Lost, r.Doubled)
	}
	return nil
}

// demoServices finds, starts or installs the real services that are asked for.
func demoServices(ctx context.Context, f demoFlags) (map[string]string, func() error, error) {
	var names []string
	for _, s := range devenv.Services() {
		if f.database == s.Name || f.broker == s.Name {
			names = append(names, s.Name)
		}
	}
	urls := map[string]string{}
	if len(names) == 0 {
		return urls, func() error { return nil }, nil
	}
	services, err := devenv.Find(names...)
	if err != nil {
		return nil, nil, err
	}
	env, err := devenv.Up(ctx, devenv.Options{Install: f.install}, services...)
	if err != nil {
		return nil, nil, fmt.Errorf("%w (add --install to install what is missing)", err)
	}
	for _, kv := range env.Environ() {
		name, url, _ := strings.Cut(kv, "=")
		urls[name] = url
	}
	for _, f := range env.Found {
		if f.Missing != nil {
			return nil, nil, errors.Join(fmt.Errorf("no %s: set %s, or add --install:\n%w", f.Service.Name, f.Service.EnvVar, f.Missing), env.Close())
		}
	}
	return urls, env.Close, nil
}

func demoBroker(ctx context.Context, name string, urls map[string]string) (demo.Broker, func(), error) {
	switch name {
	case "memory":
		b := memory.New(memory.Config{Chaos: memory.Chaos{Seed: 1, Duplicate: demo.Duplicates, LoseAck: 0.1, Delay: 0.2, MaxDelay: 20 * time.Millisecond, Reorder: 8, PublishUnknown: 0.02}})
		b.Queue(demo.Topic, memory.QueueConfig{Visibility: 500 * time.Millisecond})
		return demo.Broker{Name: "memory", Publisher: b.Publisher(),
			Source: func() brokers.Source { return b.Source(demo.Topic) },
			Empty:  func(context.Context) (bool, error) { return b.Len(demo.Topic) == 0, nil }}, func() {}, nil
	case "rabbitmq":
		return demoRabbitMQ(ctx, urls["AMQP_URL"])
	case "sqs":
		return demoSQS(ctx, urls["SQS_ENDPOINT"])
	case "kafka":
		return demoKafka(ctx, urls["KAFKA_BROKERS"])
	}
	return demo.Broker{}, nil, usageError{fmt.Errorf("--broker %q: use memory, kafka, rabbitmq or sqs", name)}
}

// demoRabbitMQ makes queues of this run's own. The function it returns deletes them.
func demoRabbitMQ(ctx context.Context, url string) (demo.Broker, func(), error) {
	queue := demo.Topic + "." + uuid.NewString()
	dead := queue + ".dead"
	source := func() brokers.Source {
		s, err := rabbitmq.NewSource(rabbitmq.SourceConfig{URL: url, Queue: queue, Topology: rabbitmq.Declare, DeadLetterQueue: dead})
		if err != nil {
			return failedSource{err: err}
		}
		return s
	}
	pub, err := rabbitmq.NewPublisher(rabbitmq.PublisherConfig{URL: url, Route: func(*brokers.Message) (string, string) { return "", queue }})
	if err != nil {
		return demo.Broker{}, nil, err
	}
	first := source()
	_, err = first.Open(ctx, brokers.OpenOptions{Consumer: "demo"})
	if err = errors.Join(err, first.Close(ctx)); err != nil {
		return demo.Broker{}, nil, errors.Join(err, pub.Close(ctx))
	}
	conn, err := amqp.Dial(url)
	if err != nil {
		return demo.Broker{}, nil, errors.Join(fmt.Errorf("connect to RabbitMQ: %w", err), pub.Close(ctx))
	}
	empty := func(context.Context) (bool, error) {
		left := 0
		err := onChannel(conn, func(ch *amqp.Channel) error {
			for _, q := range []string{queue, dead} {
				state, err := ch.QueueDeclarePassive(q, true, false, false, false, nil)
				if err != nil {
					return err
				}
				left += state.Messages
			}
			return nil
		})
		return left == 0, err
	}
	closeAll := func() {
		_ = pub.Close(context.WithoutCancel(ctx))
		_ = onChannel(conn, func(ch *amqp.Channel) error {
			_, err := ch.QueueDelete(queue, false, false, false)
			_, err2 := ch.QueueDelete(dead, false, false, false)
			return errors.Join(err, err2)
		})
		_ = conn.Close()
	}
	return demo.Broker{Name: "rabbitmq", Publisher: twice{pub}, Source: source, Empty: empty}, closeAll, nil
}

// onChannel runs fn on a channel of its own: any refusal closes the channel.
func onChannel(conn *amqp.Connection, fn func(*amqp.Channel) error) error {
	ch, err := conn.Channel()
	if err != nil {
		return err
	}
	defer ch.Close() //nolint:errcheck // after a refusal it is closed already
	return fn(ch)
}

// twice publishes everything twice, as a relay does that died before its mark.
type twice struct{ brokers.Publisher }

func (t twice) Publish(ctx context.Context, ms ...*brokers.Message) []brokers.Result {
	t.Publisher.Publish(ctx, ms...)
	return t.Publisher.Publish(ctx, ms...)
}

// into publishes everything to one destination of the run's own.
type into struct {
	brokers.Publisher
	topic string
}

func (p into) Publish(ctx context.Context, ms ...*brokers.Message) []brokers.Result {
	to := make([]*brokers.Message, len(ms))
	for i, m := range ms {
		c := *m
		c.Topic = p.topic
		to[i] = &c
	}
	return p.Publisher.Publish(ctx, to...)
}

// failedSource carries an error of its making to Open.
type failedSource struct {
	brokers.Source
	err error
}

func (f failedSource) Open(context.Context, brokers.OpenOptions) (brokers.Capabilities, error) {
	return brokers.Capabilities{}, f.err
}

func (f failedSource) Close(context.Context) error { return nil }

func demoOnSQLite(ctx context.Context, cfg demo.Config, b demo.Broker) (demo.Result, error) {
	dir, err := os.MkdirTemp("", "twiceproof-demo-")
	if err != nil {
		return demo.Result{}, err
	}
	defer os.RemoveAll(dir)
	db, err := sql.Open("sqlite", "file:"+filepath.Join(dir, "demo.db")+"?_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)&_txlock=immediate")
	if err != nil {
		return demo.Result{}, err
	}
	defer db.Close()
	db.SetMaxOpenConns(1)
	if _, err := migrations.Up(ctx, migrations.SQLDB(db, migrations.SQLite)); err != nil {
		return demo.Result{}, err
	}
	if _, err := db.ExecContext(ctx, demo.Schema()); err != nil {
		return demo.Result{}, err
	}
	return demo.Run(ctx, cfg, b, demo.Database[*sql.Tx]{Name: "sqlite", Store: inbox.SQLite(db), Outbox: outbox.SQLite(db),
		ExecTx: func(ctx context.Context, tx *sql.Tx, q string, args ...any) error {
			_, err := tx.ExecContext(ctx, sqldb.SQLite.SQL(q, ""), args...)
			return err
		},
		Exec: func(ctx context.Context, q string, args ...any) error {
			_, err := db.ExecContext(ctx, sqldb.SQLite.SQL(q, ""), args...)
			return err
		},
		Count: func(ctx context.Context, q string) (n int, err error) {
			err = db.QueryRowContext(ctx, q).Scan(&n)
			return n, err
		}})
}

func demoOnPostgres(ctx context.Context, cfg demo.Config, b demo.Broker, url string) (r demo.Result, err error) {
	pc, err := pgxpool.ParseConfig(url)
	if err != nil {
		return r, err
	}
	// A schema of the demo's own: it never touches other tables.
	schema := fmt.Sprintf("twiceproof_demo_%d", time.Now().UnixNano())
	pc.ConnConfig.RuntimeParams["search_path"] = schema
	pc.MaxConns = 12
	pool, err := pgxpool.NewWithConfig(ctx, pc)
	if err != nil {
		return r, err
	}
	defer pool.Close()
	if _, err := migrations.Up(ctx, migrations.Pool(pool), migrations.Schema(schema)); err != nil {
		return r, err
	}
	defer func() {
		_, e := pool.Exec(context.WithoutCancel(ctx), "DROP SCHEMA "+pgx.Identifier{schema}.Sanitize()+" CASCADE")
		err = errors.Join(err, e)
	}()
	if _, err := pool.Exec(ctx, demo.Schema()); err != nil {
		return r, err
	}
	return demo.Run(ctx, cfg, b, demo.Database[pgx.Tx]{Name: "postgres", Store: inbox.Postgres(pool), Outbox: outbox.Postgres(pool),
		ExecTx: func(ctx context.Context, tx pgx.Tx, q string, args ...any) error {
			_, err := tx.Exec(ctx, q, args...)
			return err
		},
		Exec: func(ctx context.Context, q string, args ...any) error {
			_, err := pool.Exec(ctx, q, args...)
			return err
		},
		Count: func(ctx context.Context, q string) (n int, err error) {
			err = pool.QueryRow(ctx, q).Scan(&n)
			return n, err
		}})
}
