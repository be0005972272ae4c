package consumer_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	awssqs "github.com/aws/aws-sdk-go-v2/service/sqs"
	"github.com/aws/aws-sdk-go-v2/service/sqs/types"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/brokers/sqs"
	"github.com/twiceproof/twiceproof/consumer"
	"github.com/twiceproof/twiceproof/inbox"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
)

// A consumer on a real SQS server and a real PostgreSQL: standard and FIFO queues.

// sqsVisibility is short: what is lost comes back within a test.
const sqsVisibility = 2 * time.Second

// sqsWire is the source's way to the server, where its calls are seen, and fail.
type sqsWire struct {
	http.RoundTripper
	calls sync.Map // operation -> *atomic.Int64
	// on is called before each call; an error is what the source gets instead of it.
	on func(op string, body []byte) error
}

func (w *sqsWire) RoundTrip(r *http.Request) (*http.Response, error) {
	_, op, _ := strings.Cut(r.Header.Get("X-Amz-Target"), ".")
	n, _ := w.calls.LoadOrStore(op, new(atomic.Int64))
	n.(*atomic.Int64).Add(1)
	if w.on != nil {
		body, err := io.ReadAll(r.Body)
		if err = errors.Join(err, r.Body.Close()); err != nil {
			return nil, err
		}
		if err := w.on(op, body); err != nil {
			return nil, err
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
	}
	return w.RoundTripper.RoundTrip(r)
}

func (w *sqsWire) counted(op string) int64 {
	n, ok := w.calls.Load(op)
	if !ok {
		return 0
	}
	return n.(*atomic.Int64).Load()
}

// sqsQueue is a fresh queue.
type sqsQueue struct {
	t         *testing.T
	name, url string
	client    *awssqs.Client // of the test's own
	wire      *sqsWire       // of its sources
}

func newSQSQueue(t *testing.T, fifo bool, attributes map[string]string) *sqsQueue {
	endpoint := devtest.SQSEndpoint(t)
	tr := http.DefaultTransport.(*http.Transport).Clone()
	tr.MaxIdleConnsPerHost = 64
	t.Cleanup(tr.CloseIdleConnections)
	q := &sqsQueue{t: t, name: devtest.Name("runner"), wire: &sqsWire{RoundTripper: tr}}
	all := map[string]string{}
	if fifo {
		q.name += ".fifo"
		all["FifoQueue"] = "true"
	}
	for k, v := range attributes {
		all[k] = v
	}
	cfg := q.config(endpoint)
	cfg.HTTPClient = &http.Client{Transport: tr}
	q.client = awssqs.NewFromConfig(cfg)
	created, err := q.client.CreateQueue(t.Context(), &awssqs.CreateQueueInput{QueueName: &q.name, Attributes: all})
	require.NoError(t, err)
	q.url = aws.ToString(created.QueueUrl)
	t.Cleanup(func() {
		_, err := q.client.DeleteQueue(context.Background(), &awssqs.DeleteQueueInput{QueueUrl: &q.url})
		require.NoError(t, err)
	})
	return q
}

func (q *sqsQueue) config(endpoint string) aws.Config {
	return aws.Config{Region: "eu-central-1", BaseEndpoint: &endpoint, HTTPClient: &http.Client{Transport: q.wire},
		Credentials: aws.CredentialsProviderFunc(func(context.Context) (aws.Credentials, error) {
			return aws.Credentials{AccessKeyID: "test", SecretAccessKey: "test"}, nil
		})}
}

func (q *sqsQueue) source(change func(*sqs.SourceConfig)) brokers.Source {
	cfg := sqs.SourceConfig{AWS: q.config(devtest.SQSEndpoint(q.t)), Queue: q.name, Visibility: sqsVisibility, Wait: time.Second}
	if change != nil {
		change(&cfg)
	}
	src, err := sqs.NewSource(cfg)
	require.NoError(q.t, err)
	return src
}

func (q *sqsQueue) publish(ms ...*brokers.Message) {
	q.t.Helper()
	pub, err := sqs.NewPublisher(sqs.PublisherConfig{Client: q.client})
	require.NoError(q.t, err)
	for _, m := range ms {
		m.Topic = q.name
	}
	for _, r := range pub.Publish(q.t.Context(), ms...) {
		require.NoError(q.t, r.Err)
	}
	require.NoError(q.t, pub.Close(q.t.Context()))
}

// send sends a bare body.
func (q *sqsQueue) send(body string) {
	q.t.Helper()
	_, err := q.client.SendMessage(q.t.Context(), &awssqs.SendMessageInput{QueueUrl: &q.url, MessageBody: &body})
	require.NoError(q.t, err)
}

func (q *sqsQueue) attributes() map[string]string {
	q.t.Helper()
	out, err := q.client.GetQueueAttributes(context.Background(), &awssqs.GetQueueAttributesInput{QueueUrl: &q.url, AttributeNames: []types.QueueAttributeName{types.QueueAttributeNameAll}})
	require.NoError(q.t, err)
	return out.Attributes
}

// left counts what is in the queue, hidden or not.
func (q *sqsQueue) left() (n int) {
	q.t.Helper()
	a := q.attributes()
	for _, name := range []types.QueueAttributeName{types.QueueAttributeNameApproximateNumberOfMessages, types.QueueAttributeNameApproximateNumberOfMessagesNotVisible} {
		var k int
		_, err := fmt.Sscan(a[string(name)], &k)
		require.NoError(q.t, err)
		n += k
	}
	return n
}

// deadLetters makes a queue that q's messages go to when they were received more than
// max times.
func (q *sqsQueue) deadLetters(fifo bool, max int) *sqsQueue {
	q.t.Helper()
	dead := newSQSQueue(q.t, fifo, nil)
	policy := fmt.Sprintf(`{"deadLetterTargetArn":%q,"maxReceiveCount":"%d"}`, dead.attributes()["QueueArn"], max)
	_, err := q.client.SetQueueAttributes(q.t.Context(), &awssqs.SetQueueAttributesInput{QueueUrl: &q.url, Attributes: map[string]string{"RedrivePolicy": policy}})
	require.NoError(q.t, err)
	return dead
}

func (q *sqsQueue) run(db database, cfg consumer.Config, h handlerFunc) *running {
	q.t.Helper()
	r := db.start(q.t, q.source(nil), cfg, h)
	eventually(q.t, "ready", func() bool { return r.Ready() == nil })
	return r
}

func onlyEffect(_ context.Context, exec execFunc, m *consumer.Message) error { return effect(exec, m) }

// Each message was sent twice by its producer, as two messages of SQS with two
// MessageIds (aws/aws-sdk-js-v3#1556): each has one effect, and deletes go ten at a time.
func TestEveryMessageHasOneEffectOnSQS(t *testing.T) {
	t.Parallel()
	q, db := newSQSQueue(t, false, nil), postgres(t)
	const n = 600
	var ms []*brokers.Message
	for i := range 2 * n {
		ms = append(ms, msg("", fmt.Sprintf("m%03d", i%n), fmt.Sprint("k", i%7), fmt.Sprint(i%n)))
	}
	q.publish(ms...)
	r := db.start(t, q.source(func(c *sqs.SourceConfig) { c.Visibility = 30 * time.Second }), consumer.Config{Concurrency: 16}, onlyEffect)
	eventually(t, "all are settled", func() bool { s := r.Stats(); return s.Processed+s.Duplicates == 2*n })
	require.NoError(t, r.stop())
	require.EqualValues(t, n, r.Stats().Processed)
	require.Zero(t, r.Stats().Failures+r.Stats().Held+r.Stats().Lost)
	require.Equal(t, n, db.query(t, `SELECT count(*) FROM effects`))
	require.Equal(t, n, db.query(t, `SELECT count(DISTINCT id) FROM effects`))
	require.Zero(t, q.left())
	require.LessOrEqual(t, q.wire.counted("DeleteMessageBatch"), int64(2*n/3), "deletes are batched, however slow the machine")
}

// dashbitco/broadway_sqs#78, awspring/spring-cloud-aws#124: after A1 fails, A2 runs.
// Some fail in place and succeed, some are held while the rest of their group waits
// behind them, and the consumer is replaced on the way.
func TestFailuresOnAFIFOQueueKeepTheOrderOfTheirGroup(t *testing.T) {
	t.Parallel()
	q, db := newSQSQueue(t, true, nil), postgres(t)
	const groups, each = 10, 30
	var ms []*brokers.Message
	for i := range each {
		for g := range groups {
			ms = append(ms, msg("", fmt.Sprintf("%02d/%03d", g, i), fmt.Sprint("g", g), "x"))
		}
	}
	q.publish(ms...)
	var runs sync.Map
	handler := func(_ context.Context, exec execFunc, m *consumer.Message) error {
		if err := effect(exec, m); err != nil {
			return err
		}
		n, _ := runs.LoadOrStore(m.ID, new(atomic.Int64))
		run := n.(*atomic.Int64).Add(1)
		switch {
		case strings.HasSuffix(m.ID, "5") && run <= 1, // in place
			strings.HasSuffix(m.ID, "1") && run <= 5: // held
			return fmt.Errorf("run %d fails", run)
		}
		return nil
	}
	cfg := quick()
	cfg.MaxAttempts, cfg.RequireOrder, cfg.Name = 50, true, t.Name()
	r := q.run(db, cfg, handler)
	eventually(t, "half are done", func() bool { return r.Stats().Processed >= groups*each/2 })
	require.NoError(t, r.stop())
	r2 := q.run(db, cfg, handler)
	eventually(t, "all are done", func() bool { return r.Stats().Processed+r2.Stats().Processed == groups*each })
	require.NoError(t, r2.stop())
	require.Positive(t, r.Stats().Held)
	require.Equal(t, groups*each, db.query(t, `SELECT count(*) FROM effects`))
	require.Equal(t, groups*each, db.query(t, `SELECT count(DISTINCT id) FROM effects`))
	require.Zero(t, db.query(t, `SELECT count(*) FROM effects a JOIN effects b ON a.key = b.key AND a.id < b.id AND a.seq > b.seq`), "out of order")
	require.Zero(t, db.query(t, `SELECT count(*) FROM held_messages`))
	require.Zero(t, q.left())
}

// JasperFx/wolverine#4019: ten messages are received at once and run one after the
// other, for longer than they are hidden. Nobody else ever gets one.
func TestSlowHandlersOnSQSKeepWhatWaitsHidden(t *testing.T) {
	t.Parallel()
	q, db := newSQSQueue(t, false, nil), postgres(t)
	var runs atomic.Int64
	r := q.run(db, consumer.Config{Concurrency: 1, Order: consumer.Unordered}, func(_ context.Context, exec execFunc, m *consumer.Message) error {
		runs.Add(1)
		<-time.After(sqsVisibility / 4)
		return effect(exec, m)
	})
	var ms []*brokers.Message
	for i := range 10 {
		ms = append(ms, msg("", fmt.Sprint(i), "", "x"))
	}
	q.publish(ms...)
	eventually(t, "all are taken, the first runs", func() bool { return runs.Load() >= 1 && r.Stats().Received == 10 })
	other := q.source(nil)
	_, err := other.Open(t.Context(), brokers.OpenOptions{Consumer: "another"})
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 2*sqsVisibility)
	defer cancel()
	ds, err := other.Receive(ctx, 10)
	require.ErrorIs(t, err, context.DeadlineExceeded, "%v", ds)
	require.NoError(t, other.Close(t.Context()))
	eventually(t, "all are done", func() bool { return r.Stats().Processed == 10 })
	require.NoError(t, r.stop())
	require.EqualValues(t, 10, runs.Load())
	require.Equal(t, 10, db.query(t, `SELECT count(*) FROM effects`))
	require.Zero(t, q.left())
}

