package consumer_test

import (
	"context"
	"database/sql"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/brokers/memory"
	"github.com/twiceproof/twiceproof/consumer"
	"github.com/twiceproof/twiceproof/inbox"
)

// An inbox that forgets before the broker does is refused before anything is consumed.
func TestWindowShorterThanTheBrokersIsRefused(t *testing.T) {
	t.Parallel()
	b := memory.New(memory.Config{})
	b.Topic("t", memory.TopicConfig{Retention: 30 * 24 * time.Hour})
	publish(t, b, msg("t", "1", "k", "x"))
	h := sqliteHandle(t)
	r, err := consumer.New(inbox.SQLite(h), b.Source("t", memory.Group("g")), func(context.Context, *sql.Tx, *consumer.Message) error { return nil }, consumer.Config{Name: t.Name()})
	require.NoError(t, err)
	err = r.Run(t.Context())
	require.ErrorIs(t, err, inbox.ErrWindow)
	require.ErrorContains(t, err, "raise Window to at least 720h")
	require.Zero(t, r.Stats().Received)
}

// forgetful does not say for how long it keeps messages.
type forgetful struct{ brokers.Source }

func (f forgetful) Open(ctx context.Context, o brokers.OpenOptions) (brokers.Capabilities, error) {
	c, err := f.Source.Open(ctx, o)
	c.RedeliveryHorizon = 0
	return c, err
}

// The runner cleans up by itself, once it has caught up, and what comes again after that
// is not taken for new.
func TestOldClaimsAreForgottenAndOldMessagesAreNotTakenForNew(t *testing.T) {
	t.Parallel()
	for policy, want := range map[consumer.TooOld]string{
		consumer.HoldTooOld:    `SELECT count(*) FROM held_messages WHERE message_id = 'late' AND dead AND reason = 'too-old'`,
		consumer.RunTooOld:     `SELECT count(*) FROM effects WHERE id = 'late'`,
		consumer.DiscardTooOld: `SELECT count(*) FROM processed_messages WHERE message_id = 'late' AND state = 2`,
	} {
		t.Run(map[consumer.TooOld]string{consumer.HoldTooOld: "hold", consumer.RunTooOld: "run", consumer.DiscardTooOld: "discard"}[policy], func(t *testing.T) {
			t.Parallel()
			onAll(t, func(t *testing.T, db database) {
				b := memory.New(memory.Config{})
				cfg := quick()
				cfg.Window, cfg.TooOld = time.Second, policy
				r := db.start(t, forgetful{b.Source("q")}, cfg, func(_ context.Context, exec execFunc, m *consumer.Message) error { return effect(exec, m) })
				publish(t, b, msg("q", "1", "k", "x"))
				eventually(t, "processed", func() bool { return r.Stats().Processed == 1 })
				eventually(t, "forgotten", func() bool { return db.query(t, `SELECT count(*) FROM processed_messages`) == 0 })
				late, fresh := msg("q", "late", "k", "x"), msg("q", "fresh", "k", "x")
				late.Time, fresh.Time = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
				eventually(t, "it is known what may be forgotten", func() bool {
					return db.query(t, `SELECT count(*) FROM inbox_retention WHERE deleted > 0 AND cleaned_at IS NOT NULL`) == 1
				})
				// What forgets the next one comes after the runner has heard of the first.
				publish(t, b, msg("q", "2", "k", "x"))
				eventually(t, "the next is processed", func() bool { return r.Stats().Processed == 2 })
				eventually(t, "the next is forgotten", func() bool { return db.query(t, `SELECT count(*) FROM processed_messages`) == 0 })
				publish(t, b, late, fresh)
				eventually(t, "fresh", func() bool {
					return db.query(t, `SELECT count(*) FROM effects WHERE id = 'fresh'`) == 1 || policy == consumer.HoldTooOld
				})
				eventually(t, want, func() bool { return db.query(t, want) == 1 })
				require.NoError(t, r.stop())
			})
		})
	}
}
