package chaos

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"os"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/brokers/memory"
	"github.com/twiceproof/twiceproof/consumer"
	"github.com/twiceproof/twiceproof/inbox"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
)

// million is the run of many messages of which some fail for a while and some for ever.
type million struct {
	*testing.T
	n, keys int
	db      *database[pgx.Tx]
	op      *inbox.Operator
	fixed   atomic.Bool
	maxHeld int
	fails   bool // 1 % of the messages fail twice, 0.1 % for ever
}

// for ever: one message in a thousand. For a while: ten in a thousand.
func (m *million) kind(i int) (ever, twice bool) {
	if !m.fails {
		return false, false
	}
	h := fnv.New32a()
	fmt.Fprint(h, "seed/", i)
	k := h.Sum32() % 1000
	return k == 0, k >= 1 && k <= 10
}

// keyOf spreads messages over the keys, each key's messages over the run.
func (m *million) keyOf(i int) int { return i % m.keys }

func (m *million) handle(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
	i, err := strconv.Atoi(msg.ID)
	if err != nil {
		return consumer.Permanent(err)
	}
	if err := m.db.exec(ctx, tx, `INSERT INTO effects (id, key, n) VALUES ($1, $2, $3)`, msg.ID, msg.Key, i); err != nil {
		return err
	}
	switch ever, twice := m.kind(i); {
	case ever && !m.fixed.Load():
		return errors.New("fails for ever")
	case twice && msg.Attempt <= 2 && !m.fixed.Load():
		return errors.New("fails for a while")
	}
	return nil
}

// run consumes everything and returns how long it took.
func (m *million) run(after consumer.AfterDead, until func() bool, then func()) time.Duration {
	b := memory.New(memory.Config{})
	b.Topic("t", memory.TopicConfig{Partitions: 8})
	pub := b.Publisher()
	for from := 0; from < m.n; from += 1000 {
		var ms []*brokers.Message
		for i := from; i < min(m.n, from+1000); i++ {
			ms = append(ms, &brokers.Message{ID: strconv.Itoa(i), Topic: "t", Key: fmt.Sprint("k", m.keyOf(i)), Payload: []byte(strconv.Itoa(i))})
		}
		for _, r := range pub.Publish(m.Context(), ms...) {
			require.NoError(m, r.Err)
		}
	}
	r, err := consumer.New(m.db.store, b.Source("t", memory.Group("g")), m.handle, consumer.Config{
		Name: "million", Concurrency: 16, Tries: 1, MaxAttempts: 3, AfterDead: after, RequireOrder: true, MaxHeld: m.maxHeld, Backoff: 10 * time.Millisecond, MaxBackoff: 50 * time.Millisecond,
	})
	require.NoError(m, err)
	ctx, stop := context.WithCancel(m.Context())
	defer stop()
	done := make(chan error, 1)
	began := time.Now()
	go func() { done <- r.Run(ctx) }()
	m.await("everything is done or held", &r, until)
	took := time.Since(began)
	if then != nil {
		then()
		m.await("everything is done", &r, func() bool { return m.count(`SELECT count(*) FROM held_messages`) == 0 })
	}
	stop()
	require.NoError(m, <-done)
	return took
}

// await waits as long as there is progress.
func (m *million) await(what string, r **consumer.Runner, ok func() bool) {
	last, since := consumer.Stats{}, time.Now()
	for !ok() {
		if s := (*r).Stats(); s != last {
			last, since = s, time.Now()
		}
		if time.Since(since) > patience {
			require.Fail(m, "stuck before "+what, "%+v", last)
		}
		require.True(m, pause(m.Context(), 100*time.Millisecond))
	}
}

func (m *million) count(q string) int {
	n, err := m.db.count(m.Context(), q)
	require.NoError(m, err)
	return n
}

const inverted = `SELECT count(*) FROM (SELECT n, lag(n) OVER (PARTITION BY key ORDER BY seq) AS before FROM effects %s) x WHERE before > n`

func newMillion(t *testing.T, fails bool) *million {
	n, keys := 20_000, 1_000
	if os.Getenv(envForm) == "long" {
		n, keys = 1_000_000, 10_000
	}
	db, err := openPostgres(t.Context(), devtest.PostgresSchema(t), 24)
	require.NoError(t, err)
	t.Cleanup(db.close)
	require.NoError(t, db.setup(t.Context(), effectsTable))
	op := db.store.(*inbox.PostgresStore).Operator()
	return &million{T: t, n: n, keys: keys, db: db, op: op, fails: fails}
}

// expected counts what stays held: the dead ones, and with Block all later ones of
// their keys.
func (m *million) expected() (dead, behind int) {
	blocked := map[int]bool{}
	for i := range m.n {
		k := m.keyOf(i)
		ever, _ := m.kind(i)
		switch {
		case blocked[k]:
			behind++
			continue
		case ever:
			blocked[k] = true
		}
	}
	dead = len(blocked)
	return dead, behind
}

func (m *million) forever() (n int) {
	for i := range m.n {
		if ever, _ := m.kind(i); ever {
			n++
		}
	}
	return n
}

