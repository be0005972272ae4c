package consumer_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers/memory"
	"github.com/twiceproof/twiceproof/consumer"
)

// A settlement that fails for longer than a moment is tried as long as the message
// is this consumer's. One that is given up would stay in the source's room for
// ever: its message is not delivered again while it is owned, and in the end nothing
// is (a long chaos run stood still like that, with 1,460 messages on the broker).
func TestSettleThatFailsForLongIsNotGivenUp(t *testing.T) {
	t.Parallel()
	db := sqlite(t)
	b := memory.New(memory.Config{})
	b.Topic("t", memory.TopicConfig{Partitions: 1})
	b.Inject(memory.Select{Name: "t", Times: 8}, memory.FailSettle(nil, false))
	cfg := quick()
	cfg.Room = 1
	r := db.start(t, b.Source("t", memory.Group("g")), cfg, func(_ context.Context, exec execFunc, m *consumer.Message) error {
		return effect(exec, m)
	})
	for i := range 3 {
		publish(t, b, msg("t", fmt.Sprint(i), "", "x"))
	}
	eventually(t, "all are settled", func() bool { return b.Committed("t", "g", 0) == 3 })
	require.NoError(t, r.stop())
	require.Empty(t, b.Pending(), "the fault struck")
	require.Equal(t, 3, db.query(t, `SELECT count(*) FROM effects`))
	require.Zero(t, r.Stats().Duplicates)
}
