package outbox_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/inbox"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
	"github.com/twiceproof/twiceproof/migrations"
	"github.com/twiceproof/twiceproof/outbox"
)

// recorder is a broker that accepts what ok lets pass, and keeps the IDs.
type recorder struct {
	ok  func(m *brokers.Message) error
	mu  sync.Mutex
	ids []string
}

func (r *recorder) publisher() brokers.Publisher {
	return brokers.PublisherFunc(func(_ context.Context, m *brokers.Message) error {
		if r.ok != nil {
			if err := r.ok(m); err != nil {
				return err
			}
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		r.ids = append(r.ids, m.ID)
		return nil
	})
}

func (r *recorder) got() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]string{}, r.ids...)
}

func startRelay(t *testing.T, q outbox.Queue, pub brokers.Publisher, cfg outbox.RelayConfig) *outbox.Relay {
	t.Helper()
	if cfg.IdlePoll == 0 {
		cfg.IdlePoll = 20 * time.Millisecond
	}
	r, err := outbox.NewRelay(q, pub, cfg)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	t.Cleanup(func() { cancel(); require.NoError(t, <-done) })
	return r
}

func put[Tx any](t *testing.T, w outbox.Writer[Tx], ms ...*brokers.Message) {
	t.Helper()
	require.NoError(t, outbox.InTx(t.Context(), w, func(ctx context.Context, tx Tx) error { return w.Enqueue(ctx, tx, ms...) }))
}

func postgres(t *testing.T, conns int32, edit ...func(*pgxpool.Config)) *pgxpool.Pool {
	pool := devtest.PostgresPool(t, conns, edit...)
	_, err := migrations.Up(t.Context(), migrations.Pool(pool))
	require.NoError(t, err)
	return pool
}

// A message that no queue gets is not lost, and it is sent once there is one.
// eventuate-tram/eventuate-tram-core#194, rabbitmq/rabbitmq-server#2178.
func TestUnroutableMessageWaitsUntilSomebodyBindsAQueue(t *testing.T) {
	t.Parallel()
	var bound atomic.Bool
	var tries atomic.Int64
	b := recorder{ok: func(m *brokers.Message) error {
		if m.Topic == "unbound" && !bound.Load() {
			tries.Add(1)
			return &brokers.Error{Op: "publish", Err: brokers.ErrNoRoute}
		}
		return nil
	}}
	o := outbox.SQLite(sqliteDB(t))
	startRelay(t, o, b.publisher(), outbox.RelayConfig{Backoff: time.Millisecond, MaxBackoff: 10 * time.Millisecond, MaxAttempts: -1})
	put(t, o, &brokers.Message{ID: "lost?", Topic: "unbound"}, &brokers.Message{ID: "fine", Topic: "bound"})
	require.Eventually(t, func() bool { return tries.Load() > 3 }, 10*time.Second, 5*time.Millisecond)
	require.Equal(t, []string{"fine"}, b.got())
	bound.Store(true)
	require.Eventually(t, func() bool { return len(b.got()) == 2 }, 10*time.Second, 5*time.Millisecond)
}

// A duplicate delivery must not send again what its first delivery has sent.
// Particular/NServiceBus#3070.
func TestDuplicateDeliveriesPublishNothingAgain(t *testing.T) {
	t.Parallel()
	db := sqliteDB(t)
	o, in := outbox.SQLite(db), inbox.SQLite(db)
	var b recorder
	relay, err := outbox.NewRelay(o, b.publisher(), outbox.RelayConfig{})
	require.NoError(t, err)
	for range 11 {
		_, err := inbox.Once(t.Context(), in, "billing", "m1", func(ctx context.Context, tx *sql.Tx) error {
			return o.Enqueue(ctx, tx, &brokers.Message{Topic: "invoices", Payload: []byte("x")})
		})
		require.NoError(t, err)
		require.NoError(t, relay.Flush(t.Context()))
	}
	require.Len(t, b.got(), 1)
}

// After a restore into another cluster transaction ids start low again, and leases
// of relays that are gone come along. ThreeDotsLabs/watermill#576.
func TestRestoredOutboxIsPublishedWithWhatIsNew(t *testing.T) {
	t.Parallel()
	old, restored := postgres(t, 2), postgres(t, 2)
	o := outbox.Postgres(old)
	put(t, o, &brokers.Message{ID: "1", Topic: "t", Key: "k"}, &brokers.Message{ID: "2", Topic: "t", Key: "k"})
	var from string
	require.NoError(t, old.QueryRow(t.Context(), `SELECT current_schema()`).Scan(&from))
	_, err := restored.Exec(t.Context(), fmt.Sprintf(`
		INSERT INTO outbox_messages SELECT * FROM %s.outbox_messages;
		SELECT setval(pg_get_serial_sequence('outbox_messages', 'seq'), (SELECT max(seq) FROM outbox_messages));
		INSERT INTO outbox_relays VALUES ('gone', now() - interval '1 day', now() - interval '1 day');
		UPDATE outbox_shares SET owner = 'gone', token = 41, until = now() - interval '1 day';`, from))
	require.NoError(t, err)
	n := outbox.Postgres(restored)
	put(t, n, &brokers.Message{ID: "3", Topic: "t", Key: "k"})
	var b recorder
	relay, err := outbox.NewRelay(n, b.publisher(), outbox.RelayConfig{})
	require.NoError(t, err)
	require.NoError(t, relay.Flush(t.Context()))
	require.Equal(t, []string{"1", "2", "3"}, b.got())
}

