package outbox_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	_ "modernc.org/sqlite"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/migrations"
	"github.com/twiceproof/twiceproof/outbox"
)

// openShop opens a fresh SQLite database with the tables; with PostgreSQL it is
// pgxpool.New, migrations.Pool and outbox.Postgres, and the rest is the same.
func openShop() (db *sql.DB, cleanup func()) {
	dir, err := os.MkdirTemp("", "outbox")
	if err != nil {
		panic(err)
	}
	db, err = sql.Open("sqlite", "file:"+filepath.Join(dir, "shop.db")+"?_txlock=immediate&_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)")
	if err != nil {
		panic(err)
	}
	db.SetMaxOpenConns(1)
	if _, err := migrations.Up(context.Background(), migrations.SQLDB(db, migrations.SQLite)); err != nil {
		panic(err)
	}
	return db, func() { _ = db.Close(); _ = os.RemoveAll(dir) }
}

// printer stands for a broker.
var printer = brokers.PublisherFunc(func(_ context.Context, m *brokers.Message) error {
	fmt.Printf("%s: %s\n", m.Topic, m.Payload)
	return nil
})

// The message is written in the transaction of the business row: it is published if
// that commits, and never otherwise.
func Example() {
	ctx := context.Background()
	db, cleanup := openShop()
	defer cleanup()
	_, _ = db.Exec(`CREATE TABLE orders (id TEXT, cents INTEGER)`)
	ob := outbox.SQLite(db)

	place := func(id string, cents int) error {
		return outbox.InTx(ctx, ob, func(ctx context.Context, tx *sql.Tx) error {
			if _, err := tx.ExecContext(ctx, `INSERT INTO orders VALUES (?, ?)`, id, cents); err != nil {
				return err
			}
			m := &brokers.Message{Topic: "orders", Key: id, Type: "order.placed", Payload: []byte(id)}
			if err := ob.Enqueue(ctx, tx, m); err != nil {
				return err
			}
			if cents <= 0 {
				return errors.New("an order needs a price")
			}
			return nil
		})
	}
	fmt.Println(place("order-1", 1200))
	fmt.Println(place("order-2", 0))

	relay, err := outbox.NewRelay(ob, printer, outbox.RelayConfig{})
	if err != nil {
		panic(err)
	}
	fmt.Println(relay.Flush(ctx))
	// Output:
	// <nil>
	// an order needs a price
	// orders: order-1
	// <nil>
}

// In a service the relay runs beside everything else until its context ends; InTx
// wakes it after each commit.
func ExampleRelay_Run() {
	db, cleanup := openShop()
	defer cleanup()
	ob := outbox.SQLite(db)
	sent := make(chan struct{})
	broker := brokers.PublisherFunc(func(_ context.Context, m *brokers.Message) error {
		fmt.Println("published", m.ID)
		close(sent)
		return nil
	})
	relay, err := outbox.NewRelay(ob, broker, outbox.RelayConfig{})
	if err != nil {
		panic(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- relay.Run(ctx) }()

	err = outbox.InTx(ctx, ob, func(ctx context.Context, tx *sql.Tx) error {
		return ob.Enqueue(ctx, tx, &brokers.Message{ID: "welcome-42", Topic: "mail"})
	})
	if err != nil {
		panic(err)
	}
	<-sent
	stop()
	fmt.Println(<-done, relay.Stats().Published)
	// Output:
	// published welcome-42
	// <nil> 1
}

// What the broker refuses for good is parked: it blocks its key, and no other, until
// somebody looks at it.
func ExampleRelay_Flush() {
	ctx := context.Background()
	db, cleanup := openShop()
	defer cleanup()
	ob := outbox.SQLite(db)
	const limit = 10
	broker := brokers.PublisherFunc(func(_ context.Context, m *brokers.Message) error {
		if len(m.Payload) > limit {
			return &brokers.Error{Class: brokers.Permanent, Err: fmt.Errorf("larger than %d bytes", limit)}
		}
		fmt.Println("published", m.ID)
		return nil
	})
	_ = outbox.InTx(ctx, ob, func(ctx context.Context, tx *sql.Tx) error {
		return ob.Enqueue(ctx, tx,
			&brokers.Message{ID: "a1", Topic: "t", Key: "alice", Payload: []byte(strings.Repeat("x", 11))},
			&brokers.Message{ID: "a2", Topic: "t", Key: "alice"},
			&brokers.Message{ID: "b1", Topic: "t", Key: "bob"})
	})
	relay, err := outbox.NewRelay(ob, broker, outbox.RelayConfig{})
	if err != nil {
		panic(err)
	}
	err = relay.Flush(ctx)
	var left *outbox.LeftError
	fmt.Println(errors.As(err, &left), left.Parked, left.Unsent)
	fmt.Println(left.First[0])

	// Somebody has looked at it, and decided to leave it out.
	_, _ = db.Exec(`DELETE FROM outbox_messages WHERE message_id = 'a1' AND parked`)
	fmt.Println(relay.Flush(ctx))
	// Output:
	// published b1
	// true 1 1
	// parked "a1" (larger than 10 bytes)
	// published a2
	// <nil>
}

// Published rows may stay for a while, for an audit or a replay.
func ExampleKeepPublished() {
	ctx := context.Background()
	db, cleanup := openShop()
	defer cleanup()
	ob := outbox.SQLite(db, outbox.KeepPublished(7*24*time.Hour))
	_ = outbox.InTx(ctx, ob, func(ctx context.Context, tx *sql.Tx) error {
		return ob.Enqueue(ctx, tx, &brokers.Message{Topic: "orders", Payload: []byte("order-1")})
	})
	relay, err := outbox.NewRelay(ob, printer, outbox.RelayConfig{})
	if err != nil {
		panic(err)
	}
	fmt.Println(relay.Flush(ctx))
	var kept int
	_ = db.QueryRow(`SELECT count(*) FROM outbox_messages WHERE published_at IS NOT NULL`).Scan(&kept)
	fmt.Println("kept", kept)
	// Output:
	// orders: order-1
	// <nil>
	// kept 1
}

// A transaction of your own: Enqueue, commit, then Nudge. Whoever forgets the nudge
// waits for the next poll, a second at most.
func ExampleWriter() {
	ctx := context.Background()
	db, cleanup := openShop()
	defer cleanup()
	ob := outbox.SQLite(db)

	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		panic(err)
	}
	defer tx.Rollback() //nolint:errcheck // after the commit it does nothing
	m := &brokers.Message{Topic: "orders", Payload: []byte("order-1")}
	if err := ob.Enqueue(ctx, tx, m); err != nil {
		panic(err)
	}
	if err := tx.Commit(); err != nil {
		panic(err)
	}
	ob.Nudge()

	fmt.Println("has an ID:", m.ID != "")
	relay, err := outbox.NewRelay(ob, printer, outbox.RelayConfig{})
	if err != nil {
		panic(err)
	}
	fmt.Println(relay.Flush(ctx))
	// Output:
	// has an ID: true
	// orders: order-1
	// <nil>
}
