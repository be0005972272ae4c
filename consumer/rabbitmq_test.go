package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/brokers/rabbitmq"
	"github.com/twiceproof/twiceproof/consumer"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
)

// A consumer on a real RabbitMQ and a real PostgreSQL: what the broker cannot do, the
// held messages do.

// rabbitQueue returns a source and a publisher of a fresh queue, and a way to count
// what is ready in it and in its dead letters.
func rabbitQueue(t *testing.T, change func(*rabbitmq.SourceConfig)) (src brokers.Source, publish func(ms ...*brokers.Message), ready func() (queue, dead int)) {
	url := devtest.RabbitMQURL(t)
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
	db.cut.down.Store(true)
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
