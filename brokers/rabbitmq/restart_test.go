package rabbitmq

import (
	"context"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/internal/devenv"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
)

// Messages are persistent unless asked otherwise, and survive a crash of the
// broker: knative-extensions/eventing-rabbitmq#546, influxdata/telegraf#3526,
// symfony/symfony#34685. The Source comes back by itself, once.
func TestBrokerCrashLosesNothingAndTheSourceComesBack(t *testing.T) {
	t.Parallel()
	node := devtest.OwnRabbitMQ(t)
	r := newRigOn(t, node.URL())
	r.declare(amqp.Table{"x-queue-type": "classic"})
	pub, _ := r.publisher()
	assert.Equal(t, map[brokers.Outcome]int{brokers.Accepted: 100}, outcomes(pub.Publish(t.Context(), r.messages(100, "")...)))
	s, _, ev := r.source(200)
	before := receive(t, s, 100)
	settle(t, s, brokers.Done, before[:10]...)

	// The queue's declaration is answered before Mnesia has written it.
	_, err := node.Ctl(t.Context(), "eval", "mnesia:sync_log().")
	require.NoError(t, err)
	require.NoError(t, node.Kill())
	<-before[50].Context.Done()
	require.NoError(t, node.Start(t.Context()))
	up := time.Now()
	ev.wait(t, brokers.EventConnected, 2)
	assert.Less(t, time.Since(up), maxBackoff+5*time.Second)

	seen := map[string]bool{}
	for _, d := range before[:10] {
		seen[d.ID] = true // their acknowledgements may be lost: they may come again
	}
	for len(seen) < 100 {
		d := receive(t, s, 1)[0]
		seen[d.ID] = true
		settle(t, s, brokers.Done, d)
	}
	r.reconnect()
	_, consumers := r.count(r.queue)
	assert.Equal(t, 1, consumers, "an old consumer is left, or two are there")
	require.Eventually(t, func() bool { return pub.Publish(t.Context(), r.message(0, ""))[0].Outcome == brokers.Accepted }, patience, 50*time.Millisecond)
}

// Under an alarm the broker stops reading from publishing connections: what
// consumes must go on, so that queues can shrink: streadway/amqp#270,
// rabbitmq/rabbitmq-website#1556, cloudamqp/amqp-client.rb#102.
func TestMemoryAlarmStopsPublishingButNotAcknowledging(t *testing.T) {
	t.Parallel()
	node := devtest.OwnRabbitMQ(t)
	r := newRigOn(t, node.URL())
	r.declare(nil)
	pub, ev := r.publisher()
	require.Equal(t, map[brokers.Outcome]int{brokers.Accepted: 60}, outcomes(pub.Publish(t.Context(), r.messages(60, "")...)))
	s, _, sourceEvents := r.source(50)
	ds := receive(t, s, 50)

	ctl := func(args ...string) {
		_, err := node.Ctl(t.Context(), args...)
		require.NoError(t, err)
	}
	ctl("set_vm_memory_high_watermark", "absolute", "1MB")
	// The first message tells the broker that this connection publishes.
	stored := map[string]bool{}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	rs := pub.Publish(ctx, r.message(60, ""), r.message(61, ""))
	for _, res := range rs {
		assert.Contains(t, []brokers.Outcome{brokers.Unknown, brokers.NotSent}, res.Outcome, res.Err)
	}
	ev.wait(t, brokers.EventThrottled, 1)
	began := time.Now()
	rs = pub.Publish(t.Context(), r.messages(100, "")...)
	assert.Less(t, time.Since(began), time.Second)
	assert.Equal(t, map[brokers.Outcome]int{brokers.NotSent: 100}, outcomes(rs))
	assert.Equal(t, brokers.Throttled, brokers.ClassOf(rs[0].Err))
	assert.Positive(t, brokers.RetryAfterOf(rs[0].Err))

	settle(t, s, brokers.Done, ds...) // acknowledgements flow
	more := receive(t, s, 10)         // and make room for what waits
	settle(t, s, brokers.Done, more...)
	assert.Empty(t, sourceEvents.of(brokers.EventDisconnected))

	// Close is bounded on both sides.
	blocked, _ := r.publisher()
	ctx, cancel = context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	blocked.Publish(ctx, r.message(62, ""))
	began = time.Now()
	ctx, cancel = context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	require.NoError(t, blocked.Close(ctx))
	assert.Less(t, time.Since(began), 3*time.Second)

	ctl("set_vm_memory_high_watermark", "absolute", "1GB")
	for i := 60; i < 63; i++ { // as the relay does with what was not accepted
		require.Eventually(t, func() bool { return pub.Publish(t.Context(), r.message(i, ""))[0].Outcome == brokers.Accepted }, patience, 50*time.Millisecond)
	}
	for len(stored) < 3 {
		d := receive(t, s, 1)[0]
		stored[d.ID] = true
		settle(t, s, brokers.Done, d)
	}
	assert.Contains(t, stored, id(60))
}