// The visibility cannot be extended: the handler's context ends before anybody else can
// have the message, what it wrote is rolled back, and that is no failed run.
func TestVisibilityThatIsLostEndsTheHandlerOnSQS(t *testing.T) {
	t.Parallel()
	for name, fifo := range map[string]bool{"standard": false, "FIFO": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			q, db := newSQSQueue(t, fifo, nil), postgres(t)
			var cut atomic.Bool
			cut.Store(true)
			q.wire.on = func(op string, _ []byte) error {
				if op == "ChangeMessageVisibilityBatch" && cut.Load() {
					return errors.New("i/o timeout")
				}
				return nil
			}
			var runs atomic.Int64
			causes := make(chan error, 1)
			q.publish(msg("", "1", "k", "x"), msg("", "2", "k", "x"))
			r := q.run(db, consumer.Config{}, func(ctx context.Context, exec execFunc, m *consumer.Message) error {
				if err := effect(exec, m); err != nil || m.ID != "1" || runs.Add(1) > 1 {
					return err
				}
				<-ctx.Done()
				cut.Store(false)
				causes <- context.Cause(ctx)
				return ctx.Err()
			})
			eventually(t, "both are done", func() bool { return r.Stats().Processed == 2 })
			require.NoError(t, r.stop())
			require.ErrorIs(t, <-causes, brokers.ErrOwnershipLost)
			require.EqualValues(t, 2, runs.Load())
			require.Positive(t, r.Stats().Lost)
			require.Zero(t, r.Stats().Failures+r.Stats().Held)
			require.Equal(t, 2, db.query(t, `SELECT count(*) FROM effects`))
			if fifo {
				require.Zero(t, db.query(t, `SELECT count(*) FROM effects a JOIN effects b ON a.id < b.id AND a.seq > b.seq`), "out of order")
			}
			require.Zero(t, q.left())
		})
	}
}

