package chaos

import (
	"context"
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	awssqs "github.com/aws/aws-sdk-go-v2/service/sqs"
	"github.com/aws/aws-sdk-go-v2/service/sqs/types"
	"github.com/aws/smithy-go/middleware"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/brokers/sqs"
	"github.com/twiceproof/twiceproof/internal/devenv"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
)

// sqsVisibility is how long a killed consumer holds its messages back.
const sqsVisibility = 4 * time.Second

func sqsConfig(endpoint string) aws.Config {
	return aws.Config{Region: "eu-central-1", BaseEndpoint: &endpoint,
		Credentials: aws.CredentialsProviderFunc(func(context.Context) (aws.Credentials, error) {
			return aws.Credentials{AccessKeyID: "chaos", SecretAccessKey: "chaos"}, nil
		})}
}

func (e endpoint) sqsSource() (brokers.Source, error) {
	cfg := sqsConfig(e.URL)
	cfg.APIOptions = append(cfg.APIOptions, withoutAttemptID)
	return sqs.NewSource(sqs.SourceConfig{AWS: cfg, Queue: e.Name, Visibility: sqsVisibility, Wait: time.Second, MaxPollers: 4})
}

// withoutAttemptID leaves ReceiveRequestAttemptId out. ElasticMQ 1.7.1 loses a whole FIFO
// queue by one that comes again: it still answers the long poll of the connection that was
// cut, finds that a message of the second answer is deleted, and the exception ("Invalid",
// thrown in tryReply) restarts the queue's actor, without its messages. What SQS does with
// it is tested on the strict server; here a lost answer locks its groups for a while.
func withoutAttemptID(stack *middleware.Stack) error {
	return stack.Initialize.Add(middleware.InitializeMiddlewareFunc("WithoutAttemptID", func(ctx context.Context, in middleware.InitializeInput,
		next middleware.InitializeHandler) (middleware.InitializeOutput, middleware.Metadata, error) {
		if receive, ok := in.Parameters.(*awssqs.ReceiveMessageInput); ok {
			plain := *receive
			plain.ReceiveRequestAttemptId = nil
			in.Parameters = &plain
		}
		return next.HandleInitialize(ctx, in)
	}), middleware.Before)
}

func (e endpoint) sqsPublisher() (brokers.Publisher, error) {
	return sqs.NewPublisher(sqs.PublisherConfig{AWS: sqsConfig(e.URL)})
}

// sqsQueue is a queue of an SQS server.
type sqsQueue struct {
	fifo      bool
	at        string // where workers find the server
	name, url string
	client    *awssqs.Client
}

// sqsServer is an ElasticMQ behind a proxy, with one queue. It keeps its queues in
// memory, so that it cannot be restarted: connections are cut, and answers get lost.
type sqsServer struct {
	sqsQueue
	server *devenv.SQS
	proxy  *proxy
	cuts   int
}

func (q *sqsServer) start(t testing.TB) {
	q.server = devtest.OwnSQS(t)
	q.at = q.server.URL()
	q.create(t)
	q.proxy = newProxy(t, q.server.Addr())
	q.at = "http://" + q.proxy.l.Addr().String()
}

// create makes the queue.
func (q *sqsQueue) create(t testing.TB) {
	q.name = devtest.Name("chaos")
	attributes := map[string]string{}
	if q.fifo {
		q.name += ".fifo"
		attributes["FifoQueue"] = "true"
	}
	tr := &http.Transport{}
	t.Cleanup(tr.CloseIdleConnections)
	cfg := sqsConfig(q.at)
	cfg.HTTPClient = &http.Client{Transport: tr}
	q.client = awssqs.NewFromConfig(cfg)
	created, err := q.client.CreateQueue(t.Context(), &awssqs.CreateQueueInput{QueueName: &q.name, Attributes: attributes})
	require.NoError(t, err)
	q.url = aws.ToString(created.QueueUrl)
	t.Cleanup(func() {
		_, err := q.client.DeleteQueue(context.Background(), &awssqs.DeleteQueueInput{QueueUrl: &q.url})
		assert.NoError(t, err)
	})
}

func (q *sqsQueue) endpoint() endpoint { return endpoint{"sqs", q.at, q.name, q.fifo} }

func (q *sqsQueue) ordered() bool { return q.fifo }

// cut ends all connections; each second time it first loses what the server answers for
// a moment: messages that nobody got, sends and deletes that nobody knows of.
func (q *sqsServer) cut(ctx context.Context) (int, error) {
	if q.cuts++; q.cuts%2 == 0 {
		q.proxy.deaf.Store(true)
		defer q.proxy.deaf.Store(false)
		pause(ctx, 150*time.Millisecond)
	}
	return q.proxy.cut(), nil
}

func (q *sqsServer) restart(context.Context) error {
	return fmt.Errorf("the server forgets its queues")
}

func (q *sqsServer) left(ctx context.Context) (int, error) {
	visible, hidden, err := q.counts(ctx)
	return visible + hidden, err
}

// counts counts the messages that can be received now, and those that somebody has.
func (q *sqsQueue) counts(ctx context.Context) (visible, hidden int, err error) {
	out, err := q.client.GetQueueAttributes(ctx, &awssqs.GetQueueAttributesInput{QueueUrl: &q.url, AttributeNames: []types.QueueAttributeName{
		types.QueueAttributeNameApproximateNumberOfMessages, types.QueueAttributeNameApproximateNumberOfMessagesNotVisible}})
	if err != nil {
		return 0, 0, err
	}
	_, err = fmt.Sscan(out.Attributes["ApproximateNumberOfMessages"]+" "+out.Attributes["ApproximateNumberOfMessagesNotVisible"], &visible, &hidden)
	return visible, hidden, err
}

// A standard queue: nobody promises an order, but every message has one effect.
func TestChaosOnSQS(t *testing.T) {
	p := planOf(t)
	p.brokerKills = 0
	runChaos(t, p, &sqsServer{})
}

// On a FIFO queue the first effects of every key are in the order in which its messages
// were enqueued.
func TestChaosOnSQSInOrder(t *testing.T) {
	p := planOf(t)
	p.brokerKills = 0
	runChaos(t, p, &sqsServer{sqsQueue: sqsQueue{fifo: true}})
}
