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
	return sqs.NewSource(sqs.SourceConfig{AWS: sqsConfig(e.URL), Queue: e.Name, Visibility: sqsVisibility, Wait: time.Second, MaxPollers: 4})
}

func (e endpoint) sqsPublisher() (brokers.Publisher, error) {
	return sqs.NewPublisher(sqs.PublisherConfig{AWS: sqsConfig(e.URL)})
}

// sqsQueue is an ElasticMQ behind a proxy, with one queue. It keeps its queues in
// memory, so that it cannot be restarted: connections are cut, and answers get lost.
type sqsQueue struct {
	fifo   bool
	server *devenv.SQS
	proxy  *proxy
	name   string
	url    string
	client *awssqs.Client
	cuts   int
}

func (q *sqsQueue) start(t testing.TB) {
	q.server = devtest.OwnSQS(t)
	q.proxy = newProxy(t, q.server.Addr())
	q.name = devtest.Name("chaos")
	attributes := map[string]string{}
	if q.fifo {
		q.name += ".fifo"
		attributes["FifoQueue"] = "true"
	}
	tr := &http.Transport{}
	t.Cleanup(tr.CloseIdleConnections)
	cfg := sqsConfig(q.server.URL())
	cfg.HTTPClient = &http.Client{Transport: tr}
	q.client = awssqs.NewFromConfig(cfg)
	created, err := q.client.CreateQueue(t.Context(), &awssqs.CreateQueueInput{QueueName: &q.name, Attributes: attributes})
	require.NoError(t, err)
	q.url = aws.ToString(created.QueueUrl)
}

func (q *sqsQueue) endpoint() endpoint {
	return endpoint{"sqs", "http://" + q.proxy.l.Addr().String(), q.name, q.fifo}
}

func (q *sqsQueue) ordered() bool { return q.fifo }

// cut ends all connections; each second time it first loses what the server answers for
// a moment: messages that nobody got, sends and deletes that nobody knows of.
func (q *sqsQueue) cut(ctx context.Context) (int, error) {
	if q.cuts++; q.cuts%2 == 0 {
		q.proxy.deaf.Store(true)
		defer q.proxy.deaf.Store(false)
		pause(ctx, 150*time.Millisecond)
	}
	return q.proxy.cut(), nil
}

func (q *sqsQueue) restart(context.Context) error {
	return fmt.Errorf("the server forgets its queues")
}

func (q *sqsQueue) left(ctx context.Context) (int, error) {
	out, err := q.client.GetQueueAttributes(ctx, &awssqs.GetQueueAttributesInput{QueueUrl: &q.url, AttributeNames: []types.QueueAttributeName{
		types.QueueAttributeNameApproximateNumberOfMessages, types.QueueAttributeNameApproximateNumberOfMessagesNotVisible}})
	if err != nil {
		return 0, err
	}
	n := 0
	for _, v := range out.Attributes {
		var k int
		if _, err := fmt.Sscan(v, &k); err != nil {
			return 0, err
		}
		n += k
	}
	return n, nil
}

// A standard queue: nobody promises an order, but every message has one effect.
func TestChaosOnSQS(t *testing.T) {
	p := planOf(t)
	p.brokerKills = 0
	runChaos(t, p, &sqsQueue{})
}

// On a FIFO queue the first effects of every key are in the order in which its messages
// were enqueued.
func TestChaosOnSQSInOrder(t *testing.T) {
	p := planOf(t)
	p.brokerKills = 0
	runChaos(t, p, &sqsQueue{fifo: true})
}
