package consumer_test

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers/memory"
	"github.com/twiceproof/twiceproof/consumer"
	"github.com/twiceproof/twiceproof/inbox"
)

// A held message that is taken counts as begun. Where the runner does not hear of it, or
// ends before it runs, that must count for nothing: else it waits for the end of its
// lease, and after a few such stops it passes for one whose runs die.

// heldOnce runs a message that fails the first time, and is held then.
func heldOnce(_ context.Context, exec execFunc, m *consumer.Message) error {
	if m.Attempt == 1 {
		return errors.New("not yet")
	}
	return effect(exec, m)
}

func TestStopWhileAHeldMessageIsTakenTakesItsStartBack(t *testing.T) {
	t.Parallel()
	onAll(t, func(t *testing.T, db database) {
		b := memory.New(memory.Config{})
		taken, stopped := make(chan struct{}), make(chan struct{})
		var once sync.Once
		db.cut.take = func(ctx context.Context, take func(context.Context) ([]*inbox.Head, error)) ([]*inbox.Head, error) {
			hs, err := take(context.WithoutCancel(ctx))
			if len(hs) == 0 {
				return hs, err
			}
			once.Do(func() { close(taken); <-stopped })
			if ctx.Err() != nil { // as a driver does whose context ends during the COMMIT
				return nil, ctx.Err()
			}
			return hs, err
		}
		cfg := quick()
		cfg.Tries, cfg.Name = 1, t.Name()
		r := db.start(t, b.Source("q"), cfg, heldOnce)
		publish(t, b, msg("q", "1", "k", "x"))
		<-taken
		ended := make(chan error, 1)
		go func() { ended <- r.stop() }()
		eventually(t, "it stops", func() bool { return r.Ready() != nil })
		close(stopped)
		require.NoError(t, <-ended)
		require.Equal(t, 1, db.query(t, `SELECT count(*) FROM held_messages WHERE starts = attempts AND due_at IS NOT NULL`))
		r = db.start(t, b.Source("q"), cfg, heldOnce)
		eventually(t, "it runs long before the lease would end", func() bool { return r.Stats().Processed == 1 })
		require.NoError(t, r.stop())
	})
}

func TestHeldMessagesWhoseTakingIsUnknownAreGivenBack(t *testing.T) {
	t.Parallel()
	for name, committed := range map[string]bool{"committed": true, "not committed": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			onAll(t, func(t *testing.T, db database) {
				b := memory.New(memory.Config{})
				var once sync.Once
				lost := errors.New("connection reset")
				db.cut.take = func(ctx context.Context, take func(context.Context) ([]*inbox.Head, error)) (hs []*inbox.Head, err error) {
					if hs, err = take(ctx); len(hs) == 0 {
						return hs, err
					}
					once.Do(func() {
						err = lost
						if !committed {
							db.do(t, `UPDATE held_messages SET starts = starts - 1, due_at = held_at`)
						}
					})
					return hs, err
				}
				cfg := quick()
				cfg.Tries = 1
				r := db.start(t, b.Source("q"), cfg, heldOnce)
				publish(t, b, msg("q", "1", "k", "x"))
				eventually(t, "it runs", func() bool { return r.Stats().Processed == 1 })
				require.NoError(t, r.stop())
				require.EqualValues(t, 1, r.Stats().Failures)
				require.Zero(t, db.query(t, `SELECT count(*) FROM held_messages`))
			})
		})
	}
}
