// Package wallet is the part of the wallet example that knows no broker: the
// handler, its tables, and a producer that sends some of its messages twice.
package wallet

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/consumer"
	"github.com/twiceproof/twiceproof/inbox"
	"github.com/twiceproof/twiceproof/migrations"
)

// TopUp is the body of a message.
type TopUp struct {
	Wallet string `json:"wallet"`
	Cents  int    `json:"cents"`
}

// Handle adds a top-up to its wallet. An addition is what must not happen twice.
func Handle(ctx context.Context, tx pgx.Tx, e consumer.Event[TopUp]) error {
	if e.Body.Cents <= 0 {
		return consumer.Permanent(fmt.Errorf("a top-up of %d cents", e.Body.Cents))
	}
	_, err := tx.Exec(ctx, `INSERT INTO wallets (id, cents) VALUES ($1, $2)
		ON CONFLICT (id) DO UPDATE SET cents = wallets.cents + excluded.cents`, e.Body.Wallet, e.Body.Cents)
	return err
}

// Messages are three top-ups, two of which the producer sends again because it did
// not see the answer: five deliveries.
func Messages(topic string) []*brokers.Message {
	topUp := func(id string, cents int) *brokers.Message {
		return &brokers.Message{ID: id, Topic: topic, Key: "ada", Type: "wallet.topped-up", ContentType: "application/json",
			Payload: fmt.Appendf(nil, `{"wallet":"ada","cents":%d}`, cents)}
	}
	a, b, c := topUp("topup-1", 500), topUp("topup-2", 300), topUp("topup-3", 200)
	return []*brokers.Message{a, b, a, c, b}
}

// Open returns a pool on an empty schema of the example's own.
func Open(ctx context.Context) (*pgxpool.Pool, error) {
	url := os.Getenv("DATABASE_URL")
	if url == "" {
		return nil, errors.New("set DATABASE_URL, or run it as: go run ./cmd/devenv -- go run ./examples/wallet/…")
	}
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, fmt.Errorf("DATABASE_URL: %w", err)
	}
	cfg.MaxConns = 10
	cfg.ConnConfig.RuntimeParams["search_path"] = "wallet_example"
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return nil, err
	}
	_, err = pool.Exec(ctx, `DROP SCHEMA IF EXISTS wallet_example CASCADE; CREATE SCHEMA wallet_example;
		CREATE TABLE wallets (id text PRIMARY KEY, cents bigint NOT NULL)`)
	if err == nil {
		_, err = migrations.Up(ctx, migrations.Pool(pool))
	}
	if err != nil {
		pool.Close()
		return nil, err
	}
	return pool, nil
}

// Run publishes the messages, consumes them from src, and prints what became of them.
func Run(ctx context.Context, src brokers.Source, pub brokers.Publisher, topic string) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	pool, err := Open(ctx)
	if err != nil {
		return err
	}
	defer pool.Close()

	topUps, err := consumer.New(inbox.Postgres(pool), src, consumer.JSON(Handle), consumer.Config{
		Name: "wallet", Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))})
	if err != nil {
		return err
	}
	done := make(chan error, 1)
	go func() { done <- topUps.Run(ctx) }()
	for topUps.Ready() != nil { // the queue is there once the consumer is ready
		select {
		case err := <-done:
			return errors.Join(err, errors.New("the consumer did not start"))
		case <-time.After(20 * time.Millisecond):
		}
	}
	ms := Messages(topic)
	for i, r := range pub.Publish(ctx, ms...) {
		if r.Err != nil {
			return fmt.Errorf("publish message %d: %w", i, r.Err)
		}
	}
	for s := topUps.Stats(); s.Processed+s.Duplicates < int64(len(ms)); s = topUps.Stats() {
		select {
		case err := <-done:
			return errors.Join(err, errors.New("not finished"))
		case <-time.After(20 * time.Millisecond):
		}
	}
	if err := topUps.Shutdown(ctx); err != nil {
		return err
	}
	var messages, balance int
	err = pool.QueryRow(ctx, `SELECT (SELECT count(*) FROM processed_messages), (SELECT sum(cents) FROM wallets)`).Scan(&messages, &balance)
	if err != nil {
		return err
	}
	fmt.Printf("deliveries %d, distinct messages %d, balance %d\n", topUps.Stats().Received, messages, balance)
	return <-done
}
