package outbox_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
	"github.com/twiceproof/twiceproof/migrations"
	"github.com/twiceproof/twiceproof/outbox"
)

// box is an outbox of either kind.
type box struct {
	queue   outbox.Queue
	enqueue func(ctx context.Context, fail error, ms ...*brokers.Message) error
	count   func(t *testing.T, q string) int
}

func onBoth(t *testing.T, test func(t *testing.T, b box)) {
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		db, err := sql.Open("sqlite", "file:"+filepath.Join(t.TempDir(), "t.db")+"?_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)&_txlock=immediate")
		require.NoError(t, err)
		db.SetMaxOpenConns(1)
		t.Cleanup(func() { db.Close() })
		_, err = migrations.Up(t.Context(), migrations.SQLDB(db, migrations.SQLite))
		require.NoError(t, err)
		o := outbox.SQLite(db)
		test(t, box{o, enqueuer(o), func(t *testing.T, q string) (n int) {
			require.NoError(t, db.QueryRow(q).Scan(&n))
			return n
		}})
	})
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		pool := devtest.PostgresPool(t, 12)
		_, err := migrations.Up(t.Context(), migrations.Pool(pool))
		require.NoError(t, err)
		o := outbox.Postgres(pool)
		test(t, box{o, enqueuer(o), func(t *testing.T, q string) (n int) {
			require.NoError(t, pool.QueryRow(t.Context(), q).Scan(&n))
			return n
		}})
	})
}

func enqueuer[Tx any](w outbox.Writer[Tx]) func(context.Context, error, ...*brokers.Message) error {
	return func(ctx context.Context, fail error, ms ...*brokers.Message) error {
		return outbox.InTx(ctx, w, func(ctx context.Context, tx Tx) error {
			if err := w.Enqueue(ctx, tx, ms...); err != nil {
				return err
			}
			return fail
		})
	}
}

// sink is a publisher that keeps what it got, in order.
type sink struct {
	mu     sync.Mutex
	got    []*brokers.Message
	answer func(m *brokers.Message) error
}

func (s *sink) publisher() brokers.PublisherFunc {
	return func(_ context.Context, m *brokers.Message) error {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.answer != nil {
			if err := s.answer(m); err != nil {
				return err
			}
		}
		s.got = append(s.got, m.Clone())
		return nil
	}
}

func (s *sink) ids() (ids []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, m := range s.got {
		ids = append(ids, m.ID)
	}
	return ids
}

func start(t *testing.T, q outbox.Queue, pub brokers.Publisher, cfg outbox.RelayConfig) *outbox.Relay {
	r, err := outbox.NewRelay(q, pub, cfg)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	t.Cleanup(func() { cancel(); require.NoError(t, <-done) })
	return r
}

func m(id, key string) *brokers.Message {
	return &brokers.Message{ID: id, Topic: "t", Key: key, Payload: []byte{0, 1, 255}, Headers: brokers.Headers{{Key: "h", Value: []byte{0}}}}
}

func eventually(t *testing.T, ok func() bool) {
	t.Helper()
	require.Eventually(t, ok, 20*time.Second, 5*time.Millisecond)
}

const waiting = `SELECT count(*) FROM outbox_messages`

func TestOnlyCommittedMessagesArePublishedUnchanged(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, b box) {
		rolledBack := errors.New("business rule")
		require.ErrorIs(t, b.enqueue(t.Context(), rolledBack, m("ghost", "")), rolledBack)
		var s sink
		start(t, b.queue, s.publisher(), outbox.RelayConfig{})
		want := m("", "k")
		require.NoError(t, b.enqueue(t.Context(), nil, want))
		require.NotEmpty(t, want.ID, "an id is assigned once, in Enqueue")
		eventually(t, func() bool { return len(s.ids()) == 1 && b.count(t, waiting) == 0 })
		got := s.got[0]
		require.Equal(t, want.ID, got.ID)
		require.Equal(t, want.Payload, got.Payload)
		require.Equal(t, want.Headers, got.Headers)
		require.Error(t, b.enqueue(t.Context(), nil, m("a\x00b", "")))
		require.Error(t, b.enqueue(t.Context(), nil, &brokers.Message{ID: "no topic"}))
	})
}

func TestSeveralRelaysKeepTheOrderOfEachKey(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, b box) {
		var s sink
		for range 4 {
			start(t, b.queue, s.publisher(), outbox.RelayConfig{Batch: 7, Lease: time.Second})
		}
		const n, keys = 400, 20
		for i := range n {
			require.NoError(t, b.enqueue(t.Context(), nil, m(fmt.Sprint(i), fmt.Sprint("k", i%keys))))
		}
		eventually(t, func() bool { return b.count(t, waiting) == 0 })
		last, seen := map[string]int{}, map[string]bool{}
		for _, g := range s.got {
			var i int
			_, err := fmt.Sscan(g.ID, &i)
			require.NoError(t, err)
			if seen[g.ID] {
				continue // a repeat is allowed, its first occurrence counts
			}
			seen[g.ID] = true
			require.GreaterOrEqual(t, i, last[g.Key], "inversion in %s", g.Key)
			last[g.Key] = i
		}
		require.Len(t, seen, n)
	})
}

func TestPoisonIsParkedAndBlocksItsKeyAlone(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, b box) {
		s := sink{answer: func(m *brokers.Message) error {
			if m.ID == "bad" {
				return &brokers.Error{Class: brokers.Permanent, Err: errors.New("too large \x00")}
			}
			return nil
		}}
		require.NoError(t, b.enqueue(t.Context(), nil, m("bad", "k"), m("behind", "k"), m("free", "other"), m("unkeyed", "")))
		r := start(t, b.queue, s.publisher(), outbox.RelayConfig{})
		eventually(t, func() bool { return len(s.ids()) == 2 && r.Stats().Parked == 1 })
		require.ElementsMatch(t, []string{"free", "unkeyed"}, s.ids())
		require.Equal(t, 2, b.count(t, waiting))
		require.Equal(t, 1, b.count(t, `SELECT count(*) FROM outbox_messages WHERE parked AND last_error LIKE '%too large%'`))
	})
}

// A broker that is down for long must not use up attempts.
func TestBrokerOutageParksNothing(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, b box) {
		var down atomic.Bool
		var calls atomic.Int64
		down.Store(true)
		s := sink{answer: func(*brokers.Message) error {
			calls.Add(1)
			if down.Load() {
				return brokers.ErrUnknownOutcome
			}
			return nil
		}}
		require.NoError(t, b.enqueue(t.Context(), nil, m("1", "k"), m("2", "k"), m("3", "")))
		start(t, b.queue, s.publisher(), outbox.RelayConfig{MaxAttempts: 2})
		eventually(t, func() bool { return calls.Load() > 8 })
		require.Equal(t, 3, b.count(t, `SELECT count(*) FROM outbox_messages WHERE attempts = 0 AND NOT parked`))
		down.Store(false)
		eventually(t, func() bool { return b.count(t, waiting) == 0 })
		require.Subset(t, s.ids(), []string{"1", "2", "3"})
	})
}