// replay fixes the handler and replays what is dead.
func (m *million) replay() {
	m.fixed.Store(true)
	chosen, err := m.op.Choose(m.Context(), inbox.HeldFilter{Dead: new(true)})
	require.NoError(m, err)
	for _, c := range chosen {
		require.NoError(m, m.op.Replay(m.Context(), c, inbox.By{Actor: "test"}))
	}
}

func (m *million) checkEffects(n int) {
	assert.Equal(m, n, m.count(`SELECT count(*) FROM effects`), "effects")
	assert.Equal(m, n, m.count(`SELECT count(DISTINCT id) FROM effects`), "doubled")
}

// A dead message blocks its key: what is held is exactly the dead ones and all later
// ones of their keys, and after the fix and a replay the whole order of every key is
// the order in which its messages were sent.
func TestMillionWithBlock(t *testing.T) {
	m := newMillion(t, true)
	dead, behind := m.expected()
	require.Positive(t, dead)
	require.Positive(t, behind)
	rest := m.n - dead - behind
	took := m.run(consumer.Block, func() bool {
		return m.count(`SELECT count(*) FROM effects`) == rest && m.count(`SELECT count(*) FROM held_messages`) == dead+behind
	}, func() {
		assert.Equal(t, dead, m.count(`SELECT count(*) FROM held_messages WHERE dead`))
		assert.Equal(t, behind, m.count(`SELECT count(*) FROM held_messages WHERE NOT dead AND reason = 'behind'`))
		m.checkEffects(rest)
		assert.Zero(t, m.count(fmt.Sprintf(inverted, "")), "out of order in their key")
		m.replay()
	})
	m.checkEffects(m.n)
	assert.Zero(t, m.count(fmt.Sprintf(inverted, "")), "out of order after the replay")
	assert.Zero(t, m.count(`SELECT count(*) FROM processed_messages WHERE state <> 0`))
	t.Logf("%d messages, %d keys: %d dead, %d behind them; %.0f messages/s until then", m.n, m.keys, dead, behind, float64(m.n)/took.Seconds())
}

// At MaxHeld the intake stops and goes on again and again, and nothing is lost on the
// way: a message that could not be held for it is not settled.
func TestManyAroundMaxHeld(t *testing.T) {
	m := newMillion(t, true)
	m.n, m.keys = 10_000, 500
	dead, behind := m.expected()
	m.maxHeld = dead + behind + 20
	rest := m.n - dead - behind
	m.run(consumer.Block, func() bool {
		return m.count(`SELECT count(*) FROM effects`) == rest && m.count(`SELECT count(*) FROM held_messages`) == dead+behind
	}, m.replay)
	m.checkEffects(m.n)
	assert.Zero(t, m.count(fmt.Sprintf(inverted, "")), "out of order in their key")
}

// A backlog on the broker that keeps every worker busy does not keep held messages from
// being run.
func TestRetriesAreNotStarvedByABacklog(t *testing.T) {
	m := newMillion(t, true)
	m.n, m.keys = 20_000, 1_000
	m.run(consumer.Block, func() bool {
		if done := m.count(`SELECT count(*) FROM effects`); done < m.n/2 || done > m.n*8/10 {
			return done > m.n*8/10
		}
		// In the middle of it, most of those that fail for a while are through already.
		return m.count(`SELECT count(*) FROM held_messages WHERE NOT dead AND reason = 'retry' AND due_at <= now() - interval '2 seconds'`) == 0
	}, func() {
		require.Less(t, m.count(`SELECT count(*) FROM effects`), m.n*8/10, "held messages that are due wait for the end of the backlog")
		m.fixed.Store(true)
		require.Eventually(t, func() bool { m.replay(); return m.count(`SELECT count(*) FROM effects`) == m.n }, 2*patience, time.Second)
	})
	m.checkEffects(m.n)
}

// A dead message lets its key go on: what is held is exactly the dead ones, and the
// others are in order.
func TestMillionWithContinue(t *testing.T) {
	m := newMillion(t, true)
	dead := m.forever()
	took := m.run(consumer.Continue, func() bool {
		return m.count(`SELECT count(*) FROM effects`) == m.n-dead && m.count(`SELECT count(*) FROM held_messages`) == dead
	}, func() {
		assert.Equal(t, dead, m.count(`SELECT count(*) FROM held_messages WHERE dead`))
		m.checkEffects(m.n - dead)
		assert.Zero(t, m.count(fmt.Sprintf(inverted, "")), "out of order in their key")
		m.replay()
	})
	m.checkEffects(m.n)
	t.Logf("%d messages, %d keys: %d dead; %.0f messages/s until then", m.n, m.keys, dead, float64(m.n)/took.Seconds())
}

// The same run without a failure, for the rate.
func TestMillionWithoutFailures(t *testing.T) {
	m := newMillion(t, false)
	took := m.run(consumer.Block, func() bool { return m.count(`SELECT count(*) FROM effects`) == m.n }, nil)
	m.checkEffects(m.n)
	assert.Zero(t, m.count(`SELECT count(*) FROM held_messages`))
	assert.Zero(t, m.count(fmt.Sprintf(inverted, "")))
	t.Logf("%d messages, %d keys: %.0f messages/s", m.n, m.keys, float64(m.n)/took.Seconds())
}
