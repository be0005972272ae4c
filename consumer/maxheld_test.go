package consumer_test

import (
	"context"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers/memory"
	"github.com/twiceproof/twiceproof/consumer"
	"github.com/twiceproof/twiceproof/inbox"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
)

// toldFull says how many messages are held, and changes its mind between a claim and its
// answer.
type toldFull struct {
	inbox.Store[pgx.Tx]
	total atomic.Int64
	asked chan struct{}
}

func (s *toldFull) Held(ctx context.Context, consumer string) (inbox.HeldStats, error) {
	select {
	case s.asked <- struct{}{}:
	default:
	}
	return inbox.HeldStats{Total: int(s.total.Load())}, nil
}

// heard returns when the runner has heard of it: it asks again after it has the answer.
func (s *toldFull) heard() {
	<-s.asked
	<-s.asked
}

func (s *toldFull) Begin(ctx context.Context, u inbox.Unit) (inbox.Attempt[pgx.Tx], []inbox.Verdict, error) {
	a, vs, err := s.Store.Begin(ctx, u)
	if err == nil && vs[0] == inbox.Behind && !u.HoldBehind {
		s.total.Store(0)
		s.heard()
	}
	return a, vs, err
}

// A message behind a held one that could not be held, because MaxHeld was reached, is
// not settled as if it were, whatever MaxHeld says a moment later.
func TestMessageThatWasNotHeldAtMaxHeldIsNotSettled(t *testing.T) {
	t.Parallel()
	pool := devtest.PostgresPool(t, 8)
	db := onPool(t, pool, pool)
	s := &toldFull{Store: inbox.Postgres(pool), asked: make(chan struct{})}
	b := memory.New(memory.Config{})
	b.Topic("t", memory.TopicConfig{Partitions: 1})
	running, release := make(chan struct{}), make(chan struct{})
	r, err := consumer.New[pgx.Tx](s, b.Source("t", memory.Group("g")), func(_ context.Context, _ pgx.Tx, m *consumer.Message) error {
		if m.ID == "1" {
			close(running)
			<-release
		}
		return nil
	}, consumer.Config{Name: t.Name(), MaxHeld: 1})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	publish(t, b, msg("t", "1", "k", "x"), msg("t", "2", "k", "x"))
	<-running
	eventually(t, "both in hand", func() bool { return r.Stats().Received == 2 })
	dead, err := inbox.NewItem(msg("t", "dead", "k", "x"), "t/0@99", inbox.OrderKey("k"))
	require.NoError(t, err)
	_, err = s.Record(t.Context(), inbox.Unit{Consumer: t.Name()}, inbox.Outcome[pgx.Tx]{Item: dead, Reason: inbox.ReasonDead, Dead: true})
	require.NoError(t, err)
	s.total.Store(1)
	s.heard()
	close(release)
	eventually(t, "held", func() bool {
		return db.query(t, `SELECT count(*) FROM held_messages WHERE message_id = '2' AND reason = 'behind'`) == 1
	})
	cancel()
	require.NoError(t, <-done)
	require.EqualValues(t, 1, r.Stats().Held)
}