// bbc/sqs-consumer#83, BrighterCommand/Brighter#4040: the work is committed, and the
// handle is no longer the message's. That is neither a failed run nor the end: the next
// delivery is a duplicate, deleted by its own handle (zarusz/SlimMessageBus#473).
func TestHandleThatIsInvalidAfterTheCommitOnSQS(t *testing.T) {
	t.Parallel()
	q, db := newSQSQueue(t, false, nil), postgres(t)
	var once sync.Once
	q.wire.on = func(op string, body []byte) error {
		if op == "DeleteMessageBatch" {
			once.Do(func() { q.steal(body) })
		}
		return nil
	}
	q.publish(msg("", "1", "", "x"))
	r := q.run(db, consumer.Config{}, onlyEffect)
	eventually(t, "processed, and a duplicate", func() bool { s := r.Stats(); return s.Processed == 1 && s.Duplicates == 1 })
	require.NoError(t, r.stop())
	require.Zero(t, r.Stats().Failures+r.Stats().Held)
	require.Equal(t, 1, db.query(t, `SELECT count(*) FROM effects`))
	require.Zero(t, q.left())
}

// steal makes the handle of a delete's first entry an old one: the message is handed out
// anew, to us or to the source, and is visible in the end.
func (q *sqsQueue) steal(body []byte) {
	var in struct {
		Entries []struct{ ReceiptHandle string }
	}
	if err := json.Unmarshal(body, &in); err != nil || len(in.Entries) == 0 {
		q.t.Errorf("no entries in %s: %v", body, err)
		return
	}
	visible := func(handle *string) {
		_, err := q.client.ChangeMessageVisibility(context.Background(), &awssqs.ChangeMessageVisibilityInput{QueueUrl: &q.url, ReceiptHandle: handle, VisibilityTimeout: 0})
		if err != nil {
			q.t.Errorf("make it visible: %v", err)
		}
	}
	visible(&in.Entries[0].ReceiptHandle)
	out, err := q.client.ReceiveMessage(context.Background(), &awssqs.ReceiveMessageInput{QueueUrl: &q.url, WaitTimeSeconds: 1, VisibilityTimeout: 30})
	if err != nil {
		q.t.Errorf("receive: %v", err)
		return
	}
	for _, m := range out.Messages {
		visible(m.ReceiptHandle)
	}
}