// consumer_timeout closes the channel and takes back everything on it:
// zulip/zulip#39661, facile-it/rabbitmq-consumer#6, celery/celery#6760,
// runabol/tork#209, amqp-rs/lapin#357, Bogdanp/dramatiq#827. If it happens all the
// same, the Source says why and subscribes again.
func TestConsumerTimeoutIsSaidAndHealed(t *testing.T) {
	t.Parallel()
	node := devtest.OwnRabbitMQ(t, devenv.RabbitMQConfig{
		Conf: "consumer_timeout = 3000", Advanced: "[{rabbit,[{channel_tick_interval,500}]}].",
	})
	r := newRigOn(t, node.URL())
	r.declare(nil)
	r.put(0, 10)
	s, _, ev := r.source(10)
	ds := receive(t, s, 10)
	settle(t, s, brokers.Done, ds[1:5]...)
	<-ds[0].Context.Done() // nobody answers it
	require.ErrorIs(t, context.Cause(ds[0].Context), brokers.ErrOwnershipLost)
	gone := ev.wait(t, brokers.EventDisconnected, 1)
	require.ErrorContains(t, gone[0].Err, "consumer_timeout")
	require.ErrorContains(t, gone[0].Err, "MaxHold")
	require.ErrorIs(t, s.Settle(t.Context(), settlements(brokers.Done, ds[0])...)[0], brokers.ErrOwnershipLost)
	again := receive(t, s, 6)
	assert.Greater(t, again[0].Lane.Epoch, ds[0].Lane.Epoch)
	settle(t, s, brokers.Done, again...)
	r.ready(r.queue, 0)

	// With MaxHold below it nothing of the kind happens.
	r.put(10, 11)
	careful, _, ev2 := r.source(10, func(c *SourceConfig) { c.MaxHold = time.Second })
	closeWithin(t, s.Close)
	for range 3 {
		d := receive(t, careful, 1)[0]
		<-d.Context.Done()
	}
	settle(t, careful, brokers.Done, receive(t, careful, 1)...)
	assert.Empty(t, ev2.of(brokers.EventDisconnected))
}

// An operator closes the connections: 320 CONNECTION_FORCED.
func TestConnectionsClosedByAnOperatorAreHealed(t *testing.T) {
	t.Parallel()
	node := devtest.OwnRabbitMQ(t)
	r := newRigOn(t, node.URL())
	r.declare(nil)
	r.put(0, 5)
	s, _, ev := r.source(10)
	ds := receive(t, s, 5)
	_, err := node.Ctl(t.Context(), "close_all_connections", "maintenance")
	require.NoError(t, err)
	gone := ev.wait(t, brokers.EventDisconnected, 1)
	require.ErrorContains(t, gone[0].Err, "320")
	assert.Equal(t, brokers.Retryable, brokers.ClassOf(gone[0].Err))
	again := receive(t, s, 5)
	assert.Greater(t, again[0].Lane.Epoch, ds[0].Lane.Epoch)
	settle(t, s, brokers.Done, again...)
	r.reconnect()
}
