// Command quickstart is the smallest whole program: one message, delivered three
// times, one effect. It needs nothing installed: the broker lives in the process, and
// the database is an SQLite file.
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
	"github.com/twiceproof/twiceproof/migrations"
)

type orderPlaced struct {
	OrderID string `json:"order_id"`
	Cents   int    `json:"cents"`
}

// bill is the handler: everything it writes through tx happens once.
func bill(ctx context.Context, tx *sql.Tx, e consumer.Event[orderPlaced]) error {
	_, err := tx.ExecContext(ctx, `INSERT INTO invoices (order_id, cents) VALUES (?, ?)`, e.Body.OrderID, e.Body.Cents)
	return err
}

func main() {
	if err := run(context.Background()); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context) error {
	dir, err := os.MkdirTemp("", "quickstart-")
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
	if _, err := db.ExecContext(ctx, `CREATE TABLE invoices (order_id TEXT, cents INTEGER)`); err != nil {
		return err
	}

	broker := memory.New(memory.Config{})
	order := &brokers.Message{ID: "order-1-placed", Topic: "orders", Key: "order-1", Payload: []byte(`{"order_id":"order-1","cents":4200}`)}
	broker.Publisher().Publish(ctx, order, order, order) // the same message, three times

	billing, err := consumer.New(inbox.SQLite(db), broker.Source("orders"), consumer.JSON(bill), consumer.Config{Name: "billing"})
	if err != nil {
		return err
	}
	runCtx, stop := context.WithTimeout(ctx, 10*time.Second)
	defer stop()
	go func() {
		for broker.Len("orders") > 0 && runCtx.Err() == nil {
			time.Sleep(10 * time.Millisecond)
		}
		stop()
	}()
	if err := billing.Run(runCtx); err != nil {
		return err
	}
	var invoices int
	if err := db.QueryRowContext(ctx, `SELECT count(*) FROM invoices`).Scan(&invoices); err != nil {
		return err
	}
	s := billing.Stats()
	fmt.Printf("deliveries %d, duplicates %d, invoices %d\n", s.Received, s.Duplicates, invoices)
	return nil
}