// JaidenAshmore/java-dynamic-sqs-listener#369: the head of a group fails more often than
// maxReceiveCount allows receives, and its innocent neighbours go to the dead letters.
// Here runs in place and held messages cost no receive, whoever fails.
func TestFailingHeadOfAGroupSendsNobodyToTheDeadLetters(t *testing.T) {
	t.Parallel()
	q, db := newSQSQueue(t, true, nil), postgres(t)
	dead := q.deadLetters(true, 3)
	var ms []*brokers.Message
	for i := range 10 {
		ms = append(ms, msg("", fmt.Sprint("a", i), "a", "x"))
	}
	q.publish(ms...)
	var runs atomic.Int64
	r := q.run(db, quick(), func(_ context.Context, exec execFunc, m *consumer.Message) error {
		if m.ID == "a0" && runs.Add(1) <= 6 {
			return errors.New("not yet")
		}
		return effect(exec, m)
	})
	eventually(t, "all are done", func() bool { return r.Stats().Processed == 10 })
	require.NoError(t, r.stop())
	require.EqualValues(t, 7, runs.Load())
	require.Zero(t, db.query(t, `SELECT count(*) FROM effects a JOIN effects b ON a.id < b.id AND a.seq > b.seq`), "out of order")
	require.Zero(t, q.left())
	require.Zero(t, dead.left())
}

