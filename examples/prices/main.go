// Command prices shows events that carry a version: product prices that come late,
// repeated and in the wrong order, and end right. It needs nothing installed.
//
//	go run ./examples/prices
package main

import (
	"context"
	"database/sql"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"time"

	_ "modernc.org/sqlite"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/brokers/memory"
	"github.com/twiceproof/twiceproof/consumer"
	"github.com/twiceproof/twiceproof/inbox"
	"github.com/twiceproof/twiceproof/latest"
	"github.com/twiceproof/twiceproof/migrations"
)

type priceChanged struct {
	Product string `json:"product"`
	Version int64  `json:"version"`
	Cents   int    `json:"cents"`
}

var versions = latest.SQLite("prices")

// late counts what came after something newer.
var late int

// setPrice is the handler: it writes a price only if it is newer than the one there.
func setPrice(ctx context.Context, tx *sql.Tx, e consumer.Event[priceChanged]) error {
	v, err := versions.Apply(ctx, tx, e.Body.Product, e.Body.Version)
	if err != nil {
		return err
	}
	if v != latest.Newer {
		late++
		return nil
	}
	_, err = tx.ExecContext(ctx, `INSERT INTO prices (product, cents) VALUES (?, ?) ON CONFLICT (product) DO UPDATE SET cents = excluded.cents`, e.Body.Product, e.Body.Cents)
	return err
}

func main() {
	if err := run(context.Background()); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context) error {
	dir, err := os.MkdirTemp("", "prices-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	db, err := sql.Open("sqlite", "file:"+filepath.Join(dir, "app.db")+
		"?_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)&_txlock=immediate")
	if err != nil {
		return err
	}
	defer db.Close()
	db.SetMaxOpenConns(1)
	if _, err := migrations.Up(ctx, migrations.SQLDB(db, migrations.SQLite)); err != nil {
		return err
	}
	if _, err := db.ExecContext(ctx, `CREATE TABLE prices (product TEXT PRIMARY KEY, cents INTEGER)`); err != nil {
		return err
	}

	broker := memory.New(memory.Config{})
	event := func(version, cents int) *brokers.Message {
		return &brokers.Message{ID: fmt.Sprintf("price-tea-v%d", version), Topic: "prices",
			Payload: fmt.Appendf(nil, `{"product":"tea","version":%d,"cents":%d}`, version, cents)}
	}
	// Version 3 overtakes 2, and 1 and 3 come twice. No key: nobody keeps an order.
	broker.Publisher().Publish(ctx, event(1, 100), event(3, 300), event(2, 200), event(3, 300), event(1, 100))

	prices, err := consumer.New(inbox.SQLite(db), broker.Source("prices"), consumer.JSON(setPrice), consumer.Config{Name: "prices"})
	if err != nil {
		return err
	}
	runCtx, stop := context.WithTimeout(ctx, 10*time.Second)
	defer stop()
	go func() {
		for broker.Len("prices") > 0 && runCtx.Err() == nil {
			time.Sleep(10 * time.Millisecond)
		}
		stop()
	}()
	if err := prices.Run(runCtx); err != nil {
		return err
	}
	var cents int
	if err := db.QueryRowContext(ctx, `SELECT cents FROM prices WHERE product = 'tea'`).Scan(&cents); err != nil {
		return err
	}
	s := prices.Stats()
	fmt.Printf("deliveries %d, duplicates %d, late %d, price %d\n", s.Received, s.Duplicates, late, cents)
	return nil
}