// A notification holds at most 8,000 bytes, and its queue is the whole server's:
// nothing of it may be in a business transaction. NeoHaskell/NeoHaskell#417,
// blockscout/blockscout#5850.
func TestEnqueueSendsNoNotification(t *testing.T) {
	t.Parallel()
	pool := postgres(t, 4)
	o := outbox.Postgres(pool)
	long := strings.Repeat("x", 9000)
	m := &brokers.Message{Topic: long, Key: long, Type: long}
	put(t, o, m)
	var b recorder
	startRelay(t, o, b.publisher(), outbox.RelayConfig{})
	require.Eventually(t, func() bool { return len(b.got()) == 1 }, 10*time.Second, 5*time.Millisecond)
	var triggers int
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT count(*) FROM pg_trigger WHERE tgrelid = 'outbox_messages'::regclass`).Scan(&triggers))
	require.Zero(t, triggers)
}

// An open snapshot keeps every deleted row in the index: looking for work gets
// slower, but must not stop. riverqueue/river#59, NikolayS/PgQue#61,
// xmtp/xmtpd#1054. (Figures for 500,000 rows: docs/outbox.md.)
func TestOpenSnapshotDoesNotStopTheRelay(t *testing.T) {
	t.Parallel()
	pool := postgres(t, 6)
	o := outbox.Postgres(pool)
	snapshot, err := pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	require.NoError(t, err)
	defer snapshot.Rollback(t.Context()) //nolint:errcheck // the test is over
	_, err = snapshot.Exec(t.Context(), `SELECT count(*) FROM outbox_messages`)
	require.NoError(t, err)
	const n = 20_000
	fill(t, pool, n)
	var b recorder
	relay, err := outbox.NewRelay(o, b.publisher(), outbox.RelayConfig{})
	require.NoError(t, err)
	require.NoError(t, relay.Flush(t.Context()))
	require.Len(t, b.got(), n)
	put(t, o, &brokers.Message{ID: "after", Topic: "t"})
	begin := time.Now()
	require.NoError(t, relay.Flush(t.Context()))
	require.Less(t, time.Since(begin), 2*time.Second)
	require.Equal(t, "after", b.got()[n])
}

// Leadership that hangs on a connection (a session lock) is lost with it, unnoticed,
// or leaks. Ours are rows: connections may be killed and recycled at any time.
// GreptimeTeam/greptimedb#7670, electric-sql/electric#2682,
// timescale/prometheus-postgresql-adapter#91.
func TestKilledConnectionsCostNeitherMessagesNorOrder(t *testing.T) {
	t.Parallel()
	name := devtest.Name("relay")
	pool := postgres(t, 4, func(c *pgxpool.Config) {
		c.MaxConnLifetime = 50 * time.Millisecond
		c.HealthCheckPeriod = 10 * time.Millisecond
		c.ConnConfig.RuntimeParams["application_name"] = name
	})
	other := devtest.Postgres(t)
	o := outbox.Postgres(pool)
	var b recorder
	for range 2 {
		startRelay(t, o, b.publisher(), outbox.RelayConfig{Batch: 5, Lease: 500 * time.Millisecond})
	}
	const n = 200
	for i := range n {
		m := &brokers.Message{ID: fmt.Sprintf("%03d", i), Topic: "t", Key: fmt.Sprint(i % 5)}
		for { // the writer's own connection is killed, too
			err := outbox.InTx(t.Context(), o, func(ctx context.Context, tx pgx.Tx) error { return o.Enqueue(ctx, tx, m) })
			if err == nil || errors.Is(err, outbox.ErrCommitUnknown) && countID(t, other, pool, m.ID) > 0 {
				break
			}
		}
		if i%20 == 10 {
			_, err := other.Exec(t.Context(), `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1`, name)
			require.NoError(t, err)
		}
	}
	require.Eventually(t, func() bool {
		var left int
		return pool.QueryRow(t.Context(), `SELECT count(*) FROM outbox_messages`).Scan(&left) == nil && left == 0
	}, 20*time.Second, 10*time.Millisecond)
	seen, last := map[string]bool{}, map[string]string{}
	for _, id := range b.got() {
		if seen[id] {
			continue // a repeat
		}
		seen[id] = true
		i, err := strconv.Atoi(id)
		require.NoError(t, err)
		key := fmt.Sprint(i % 5)
		require.Greater(t, id, last[key])
		last[key] = id
	}
	require.Len(t, seen, n)
	var locks int
	require.NoError(t, other.QueryRow(t.Context(), `SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid) WHERE l.locktype = 'advisory' AND a.application_name = $1`, name).Scan(&locks))
	require.Zero(t, locks)
}

// countID counts rows of an ID that may have been written, deleted ones not.
func countID(t *testing.T, by, in *pgxpool.Pool, id string) (n int) {
	schema := in.Config().ConnConfig.RuntimeParams["search_path"]
	require.NoError(t, by.QueryRow(t.Context(), fmt.Sprintf(`SELECT count(*) FROM %s.outbox_messages WHERE message_id = $1`, schema), id).Scan(&n))
	return n
}