// awsdocs/amazon-sqs-developer-guide#52, akka/alpakka#257: a message that comes back from
// the dead letters is another one to SQS, and the same one to its consumer.
func TestRedriveOnSQSIsADuplicate(t *testing.T) {
	t.Parallel()
	q, db := newSQSQueue(t, false, nil), postgres(t)
	dead := q.deadLetters(false, 20)
	q.publish(msg("", "1", "k", "x"))
	r := q.run(db, consumer.Config{}, onlyEffect)
	eventually(t, "processed", func() bool { return r.Stats().Processed == 1 })
	dead.publish(msg("", "1", "k", "x"), msg("", "2", "k", "x"))
	_, err := q.client.StartMessageMoveTask(t.Context(), &awssqs.StartMessageMoveTaskInput{
		SourceArn: aws.String(dead.attributes()["QueueArn"]), DestinationArn: aws.String(q.attributes()["QueueArn"])})
	require.NoError(t, err)
	eventually(t, "the one is a duplicate, the other is new", func() bool { s := r.Stats(); return s.Duplicates == 1 && s.Processed == 2 })
	require.NoError(t, r.stop())
	require.Equal(t, 2, db.query(t, `SELECT count(*) FROM effects`))
	require.Zero(t, q.left())
	require.Zero(t, dead.left())
}

// spinnaker/echo#325: raw delivery is switched on or off, and the same event has another
// ID. And what is no envelope at all is kept with its body, and leaves the queue.
func TestEventWithAndWithoutItsEnvelopeHasOneEffectOnSQS(t *testing.T) {
	t.Parallel()
	q, db := newSQSQueue(t, false, nil), postgres(t)
	const body, half = `{"order": 7}`, `{"Type":"Notification","TopicArn":"arn:x","MessageId":"1","Message":`
	wrapped, err := json.Marshal(map[string]any{
		"Type": "Notification", "TopicArn": "arn:aws:sns:x:1:t", "MessageId": "sns-1", "Message": body,
		"MessageAttributes": map[string]any{"message-id": map[string]string{"Type": "String", "Value": "e1"}},
	})
	require.NoError(t, err)
	src := q.source(func(c *sqs.SourceConfig) { c.Envelope = sqs.AutoEnvelope })
	var runs atomic.Int64
	r := db.start(t, src, quick(), func(_ context.Context, exec execFunc, m *consumer.Message) error {
		runs.Add(1)
		if string(m.Payload) != body {
			return consumer.Permanent(fmt.Errorf("another body: %s", m.Payload))
		}
		return effect(exec, m)
	})
	q.send(string(wrapped))
	q.publish(msg("", "e1", "", body))
	eventually(t, "one effect", func() bool { s := r.Stats(); return s.Processed == 1 && s.Duplicates == 1 })
	q.send(half)
	eventually(t, "half an envelope is dead", func() bool { return r.Stats().Dead == 1 })
	require.NoError(t, r.stop())
	require.EqualValues(t, 1, runs.Load())
	require.Equal(t, 1, db.query(t, `SELECT count(*) FROM effects WHERE id = 'e1'`))
	require.Equal(t, 1, db.query(t, `SELECT count(*) FROM held_messages WHERE dead AND reason = '`+inbox.ReasonNoID+`' AND payload = '`+half+`'`))
	require.Zero(t, q.left())
}

// The database is away for longer than messages are hidden: they stay in hand, extended,
// and none is received a second time, which a redrive policy would count.
func TestOutageOnSQSLongerThanTheVisibilityUsesUpNoReceive(t *testing.T) {
	t.Parallel()
	q, db := newSQSQueue(t, true, nil), postgres(t)
	dead := q.deadLetters(true, 1)
	r := q.run(db, quick(), onlyEffect)
	db.cut.next.Store(true)
	var ms []*brokers.Message
	for i := range 30 {
		ms = append(ms, msg("", fmt.Sprintf("%02d", i), fmt.Sprint("k", i%3), "x"))
	}
	q.publish(ms...)
	began := time.Now()
	eventually(t, "probed for two visibilities", func() bool { return time.Since(began) > 2*sqsVisibility && db.cut.calls.Load() >= 3 })
	received := r.Stats().Received
	require.Positive(t, received)
	require.Positive(t, q.wire.counted("ChangeMessageVisibilityBatch"))
	db.cut.down.Store(false)
	eventually(t, "all are done", func() bool { return r.Stats().Processed == 30 })
	require.NoError(t, r.stop())
	require.EqualValues(t, 30, r.Stats().Received, "each was received once")
	require.Zero(t, r.Stats().Failures+r.Stats().Held+r.Stats().Released)
	require.Zero(t, db.query(t, `SELECT count(*) FROM effects a JOIN effects b ON a.key = b.key AND a.id < b.id AND a.seq > b.seq`), "out of order")
	require.Zero(t, q.left())
	require.Zero(t, dead.left())
}
