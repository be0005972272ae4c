// Command sqs runs the wallet example on SQS and PostgreSQL:
//
//	go run ./cmd/devenv -- go run ./examples/wallet/sqs
//
// With queues of your own take aws.Config from config.LoadDefaultConfig.
package main

import (
	"context"
	"errors"
	"log"
	"os"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	awssqs "github.com/aws/aws-sdk-go-v2/service/sqs"

	"github.com/twiceproof/twiceproof/brokers/sqs"
	"github.com/twiceproof/twiceproof/examples/wallet"
)

const queue = "wallet-example-topups"

func main() {
	if err := run(context.Background()); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context) (err error) {
	endpoint := os.Getenv("SQS_ENDPOINT")
	if endpoint == "" {
		return errors.New("set SQS_ENDPOINT, or run it as: go run ./cmd/devenv -- go run ./examples/wallet/sqs")
	}
	cfg := aws.Config{Region: "eu-central-1", BaseEndpoint: &endpoint, Credentials: credentials()}
	// Neither Source nor Publisher creates queues: that is for whoever runs the account.
	client := awssqs.NewFromConfig(cfg)
	created, err := client.CreateQueue(ctx, &awssqs.CreateQueueInput{QueueName: aws.String(queue)})
	if err != nil {
		return err
	}
	defer func() {
		_, e := client.DeleteQueue(ctx, &awssqs.DeleteQueueInput{QueueUrl: created.QueueUrl})
		err = errors.Join(err, e)
	}()
	src, err := sqs.NewSource(sqs.SourceConfig{AWS: cfg, Queue: queue, Wait: time.Second})
	if err != nil {
		return err
	}
	pub, err := sqs.NewPublisher(sqs.PublisherConfig{AWS: cfg})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, pub.Close(ctx)) }()
	return wallet.Run(ctx, src, pub, queue)
}

// credentials are those of the environment; a server of devenv's takes any.
func credentials() aws.CredentialsProvider {
	return aws.CredentialsProviderFunc(func(context.Context) (aws.Credentials, error) {
		c := aws.Credentials{AccessKeyID: os.Getenv("AWS_ACCESS_KEY_ID"), SecretAccessKey: os.Getenv("AWS_SECRET_ACCESS_KEY"), SessionToken: os.Getenv("AWS_SESSION_TOKEN")}
		if c.AccessKeyID == "" {
			c.AccessKeyID, c.SecretAccessKey = "example", "example"
		}
		return c, nil
	})
}
