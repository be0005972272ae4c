// Command rabbitmq runs the wallet example on RabbitMQ and PostgreSQL:
//
//	go run ./cmd/devenv -- go run ./examples/wallet/rabbitmq
package main

import (
	"context"
	"errors"
	"log"
	"os"

	"github.com/twiceproof/twiceproof/brokers/rabbitmq"
	"github.com/twiceproof/twiceproof/examples/wallet"
)

const queue = "wallet.example.topups"

func main() {
	if err := run(context.Background()); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context) (err error) {
	url := os.Getenv("AMQP_URL")
	if url == "" {
		return errors.New("set AMQP_URL, or run it as: go run ./cmd/devenv -- go run ./examples/wallet/rabbitmq")
	}
	src, err := rabbitmq.NewSource(rabbitmq.SourceConfig{URL: url, Queue: queue, Topology: rabbitmq.Declare})
	if err != nil {
		return err
	}
	pub, err := rabbitmq.NewPublisher(rabbitmq.PublisherConfig{URL: url})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, pub.Close(ctx)) }()
	return wallet.Run(ctx, src, pub, queue)
}
