package rabbitmq_test

import (
	"context"
	"fmt"
	"log"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/brokers/rabbitmq"
)

// A Source that makes sure of its queue: quorum, with a dead-letter queue
// "billing.dead" and a delivery limit, bound to the exchange "orders".
func ExampleNewSource() {
	orders, err := rabbitmq.NewSource(rabbitmq.SourceConfig{
		URL:      "amqp://guest:guest@localhost:5672/",
		Queue:    "billing",
		Topology: rabbitmq.Declare,
		Bindings: []rabbitmq.Binding{{Exchange: "orders", Kind: "topic", Key: "order.*"}},
	})
	if err != nil {
		log.Fatal(err) // every mistake in the configuration at once
	}
	_ = orders // hand it to consumer.New
}

// A Publisher to an exchange; Message.Topic is the routing key.
func ExampleNewPublisher() {
	pub, err := rabbitmq.NewPublisher(rabbitmq.PublisherConfig{
		URL:      "amqp://guest:guest@localhost:5672/",
		Exchange: "orders",
	})
	if err != nil {
		log.Fatal(err)
	}
	ctx := context.Background()
	defer pub.Close(ctx) //nolint:errcheck // never fails
	for _, r := range pub.Publish(ctx, &brokers.Message{ID: "o-1", Topic: "order.placed", Key: "customer-7", Payload: []byte(`{}`)}) {
		fmt.Println(r.Outcome, r.Err)
	}
}
