package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/brokers/rabbitmq"
	"github.com/twiceproof/twiceproof/consumer"
	"github.com/twiceproof/twiceproof/internal/devenv"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
)

// A consumer on a real RabbitMQ and a real PostgreSQL: what the broker cannot do, the
// held messages do.

// rabbitQueue returns a source and a publisher of a fresh queue, and a way to count
// what is ready in it and in its dead letters.
func rabbitQueue(t *testing.T, change func(*rabbitmq.SourceConfig)) (src brokers.Source, publish func(ms ...*brokers.Message), ready func() (queue, dead int)) {
	return rabbitQueueAt(t, devtest.RabbitMQURL(t), change)
}

func rabbitQueueAt(t *testing.T, url string, change func(*rabbitmq.SourceConfig)) (src brokers.Source, publish func(ms ...*brokers.Message), ready func() (queue, dead int)) {
	name := devtest.Name("runner")
	cfg := rabbitmq.SourceConfig{URL: url, Queue: name, Topology: rabbitmq.Declare}
	if change != nil {
		change(&cfg)
	}
	src, err := rabbitmq.NewSource(cfg)
	require.NoError(t, err)
	pub, err := rabbitmq.NewPublisher(rabbitmq.PublisherConfig{URL: url})
	require.NoError(t, err)
	conn, err := amqp.Dial(url)
	require.NoError(t, err)
	ch, err := conn.Channel()
	require.NoError(t, err)
	t.Cleanup(func() {
		_ = pub.Close(context.Background())
		_, _ = ch.QueueDelete(name, false, false, false)
		_, _ = ch.QueueDelete(name+".dead", false, false, false)
		conn.Close()
	})
	publish = func(ms ...*brokers.Message) {
		t.Helper()
		for _, m := range ms {
			m.Topic = name
		}
		for _, r := range pub.Publish(t.Context(), ms...) {
			require.NoError(t, r.Err)
		}
	}
	ready = func() (int, int) {
		q, err := ch.QueueDeclarePassive(name, true, false, false, false, nil)
		require.NoError(t, err)
		d, err := ch.QueueDeclarePassive(name+".dead", true, false, false, false, nil)
		require.NoError(t, err)
		return q.Messages, d.Messages
	}
	return src, publish, ready
}

func rabbitRunner(t *testing.T, src brokers.Source, cfg consumer.Config, h handlerFunc) (*running, database) {
	db := postgres(t)
	r := db.start(t, src, cfg, h)
	eventually(t, "ready", func() bool { return r.Ready() == nil })
	return r, db
}

// A message comes back after its delay, and a long delay holds up no short one
// (rabbitmq/rabbitmq-server#2007: in a queue with a TTL only the head expires).
func TestDelayedRetriesOnRabbitMQ(t *testing.T) {
	t.Parallel()
	src, publish, ready := rabbitQueue(t, nil)
	var mu sync.Mutex
	runs := map[string][]time.Time{}
	r, db := rabbitRunner(t, src, consumer.Config{}, func(_ context.Context, exec execFunc, m *consumer.Message) error {
		mu.Lock()
		runs[m.ID] = append(runs[m.ID], time.Now())
		first := len(runs[m.ID]) == 1
		mu.Unlock()
		switch {
		case m.ID == "hour" && first:
			return consumer.RetryAfter(time.Hour, errors.New("much later"))
		case m.ID == "second" && first:
			return consumer.RetryAfter(time.Second, errors.New("later"))
		}
		return effect(exec, m)
	})
	publish(msg("", "hour", "a", "x"), msg("", "second", "b", "x"))
	eventually(t, "the short delay is over", func() bool { return r.Stats().Processed == 1 })
	require.NoError(t, r.stop())
	gap := runs["second"][1].Sub(runs["second"][0])
	require.GreaterOrEqual(t, gap, time.Second)
	require.Equal(t, 1, db.query(t, `SELECT count(*) FROM effects WHERE id = 'second' AND n = 2`))
	require.Equal(t, 1, db.query(t, `SELECT count(*) FROM held_messages WHERE message_id = 'hour' AND attempts = 1`))
	q, dead := ready()
	require.Zero(t, q+dead)
}

// gothunder/thunder#126, rabbitmq/rabbitmq-server#1020: a poison message that is
// requeued comes back thousands of times a second and stops the good ones behind it.
func TestPoisonOnRabbitMQIsHeldAndHoldsUpNobody(t *testing.T) {
	t.Parallel()
	for name, kind := range map[string]rabbitmq.QueueType{"quorum": rabbitmq.Quorum, "classic": rabbitmq.Classic} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			src, publish, ready := rabbitQueue(t, func(c *rabbitmq.SourceConfig) {
				c.QueueType = kind
				if kind == rabbitmq.Quorum {
					c.DeliveryLimit = 5
				}
			})
			cfg := quick()
			cfg.MaxAttempts = 3
			var runs atomic.Int64
			r, db := rabbitRunner(t, src, cfg, func(_ context.Context, exec execFunc, m *consumer.Message) error {
				if m.ID == "poison" {
					runs.Add(1)
					return errors.New("never")
				}
				return effect(exec, m)
			})
			ms := []*brokers.Message{msg("", "poison", "", "x")}
			for i := range 500 {
				ms = append(ms, msg("", fmt.Sprint(i), "", "x"))
			}
			publish(ms...)
			eventually(t, "the good ones, and the poison is dead", func() bool { s := r.Stats(); return s.Processed == 500 && s.Dead == 1 })
			require.NoError(t, r.stop())
			require.EqualValues(t, 3, runs.Load())
			require.Equal(t, 500, db.query(t, `SELECT count(DISTINCT id) FROM effects`))
			require.Equal(t, 1, db.query(t, `SELECT count(*) FROM held_messages WHERE message_id = 'poison' AND dead AND attempts = 3`))
			q, dead := ready()
			require.Zero(t, q)
			require.Zero(t, dead, "the broker's own dead letters are for what we could not take")
		})
	}
}

