// Command kafka runs the wallet example on Kafka and PostgreSQL:
//
//	go run ./cmd/devenv -- go run ./examples/wallet/kafka
package main

import (
	"context"
	"errors"
	"log"
	"os"
	"strings"
	"time"

	segmentio "github.com/segmentio/kafka-go"

	"github.com/twiceproof/twiceproof/brokers/kafka"
	"github.com/twiceproof/twiceproof/examples/wallet"
)

const topic = "wallet-example-topups"

func main() {
	if err := run(context.Background()); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context) (err error) {
	if os.Getenv("KAFKA_BROKERS") == "" {
		return errors.New("set KAFKA_BROKERS, or run it as: go run ./cmd/devenv -- go run ./examples/wallet/kafka")
	}
	addrs := strings.Split(os.Getenv("KAFKA_BROKERS"), ",")
	// Neither Source nor Publisher creates topics: that is for whoever runs the cluster.
	admin := &segmentio.Client{Addr: segmentio.TCP(addrs...), Timeout: 10 * time.Second}
	created, err := admin.CreateTopics(ctx, &segmentio.CreateTopicsRequest{
		Topics: []segmentio.TopicConfig{{Topic: topic, NumPartitions: 3, ReplicationFactor: 1}},
	})
	if err != nil {
		return err
	}
	if err := created.Errors[topic]; err != nil && !errors.Is(err, segmentio.TopicAlreadyExists) {
		return err
	}
	defer func() {
		_, e := admin.DeleteTopics(ctx, &segmentio.DeleteTopicsRequest{Topics: []string{topic}})
		err = errors.Join(err, e)
	}()
	src, err := kafka.NewSource(kafka.SourceConfig{Brokers: addrs, Group: "wallet-example", Topics: []string{topic}})
	if err != nil {
		return err
	}
	pub, err := kafka.NewPublisher(kafka.PublisherConfig{Brokers: addrs})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, pub.Close(ctx)) }()
	return wallet.Run(ctx, src, pub, topic)
}
