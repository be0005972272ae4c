package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	awssqs "github.com/aws/aws-sdk-go-v2/service/sqs"
	"github.com/aws/aws-sdk-go-v2/service/sqs/types"
	"github.com/google/uuid"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/brokers/sqs"
	"github.com/twiceproof/twiceproof/internal/demo"
)

// demoSQS makes a queue of this run's own. The function it returns deletes it.
func demoSQS(ctx context.Context, endpoint string) (demo.Broker, func(), error) {
	cfg := aws.Config{Region: cmp.Or(os.Getenv("AWS_REGION"), "eu-central-1"), BaseEndpoint: &endpoint,
		Credentials: aws.CredentialsProviderFunc(func(context.Context) (aws.Credentials, error) {
			return aws.Credentials{
				AccessKeyID:     cmp.Or(os.Getenv("AWS_ACCESS_KEY_ID"), "demo"),
				SecretAccessKey: cmp.Or(os.Getenv("AWS_SECRET_ACCESS_KEY"), "demo"),
				SessionToken:    os.Getenv("AWS_SESSION_TOKEN"),
			}, nil
		})}
	client := awssqs.NewFromConfig(cfg)
	queue := strings.ReplaceAll(demo.Topic, ".", "-") + "-" + uuid.NewString()
	created, err := client.CreateQueue(ctx, &awssqs.CreateQueueInput{QueueName: &queue})
	if err != nil {
		return demo.Broker{}, nil, fmt.Errorf("create a queue for the demo: %w", err)
	}
	remove := func() error {
		_, err := client.DeleteQueue(context.WithoutCancel(ctx), &awssqs.DeleteQueueInput{QueueUrl: created.QueueUrl})
		return err
	}
	pub, err := sqs.NewPublisher(sqs.PublisherConfig{AWS: cfg})
	if err != nil {
		return demo.Broker{}, nil, errors.Join(err, remove())
	}
	source := func() brokers.Source {
		// A crashed consumer's messages come back after Visibility.
		s, err := sqs.NewSource(sqs.SourceConfig{AWS: cfg, Queue: queue, Visibility: 2 * time.Second, Wait: time.Second})
		if err != nil {
			return failedSource{err: err}
		}
		return s
	}
	empty := func(ctx context.Context) (bool, error) {
		out, err := client.GetQueueAttributes(ctx, &awssqs.GetQueueAttributesInput{QueueUrl: created.QueueUrl, AttributeNames: []types.QueueAttributeName{
			types.QueueAttributeNameApproximateNumberOfMessages, types.QueueAttributeNameApproximateNumberOfMessagesNotVisible}})
		if err != nil {
			return false, err
		}
		for _, n := range out.Attributes {
			if n != "0" {
				return false, nil
			}
		}
		return true, nil
	}
	closeAll := func() {
		_ = pub.Close(context.WithoutCancel(ctx))
		_ = remove()
	}
	return demo.Broker{Name: "sqs", Publisher: twice{into{pub, queue}}, Source: source, Empty: empty}, closeAll, nil
}