// While a database is away nothing is given back to a broker that lets it be held,
// and the delivery limit of a quorum queue is not used up.
func TestOutageOnRabbitMQUsesUpNoDeliveryLimit(t *testing.T) {
	t.Parallel()
	src, publish, ready := rabbitQueue(t, func(c *rabbitmq.SourceConfig) { c.DeliveryLimit = 2 })
	cfg := quick()
	cfg.MaxAttempts = 1
	r, db := rabbitRunner(t, src, cfg, func(_ context.Context, exec execFunc, m *consumer.Message) error { return effect(exec, m) })
	db.cut.next.Store(true)
	var ms []*brokers.Message
	for i := range 50 {
		ms = append(ms, msg("", fmt.Sprint(i), fmt.Sprint("k", i%5), "x"))
	}
	publish(ms...)
	eventually(t, "probed again and again", func() bool { return db.cut.calls.Load() >= 5 })
	db.cut.down.Store(false)
	eventually(t, "all", func() bool { return r.Stats().Processed == 50 })
	require.NoError(t, r.stop())
	require.Zero(t, r.Stats().Dead+r.Stats().Failures+r.Stats().Released)
	q, dead := ready()
	require.Zero(t, q+dead)
}

// The database is away for longer than the broker lets a delivery be held: everything
// goes back before that, once, and comes again when it can be processed. The broker
// never closes the channel (zulip/zulip#39661, celery/celery#6760), and no limit is used up.
// Short: 15 s against a consumer_timeout of 6 s; with TWICEPROOF_CHAOS=long 5 minutes
// against 2.
func TestOutageOnRabbitMQLongerThanTheConsumerTimeout(t *testing.T) {
	t.Parallel()
	timeout, hold, outage := 6*time.Second, 2*time.Second, 15*time.Second
	if os.Getenv("TWICEPROOF_CHAOS") == "long" {
		timeout, hold, outage = 2*time.Minute, 90*time.Second, 5*time.Minute
	}
	node := devtest.OwnRabbitMQ(t, devenv.RabbitMQConfig{
		Conf: fmt.Sprintf("consumer_timeout = %d", timeout.Milliseconds()), Advanced: "[{rabbit,[{channel_tick_interval,500}]}].",
	})
	src, publish, ready := rabbitQueueAt(t, node.URL(), func(c *rabbitmq.SourceConfig) { c.DeliveryLimit, c.MaxHold = 2, hold })
	var log syncBuffer
	cfg := quick()
	cfg.MaxAttempts, cfg.Logger = 1, slog.New(slog.NewTextHandler(&log, nil))
	r, db := rabbitRunner(t, src, cfg, onlyEffect)
	db.cut.next.Store(true)
	var ms []*brokers.Message
	for i := range 50 {
		ms = append(ms, msg("", fmt.Sprint(i), fmt.Sprint("k", i%5), "x"))
	}
	began := time.Now()
	publish(ms...)
	require.Eventually(t, func() bool { return r.Stats().Released > 0 }, outage, 50*time.Millisecond, "given back within the hold")
	require.Less(t, time.Since(began), timeout)
	<-time.After(time.Until(began.Add(outage)))
	require.ErrorIs(t, r.Healthy(), errCut)
	db.cut.down.Store(false)
	t.Cleanup(func() {
		if t.Failed() {
			q, dead := ready()
			t.Logf("%+v, %d in the queue, %d dead there\n%s", r.Stats(), q, dead, log.String())
		}
	})
	eventually(t, "all", func() bool { return r.Stats().Processed == 50 })
	require.NoError(t, r.stop())
	s := r.Stats()
	require.Zero(t, s.Dead+s.Failures+s.Held+s.Lost)
	require.LessOrEqual(t, s.Received, int64(100), "each at most once more")
	require.NotContains(t, log.String(), "disconnected")
	require.Equal(t, 50, db.query(t, `SELECT count(*) FROM effects`))
	require.Equal(t, 50, db.query(t, `SELECT count(DISTINCT id) FROM effects`))
	q, dead := ready()
	require.Zero(t, q+dead)
}

// syncBuffer is a log that a test reads while it is written.
type syncBuffer struct {
	mu sync.Mutex
	b  strings.Builder
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}
