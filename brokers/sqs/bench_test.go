package sqs

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/sqs"
	"github.com/aws/aws-sdk-go-v2/service/sqs/types"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
)

// benchPollers is the number of receives that wait at once, in both.
const benchPollers = 4

// BenchmarkReceiveAndDelete empties a standard queue by the Source and by a plain loop
// with as many pollers, each of which receives ten and deletes them in one batch. Only
// the ratio within one run means anything:
//
//	go build -o devenv ./cmd/devenv
//	./devenv -only sqs -- sh -c 'for i in 1 2 3 4 5; do go test -run - -bench . -benchtime 20000x ./brokers/sqs; done'
func BenchmarkReceiveAndDelete(b *testing.B) {
	endpoint := devtest.SQSEndpoint(b)
	tr := http.DefaultTransport.(*http.Transport).Clone()
	tr.MaxIdleConnsPerHost = 64
	b.Cleanup(tr.CloseIdleConnections)
	client := sqs.New(sqs.Options{
		BaseEndpoint: &endpoint, Region: "eu-central-1", HTTPClient: &http.Client{Transport: tr},
		Credentials: aws.CredentialsProviderFunc(func(context.Context) (aws.Credentials, error) {
			return aws.Credentials{AccessKeyID: "bench", SecretAccessKey: "bench"}, nil
		}),
	})
	b.Run("source", func(b *testing.B) {
		url := benchQueue(b, client, b.N)
		s, err := NewSource(SourceConfig{Client: client, Queue: url, MaxPollers: benchPollers, Wait: time.Second})
		require.NoError(b, err)
		b.ResetTimer()
		_, err = s.Open(b.Context(), brokers.OpenOptions{Consumer: "bench", Room: 400})
		require.NoError(b, err)
		// As the runner does it: the settlements that are there go in one call.
		finished, settled := make(chan *brokers.Delivery, 400), make(chan error)
		go func() {
			for d := range finished {
				ss := []brokers.Settlement{{Delivery: d, Verb: brokers.Done}}
				for more := true; more && len(ss) < 100; {
					select {
					case d, ok := <-finished:
						if more = ok; ok {
							ss = append(ss, brokers.Settlement{Delivery: d, Verb: brokers.Done})
						}
					default:
						more = false
					}
				}
				for _, err := range s.Settle(context.Background(), ss...) {
					if err != nil {
						settled <- err
						return
					}
				}
			}
			settled <- nil
		}()
		for n := 0; n < b.N; {
			ds, err := s.Receive(b.Context(), 100)
			require.NoError(b, err)
			for _, d := range ds {
				finished <- d
			}
			n += len(ds)
		}
		close(finished)
		require.NoError(b, <-settled)
		b.StopTimer()
		require.NoError(b, s.Close(context.Background()))
	})
	b.Run("loop", func(b *testing.B) {
		url := benchQueue(b, client, b.N)
		b.ResetTimer()
		var left atomic.Int64
		left.Store(int64(b.N))
		var wg sync.WaitGroup
		for range benchPollers {
			wg.Go(func() {
				for left.Load() > 0 {
					out, err := client.ReceiveMessage(b.Context(), &sqs.ReceiveMessageInput{
						QueueUrl: &url, MaxNumberOfMessages: 10, WaitTimeSeconds: 1, VisibilityTimeout: 60,
						MessageAttributeNames: []string{"All"}, MessageSystemAttributeNames: []types.MessageSystemAttributeName{"All"},
					})
					if err != nil {
						b.Error(err)
						return
					}
					if len(out.Messages) == 0 {
						continue
					}
					es := make([]types.DeleteMessageBatchRequestEntry, len(out.Messages))
					for i, m := range out.Messages {
						es[i] = types.DeleteMessageBatchRequestEntry{Id: aws.String(strconv.Itoa(i)), ReceiptHandle: m.ReceiptHandle}
					}
					if _, err := client.DeleteMessageBatch(b.Context(), &sqs.DeleteMessageBatchInput{QueueUrl: &url, Entries: es}); err != nil {
						b.Error(err)
						return
					}
					if left.Add(-int64(len(es))) <= 0 {
						b.StopTimer() // the others wait for what does not come
					}
				}
			})
		}
		wg.Wait()
	})
}

// benchQueue makes a queue with n messages.
func benchQueue(b *testing.B, c *sqs.Client, n int) string {
	b.Helper()
	created, err := c.CreateQueue(b.Context(), &sqs.CreateQueueInput{QueueName: aws.String(devtest.Name("bench"))})
	require.NoError(b, err)
	b.Cleanup(func() { _, _ = c.DeleteQueue(context.Background(), &sqs.DeleteQueueInput{QueueUrl: created.QueueUrl}) })
	p, err := NewPublisher(PublisherConfig{Client: c, Concurrency: 8})
	require.NoError(b, err)
	defer p.Close(context.Background()) //nolint:errcheck // nothing is in flight
	for from := 0; from < n; from += 1000 {
		var ms []*brokers.Message
		for i := from; i < min(n, from+1000); i++ {
			ms = append(ms, &brokers.Message{ID: fmt.Sprintf("m%08d", i), Topic: aws.ToString(created.QueueUrl), Payload: []byte(fmt.Sprintf("payload %0200d", i))})
		}
		for _, r := range p.Publish(b.Context(), ms...) {
			require.NoError(b, r.Err)
		}
	}
	return aws.ToString(created.QueueUrl)
}
