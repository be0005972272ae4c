package chaos

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

// figures are what a run ends with.
type figures struct {
	struck                          map[string]int
	inWork, misses, cutOff, backlog int
	took                            time.Duration
	joined                          atomic.Int64 // consumers that joined and left
}

// check counts by SQL, prints the figures, and says what is wrong.
func (d *driver) check(prod *producer, err error) {
	t := d.t
	ctx := context.WithoutCancel(t.Context())
	count := func(sql string) int {
		n, err := d.db.count(ctx, sql)
		assert.NoError(t, err)
		return n
	}
	left, leftErr := d.broker.left(ctx)
	assert.NoError(t, leftErr)
	r := counted{
		messages: count(`SELECT count(*) FROM orders`), effects: count(`SELECT count(*) FROM effects`),
		lost:    count(`SELECT count(*) FROM orders o WHERE NOT EXISTS (SELECT FROM effects e WHERE e.id = o.id)`),
		doubled: count(`SELECT count(*) FROM (SELECT id FROM effects GROUP BY id HAVING count(*) > 1) x`),
		foreign: count(`SELECT count(*) FROM effects e WHERE NOT EXISTS (SELECT FROM orders o WHERE o.id = e.id AND o.n = e.n AND o.key = e.key)`),
		inverted: count(`SELECT count(*) FROM (SELECT n, lag(n) OVER (PARTITION BY key ORDER BY seq) AS before
			FROM (SELECT key, n, min(seq) AS seq FROM effects GROUP BY key, n) f) x WHERE before > n`),
		held: count(`SELECT count(*) FROM held_messages`), outbox: count(`SELECT count(*) FROM outbox_messages`), left: left,
	}
	var more []row
	if v, ok := d.broker.(interface{ verify(t testing.TB) []row }); ok {
		more = v.verify(t)
	}
	t.Log("\n" + d.table(r, prod, more))
	if r.inverted > 0 && d.broker.ordered() {
		d.tellInversions(ctx)
	}
	if r.lost > 0 {
		d.tellLost(ctx)
	}
	d.all.mu.Lock()
	defer d.all.mu.Unlock()
	assert.NoError(t, err)
	assert.Empty(t, d.all.dead, "dead messages")
	r.check(t, d.plan.messages, d.broker.ordered())
	assert.Positive(t, d.all.held, "holds on the way")
	if d.plan.churn {
		assert.Positive(t, d.fig.joined.Load(), "consumers that joined and left")
	}
	assert.GreaterOrEqual(t, d.fig.inWork, d.plan.consumerKills, "transactions that kills hit")
	assert.Positive(t, d.all.redelivered, "redeliveries")
	if d.plan.relayKills > 0 {
		assert.Positive(t, d.fig.backlog, "what relays had to publish when they died")
	}
	if t.Failed() {
		if log, err := os.ReadFile(d.config.Log); err == nil {
			keep := filepath.Join(os.TempDir(), fmt.Sprintf("twiceproof-chaos-%d.log", d.plan.seed))
			t.Logf("the workers' log is kept in %s: %v", keep, os.WriteFile(keep, log, 0o600))
		}
	}
}

// tellLost logs the first few messages without an effect, and what is known of them.
func (d *driver) tellLost(ctx context.Context) {
	text, err := d.db.text(ctx, `SELECT coalesce(string_agg(format('%s of %s: claim: %s; held %s, in the outbox %s', id, key,
			coalesce((SELECT format('state %s, %s', state, processed_at) FROM processed_messages p WHERE p.message_id = o.id), 'none'),
			EXISTS (SELECT FROM held_messages h WHERE h.message_id = o.id),
			EXISTS (SELECT FROM outbox_messages m WHERE m.message_id = o.id)), E'\n' ORDER BY n), '')
		FROM (SELECT * FROM orders o WHERE NOT EXISTS (SELECT FROM effects e WHERE e.id = o.id) ORDER BY n LIMIT 20) o`)
	d.t.Logf("lost (%v):\n%s", err, text)
}

// tellInversions logs the first few effects that came before an earlier one of their key.
func (d *driver) tellInversions(ctx context.Context) {
	text, err := d.db.text(ctx, `SELECT coalesce(string_agg(format('%s: %s came after %s (effects %s and %s)', key, n, before, seq, seq_before), E'\n'), '')
		FROM (SELECT * FROM (SELECT key, n, seq, lag(n) OVER w AS before, lag(seq) OVER w AS seq_before
			FROM (SELECT key, n, min(seq) AS seq FROM effects GROUP BY key, n) f WINDOW w AS (PARTITION BY key ORDER BY seq)) x
			WHERE before > n ORDER BY seq LIMIT 10) y`)
	d.t.Logf("out of order (%v):\n%s", err, text)
}

// counted is what the database and the broker say at the end.
type counted struct {
	messages, effects, lost, doubled, foreign, inverted, held, outbox, left int
}

func (r counted) check(t *testing.T, messages int, ordered bool) {
	t.Helper()
	assert.Equal(t, messages, r.messages, "messages enqueued")
	assert.Zero(t, r.lost, "lost")
	assert.Zero(t, r.doubled, "doubled")
	assert.Zero(t, r.foreign, "effects of no message")
	assert.Equal(t, messages, r.effects, "effects")
	assert.Zero(t, r.held, "held at the end")
	assert.Zero(t, r.outbox, "left in the outbox")
	assert.Zero(t, r.left, "left on the broker, or dead there")
	if ordered {
		assert.Zero(t, r.inverted, "effects of a key out of order")
	}
}

func (r counted) rows() []row {
	return []row{{"messages", r.messages}, {"effects", r.effects}, {"lost", r.lost}, {"doubled", r.doubled}, {"out of order in their key", r.inverted},
		{"held at the end", r.held}, {"in the outbox", r.outbox}, {"on the broker", r.left}}
}

type row struct {
	name  string
	value any
}

func (d *driver) table(r counted, prod *producer, more []row) string {
	rows := []row{{"seed", d.plan.seed}, {"seconds", fmt.Sprintf("%.1f", d.fig.took.Seconds())}}
	for _, f := range []string{killConsumer, cutBroker, stopDatabase, killRelay, killBroker, rebalance} {
		rows = append(rows, row{f, d.fig.struck[f]})
	}
	d.all.mu.Lock()
	defer d.all.mu.Unlock()
	rows = append(rows, row{"transactions killed", d.fig.inWork}, row{"kills that hit none, not counted", d.fig.misses},
		row{"connections lost to cuts", d.fig.cutOff}, row{"in the outbox when relays died", d.fig.backlog},
		row{"business transactions run again", prod.retries.Load()},
		row{"redeliveries", d.all.redelivered}, row{"holds on the way", d.all.held}, row{"dead on the way", len(d.all.dead)})
	if d.plan.churn {
		rows = append(rows, row{"consumers that joined and left", d.fig.joined.Load()})
	}
	return format(slices.Concat(rows, more, r.rows()))
}

func format(rows []row) string {
	var b strings.Builder
	for _, r := range rows {
		fmt.Fprintf(&b, "  %-34s %10v\n", r.name, r.value)
	}
	return b.String()
}
