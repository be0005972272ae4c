package outbox

import (
	"context"
	"database/sql"
	"errors"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
	"github.com/twiceproof/twiceproof/migrations"
)

// onEach runs a test of the queue itself on both dialects.
func onEach(t *testing.T, test func(t *testing.T, q Queue, enqueue func(ids ...string))) {
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		db, err := sql.Open("sqlite", "file:"+filepath.Join(t.TempDir(), "t.db")+"?_txlock=immediate&_pragma=busy_timeout(5000)")
		require.NoError(t, err)
		db.SetMaxOpenConns(1)
		t.Cleanup(func() { require.NoError(t, db.Close()) })
		_, err = migrations.Up(t.Context(), migrations.SQLDB(db, migrations.SQLite))
		require.NoError(t, err)
		o := SQLite(db)
		test(t, o, enqueuer(t, o))
	})
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		pool := devtest.PostgresPool(t, 4)
		_, err := migrations.Up(t.Context(), migrations.Pool(pool))
		require.NoError(t, err)
		o := Postgres(pool)
		test(t, o, enqueuer[pgx.Tx](t, o))
	})
}

func enqueuer[Tx any](t *testing.T, w Writer[Tx]) func(ids ...string) {
	return func(ids ...string) {
		require.NoError(t, InTx(t.Context(), w, func(ctx context.Context, tx Tx) error {
			for _, id := range ids {
				if err := w.Enqueue(ctx, tx, &brokers.Message{ID: id, Topic: "t", Key: "k"}); err != nil {
					return err
				}
			}
			return nil
		}))
	}
}

// failingMarks lets the first marks fail.
type failingMarks struct {
	Queue
	failures atomic.Int64
}

func (f *failingMarks) published(ctx context.Context, relay string, rows []*row) (int, error) {
	if f.failures.Add(-1) >= 0 {
		return 0, errors.New("canceling statement due to statement timeout")
	}
	return f.Queue.published(ctx, relay, rows)
}

// Published, but the mark fails: the relay tries the mark again, not the publish.
// YakShaveFx/outboxkit#41.
func TestMessageIsNotPublishedAgainBecauseItsMarkFailed(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, q Queue, enqueue func(...string)) {
		f := &failingMarks{Queue: q}
		f.failures.Store(5)
		var published []string
		pub := brokers.PublisherFunc(func(_ context.Context, m *brokers.Message) error {
			published = append(published, m.ID)
			return nil
		})
		r, err := NewRelay(f, pub, RelayConfig{Batch: 2, IdlePoll: 20 * time.Millisecond})
		require.NoError(t, err)
		enqueue("1", "2", "3")
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- r.Run(ctx) }()
		require.Eventually(t, func() bool {
			left, err := q.left(t.Context(), "nobody")
			return err == nil && left == nil
		}, 10*time.Second, 5*time.Millisecond)
		cancel()
		require.NoError(t, <-done)
		require.Equal(t, []string{"1", "2", "3"}, published)
		require.LessOrEqual(t, f.failures.Load(), int64(0))
	})
}

// A relay that lost a share and has it again marks nothing that it read before:
// somebody else may have had the row in between.
func TestMarksOfAnEarlierOwnershipHitNothing(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, q Queue, enqueue func(...string)) {
		ctx := t.Context()
		take := func(relay string) []*row {
			shares, short, err := q.lease(ctx, relay, time.Minute)
			require.NoError(t, err)
			require.Len(t, shares, Shares)
			require.False(t, short)
			rows, err := q.fetch(ctx, relay, fetch{most: 10, bytes: 1 << 20})
			require.NoError(t, err)
			for _, r := range rows {
				r.token = shares[r.share]
			}
			return rows
		}
		enqueue("1", "2")
		old := take("a")
		require.Len(t, old, 2)
		require.NoError(t, q.leave(ctx, "a")) // as if its lease had run out
		theirs := take("b")
		n, err := q.failed(ctx, "b", []failure{{row: theirs[0], parked: true, why: "by b"}})
		require.NoError(t, err)
		require.Equal(t, 1, n)
		require.NoError(t, q.leave(ctx, "b"))
		again := take("a")
		require.Empty(t, again, "the key is blocked by what b has parked")

		n, err = q.published(ctx, "a", old)
		require.NoError(t, err)
		require.Zero(t, n)
		n, err = q.failed(ctx, "a", []failure{{row: old[0], why: "late"}})
		require.NoError(t, err)
		require.Zero(t, n)
		require.NoError(t, q.again(ctx, "a", old))
		left, err := q.left(ctx, "a")
		require.NoError(t, err)
		require.Equal(t, 1, left.Parked)
		require.Equal(t, []string{`parked "1" (by b)`}, left.First)

		// Under the token of now it may.
		shares, _, err := q.lease(ctx, "a", time.Minute)
		require.NoError(t, err)
		for _, r := range old {
			r.token = shares[r.share]
		}
		n, err = q.published(ctx, "a", old)
		require.NoError(t, err)
		require.Equal(t, 2, n)
	})
}

// While its lease is over, but nobody has taken its shares, a relay keeps them and
// its marks count.
func TestLeaseThatNobodyTookIsRenewed(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, q Queue, enqueue func(...string)) {
		ctx := t.Context()
		shares, _, err := q.lease(ctx, "a", time.Microsecond)
		require.NoError(t, err)
		enqueue("1")
		rows, err := q.fetch(ctx, "a", fetch{most: 10, bytes: 1 << 20})
		require.NoError(t, err)
		require.Len(t, rows, 1)
		rows[0].token = shares[rows[0].share]
		n, err := q.published(ctx, "a", rows)
		require.NoError(t, err)
		require.Equal(t, 1, n)
		renewed, _, err := q.lease(ctx, "a", time.Minute)
		require.NoError(t, err)
		require.Equal(t, shares, renewed, "with the same tokens")
	})
}

