package chaos

import (
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
)

// crashQueue is an ordered queue on a real broker, as the parent of the processes that
// die sees it. A further broker is one more implementation.
type crashQueue interface {
	endpoint() endpoint
	// awaitReturn waits until the broker delivers again what a dead consumer had in hand,
	// and returns how many messages it will deliver then.
	awaitReturn(t *testing.T) int
	// left counts the messages that are still there, dead letters too.
	left(t *testing.T) int
}

func newCrashQueue(t *testing.T, kind string) crashQueue {
	if kind == "sqs" {
		return newCrashSQS(t)
	}
	return newCrashRabbit(t)
}

func publishCrash(t *testing.T, e endpoint, ms []*brokers.Message) {
	t.Helper()
	pub, err := e.publisher()
	require.NoError(t, err)
	for _, r := range pub.Publish(t.Context(), ms...) {
		require.NoError(t, r.Err)
	}
	require.NoError(t, pub.Close(t.Context()))
}

// crashRabbit is a quorum queue with a single active consumer.
type crashRabbit struct{ url, name string }

func newCrashRabbit(t *testing.T) crashRabbit {
	t.Helper()
	q := crashRabbit{devtest.RabbitMQURL(t), devtest.Name("crash")}
	src, err := q.endpoint().source() // declares the queue
	require.NoError(t, err)
	_, err = src.Open(t.Context(), brokers.OpenOptions{Consumer: "crash", Room: 1})
	require.NoError(t, err)
	require.NoError(t, src.Close(t.Context()))
	t.Cleanup(func() {
		q.onChannel(t, func(ch *amqp.Channel) {
			for _, name := range []string{q.name, q.name + ".dead"} {
				_, err := ch.QueueDelete(name, false, false, false)
				assert.NoError(t, err)
			}
		})
	})
	return q
}

func (q crashRabbit) endpoint() endpoint { return endpoint{"rabbitmq", q.url, q.name, true} }

func (q crashRabbit) onChannel(t *testing.T, fn func(ch *amqp.Channel)) {
	t.Helper()
	c, err := amqp.Dial(q.url)
	require.NoError(t, err)
	defer c.Close() //nolint:errcheck // nothing is in flight
	ch, err := c.Channel()
	require.NoError(t, err)
	fn(ch)
}

// inspect asks for a queue's messages that nobody has in hand, and its consumers.
func (q crashRabbit) inspect(t *testing.T, name string) (found amqp.Queue) {
	t.Helper()
	q.onChannel(t, func(ch *amqp.Channel) {
		var err error
		found, err = ch.QueueDeclarePassive(name, true, false, false, false, nil)
		require.NoError(t, err)
	})
	return found
}

func (q crashRabbit) awaitReturn(t *testing.T) int {
	t.Helper()
	require.Eventually(t, func() bool { return q.inspect(t, q.name).Consumers == 0 }, 20*time.Second, 20*time.Millisecond)
	return q.inspect(t, q.name).Messages
}

func (q crashRabbit) left(t *testing.T) int {
	t.Helper()
	return q.inspect(t, q.name).Messages + q.inspect(t, q.name+".dead").Messages
}

// crashSQS is a FIFO queue.
type crashSQS struct{ *sqsQueue }

func newCrashSQS(t *testing.T) crashSQS {
	t.Helper()
	q := crashSQS{&sqsQueue{fifo: true, at: devtest.SQSEndpoint(t)}}
	q.create(t)
	return q
}

// awaitReturn waits until the visibility of what the dead one had in hand has ended.
func (q crashSQS) awaitReturn(t *testing.T) int {
	t.Helper()
	visible := 0
	require.Eventually(t, func() bool {
		n, hidden, err := q.counts(t.Context())
		visible = n
		return err == nil && hidden == 0
	}, 20*time.Second, 50*time.Millisecond)
	return visible
}

func (q crashSQS) left(t *testing.T) int {
	t.Helper()
	visible, hidden, err := q.counts(t.Context())
	require.NoError(t, err)
	return visible + hidden
}
