package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"
	segmentio "github.com/segmentio/kafka-go"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/brokers/kafka"
	"github.com/twiceproof/twiceproof/internal/demo"
)

const demoPartitions = 3

// demoKafka makes a topic of this run's own. The function it returns deletes it.
func demoKafka(ctx context.Context, list string) (demo.Broker, func(), error) {
	addrs := strings.Split(list, ",")
	tr := &segmentio.Transport{}
	admin := &segmentio.Client{Addr: segmentio.TCP(addrs...), Timeout: 10 * time.Second, Transport: tr}
	topic := demo.Topic + "." + uuid.NewString()
	res, err := admin.CreateTopics(ctx, &segmentio.CreateTopicsRequest{
		Topics: []segmentio.TopicConfig{{Topic: topic, NumPartitions: demoPartitions, ReplicationFactor: -1}},
	})
	if err == nil {
		err = res.Errors[topic]
	}
	if err != nil {
		tr.CloseIdleConnections()
		return demo.Broker{}, nil, fmt.Errorf("create a topic for the demo: %w", err)
	}
	remove := func() error {
		defer tr.CloseIdleConnections()
		_, err := admin.DeleteTopics(context.WithoutCancel(ctx), &segmentio.DeleteTopicsRequest{Topics: []string{topic}})
		return err
	}
	pub, err := kafka.NewPublisher(kafka.PublisherConfig{Brokers: addrs})
	if err != nil {
		return demo.Broker{}, nil, errors.Join(err, remove())
	}
	source := func() brokers.Source {
		s, err := kafka.NewSource(kafka.SourceConfig{Brokers: addrs, Group: topic, Topics: []string{topic}, DrainFor: time.Second, HeartbeatInterval: 500 * time.Millisecond})
		if err != nil {
			return failedSource{err: err}
		}
		return s
	}
	closeAll := func() {
		_ = pub.Close(context.WithoutCancel(ctx))
		_ = remove()
	}
	empty := func(ctx context.Context) (bool, error) { return kafkaLag(ctx, admin, topic) }
	return demo.Broker{Name: "kafka", Publisher: twice{into{pub, topic}}, Source: source, Empty: empty}, closeAll, nil
}

// kafkaLag reports whether the group, named as the topic, has committed everything.
func kafkaLag(ctx context.Context, admin *segmentio.Client, topic string) (empty bool, err error) {
	ends := &segmentio.ListOffsetsRequest{Topics: map[string][]segmentio.OffsetRequest{}}
	commits := &segmentio.OffsetFetchRequest{GroupID: topic, Topics: map[string][]int{}}
	for p := range demoPartitions {
		ends.Topics[topic] = append(ends.Topics[topic], segmentio.LastOffsetOf(p))
		commits.Topics[topic] = append(commits.Topics[topic], p)
	}
	end, err := admin.ListOffsets(ctx, ends)
	if err != nil {
		return false, err
	}
	at, err := admin.OffsetFetch(ctx, commits)
	if err != nil {
		return false, err
	}
	var lag int64
	for _, p := range end.Topics[topic] {
		if p.Error != nil {
			return false, p.Error
		}
		lag += p.LastOffset
	}
	for _, p := range at.Topics[topic] {
		lag -= max(p.CommittedOffset, 0)
	}
	return lag == 0, nil
}