func TestConfigurationMistakesAreNamedAtOnce(t *testing.T) {
	t.Parallel()
	_, err := NewRelay(nil, nil, RelayConfig{})
	require.Error(t, err)
	pub := brokers.PublisherFunc(func(context.Context, *brokers.Message) error { return nil })
	db, err := sql.Open("sqlite", ":memory:")
	require.NoError(t, err)
	db.SetMaxOpenConns(1)
	defer db.Close()
	_, err = NewRelay(SQLite(db), pub, RelayConfig{})
	require.NoError(t, err, "on SQLite one connection is enough")
	_, err = NewRelay(PostgresDB(db), pub, RelayConfig{Batch: -1, BatchBytes: -1, Lease: 1, MaxAttempts: -2, Backoff: 2, MaxBackoff: 1, IdlePoll: -1})
	for _, s := range []string{"Batch ", "BatchBytes", "Lease", "MaxAttempts", "MaxBackoff", "IdlePoll", "one connection"} {
		require.ErrorContains(t, err, s)
	}
}

// A pool of one connection on PostgreSQL: a transaction of the program and the relay
// would wait for each other.
func TestRelayOnAPoolOfOneIsRefused(t *testing.T) {
	t.Parallel()
	pub := brokers.PublisherFunc(func(context.Context, *brokers.Message) error { return nil })
	_, err := NewRelay(Postgres(devtest.PostgresPool(t, 1)), pub, RelayConfig{})
	require.ErrorContains(t, err, "2 or more")
	_, err = NewRelay(Postgres(devtest.PostgresPool(t, 2)), pub, RelayConfig{})
	require.NoError(t, err)
}

// What the documentation says of the defaults: a message that fails while others pass
// is parked after about an hour.
func TestDefaultAttemptsLastAboutAnHour(t *testing.T) {
	t.Parallel()
	var least, most time.Duration
	for n := 1; n < 20; n++ {
		d := min(time.Second<<(n-1), 5*time.Minute)
		least, most = least+d/2, most+d
		for range 100 {
			got := backoff(time.Second, 5*time.Minute, n)
			require.GreaterOrEqual(t, got, d/2)
			require.LessOrEqual(t, got, d)
		}
	}
	require.Greater(t, least, 25*time.Minute)
	require.Less(t, most, 75*time.Minute)
	require.LessOrEqual(t, backoff(time.Second, 5*time.Minute, 1_000_000), 5*time.Minute)
}

func TestOperatorRetriesAndDiscardsWhatIsParked(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, q Queue, enqueue func(ids ...string)) {
		op := q.(interface{ Operator() *Operator }).Operator()
		enqueue("1", "2", "3")
		shares, _, err := q.lease(t.Context(), "a", time.Minute)
		require.NoError(t, err)
		require.NotEmpty(t, shares)
		fetched := func() []*row {
			rows, err := q.fetch(t.Context(), "a", fetch{most: 10, bytes: 1 << 20})
			require.NoError(t, err)
			require.NotEmpty(t, rows)
			for _, r := range rows {
				r.token = shares[r.share]
			}
			return rows
		}
		rows := fetched()
		_, err = q.failed(t.Context(), "a", []failure{{row: rows[0], parked: true, why: "too large"}})
		require.NoError(t, err)

		ps, err := op.List(t.Context(), ParkedFilter{Topic: "t", ID: "1", Max: 5})
		require.NoError(t, err)
		require.Len(t, ps, 1)
		require.Equal(t, "too large", ps[0].Error)
		require.Equal(t, 2, ps[0].Behind)
		require.Equal(t, "k", ps[0].Message.Key)
		for _, f := range []ParkedFilter{{Topic: "other"}, {ID: "2"}, {OlderThan: time.Hour}, {Seqs: []int64{}}, {After: ps[0].Seq}} {
			none, err := op.List(t.Context(), f)
			require.NoError(t, err)
			require.Empty(t, none, "%+v", f)
		}
		seq := ps[0].Seq
		_, err = op.Get(t.Context(), seq+1)
		require.ErrorIs(t, err, ErrNotParked)
		require.ErrorIs(t, op.Retry(t.Context(), seq+1, "me", ""), ErrNotParked)
		require.ErrorContains(t, op.Retry(t.Context(), seq, "", ""), "actor is empty")
		require.ErrorContains(t, op.Discard(t.Context(), seq, "me", ""), "reason is empty")

		require.NoError(t, op.Retry(t.Context(), seq, "me", "the limit is raised"))
		require.ErrorIs(t, op.Retry(t.Context(), seq, "me", "again"), ErrNotParked)
		rows = fetched()
		require.Equal(t, "1", rows[0].m.ID, "it goes first again")
		require.Zero(t, rows[0].attempts)

		_, err = q.failed(t.Context(), "a", []failure{{row: rows[0], parked: true, why: "too large"}})
		require.NoError(t, err)
		require.NoError(t, op.Discard(t.Context(), seq, "me", "not needed"))
		rows = fetched()
		require.Equal(t, "2", rows[0].m.ID, "its key goes on")
	})
}
