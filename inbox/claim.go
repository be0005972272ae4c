package inbox

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/twiceproof/twiceproof/internal/sqldb"
)

// claimed is one row of the claim statement's answer.
type claimed struct {
	inserted, differs, heldID, heldKey bool
	state                              *int16
}

const (
	stateDone      = 0
	stateHeld      = 1
	stateDiscarded = 2
)

// judge turns an answer into a verdict; again means that the insert had to wait
// and the statement's snapshot is older than what it waited for.
func (c claimed) judge() (v Verdict, again bool) {
	switch {
	case c.inserted && c.heldID:
		return Held, false
	case c.inserted && c.heldKey:
		return Behind, false
	case c.inserted:
		return Claimed, false
	case c.state == nil:
		return 0, true
	case c.differs:
		return Conflict, false
	case *c.state == stateHeld:
		return Held, false
	}
	return Duplicate, false
}

// claimSQL is the claim of n messages on PostgreSQL, in one statement. Its
// parameters are: lock timeout, idle timeout, whether to watch the client, consumer,
// whether dead ones do not block; then id, fingerprint and order key of each message.
func (e *engine) claimSQL(n int) string {
	e.mu.Lock()
	defer e.mu.Unlock()
	name := "claim" + strconv.Itoa(n)
	if s, ok := e.rendered[name]; ok {
		return s
	}
	var values strings.Builder
	for i := range n {
		if i > 0 {
			values.WriteString(", ")
		}
		p := 6 + 3*i
		fmt.Fprintf(&values, "(%d, $%d::text, $%d::bytea, $%d::bytea)", i, p, p+1, p+2)
	}
	s := e.dialect.SQL(strings.Replace(sqlClaimPostgres, "{values}", values.String(), 1), e.schema)
	e.rendered[name] = s
	return s
}

// sqlDurable raises synchronous_commit to on, and never lowers it: what a broker is told
// goes by a commit that outlives the server's crash.
const sqlDurable = `set_config('synchronous_commit', CASE WHEN current_setting('synchronous_commit') IN ('on', 'remote_apply')
	THEN current_setting('synchronous_commit') ELSE 'on' END, true)`

// sqlSettings ride with the claim. lock_timeout bounds the wait for a concurrent claim alone: it is put
// back before the handler runs. The two last ones end the transaction of a client
// that is gone, which would keep a duplicate waiting: while it is idle, and while a
// statement runs.
const sqlSettings = `set_config('lock_timeout', $1::text, true) AS lock,
	set_config('idle_in_transaction_session_timeout', $2::text, true) AS idle,
	` + sqlDurable + ` AS durable,
	CASE WHEN $3::boolean AND current_setting('client_connection_check_interval', true) = '0'
		THEN set_config('client_connection_check_interval', '1000', true) END AS watch`

const sqlClaimPostgres = `WITH cfg AS MATERIALIZED (
	SELECT current_setting('lock_timeout') AS old, ` + sqlSettings + `
), req AS MATERIALIZED (
	SELECT v.ord, v.id, v.fp, v.key FROM cfg, (VALUES {values}) AS v (ord, id, fp, key)
), ins AS (
	INSERT INTO {s}processed_messages (consumer_id, message_id, fp)
	SELECT $4::smallint, id, fp FROM req ORDER BY id ON CONFLICT DO NOTHING RETURNING message_id
)
SELECT i.message_id IS NOT NULL, p.state, coalesce(p.fp <> r.fp, false),
	EXISTS (SELECT FROM {s}held_messages h WHERE h.consumer_id = $4::smallint AND h.message_id = r.id AND h.kind = 0),
	EXISTS (SELECT FROM {s}held_messages h WHERE h.consumer_id = $4::smallint AND h.order_key = r.key AND NOT (h.dead AND $5::boolean)),
	pg_backend_pid(),
	(SELECT set_config('lock_timeout', cfg.old, true) FROM cfg, (SELECT count(*) AS n FROM ins) x WHERE x.n >= 0) IS NOT NULL
FROM req r LEFT JOIN ins i ON i.message_id = r.id
LEFT JOIN LATERAL (SELECT state, fp FROM {s}processed_messages WHERE consumer_id = $4::smallint AND message_id = r.id LIMIT 1) p ON true
ORDER BY r.ord`

// The same for one message that is most likely new, as statements of one round trip: they
// are planned and run in half the time. The probes of sqlClaimOne see what its insert sees,
// as in the long form: a hold that was committed before the insert could go on has left
// the row in processed_messages too, so the insert gives no row and the long form is asked.
const (
	sqlClaimSettings = `SELECT set_config('twiceproof.lock_timeout', current_setting('lock_timeout'), true), ` + sqlSettings
	sqlClaimOne      = `INSERT INTO {s}processed_messages (consumer_id, message_id, fp) VALUES ($1::smallint, $2::text, $3::bytea)
		ON CONFLICT DO NOTHING RETURNING
		EXISTS (SELECT FROM {s}held_messages h WHERE h.consumer_id = $1::smallint AND h.message_id = $2::text AND h.kind = 0),
		EXISTS (SELECT FROM {s}held_messages h WHERE h.consumer_id = $1::smallint AND h.order_key = $4::bytea AND NOT (h.dead AND $5::boolean)),
		pg_backend_pid()`
	sqlClaimRestore = `SELECT set_config('lock_timeout', current_setting('twiceproof.lock_timeout'), true)`
)

func milliseconds(d time.Duration) string {
	if d <= 0 {
		return "0"
	}
	return strconv.FormatInt(max(1, d.Milliseconds()), 10)
}

// settingsArgs are the parameters of sqlSettings.
func (e *engine) settingsArgs(u Unit) []any {
	timeout := u.ClaimTimeout
	if timeout <= 0 {
		timeout = 5 * time.Second
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return []any{milliseconds(timeout), milliseconds(u.IdleTimeout), e.watch}
}

func (e *engine) claimArgs(consumer int16, u Unit, items []*Item) []any {
	args := append(e.settingsArgs(u), consumer, u.ContinueAfterDead)
	for _, it := range items {
		args = append(args, it.ID, it.Fingerprint, it.OrderKey)
	}
	return args
}

// scanClaim reads the claim's answer.
func scanClaim(into *[]claimed, pid *int32) func(scan func(...any) error) error {
	return func(scan func(...any) error) error {
		var c claimed
		var restored bool
		err := scan(&c.inserted, &c.state, &c.differs, &c.heldID, &c.heldKey, pid, &restored)
		*into = append(*into, c)
		return err
	}
}

// claimOn claims the items on an open transaction.
func (e *engine) claimOn(ctx context.Context, q sqldb.Q, consumer int16, u Unit, items []*Item) ([]claimed, int32, error) {
	if e.dialect == sqldb.SQLite {
		return e.claimSQLite(ctx, q, consumer, u, items)
	}
	var rows []claimed
	var pid int32
	err := q.Query(ctx, e.claimSQL(len(items)), e.claimArgs(consumer, u, items), scanClaim(&rows, &pid))
	return rows, pid, err
}

const (
	sqlInsertClaim = `INSERT INTO {s}processed_messages (consumer_id, message_id, fp, processed_at)
		VALUES ($1, $2, $3, {now}) ON CONFLICT DO NOTHING`
	sqlProbeClaim = `SELECT p.state, coalesce(p.fp <> $3, 0),
		EXISTS (SELECT 1 FROM held_messages h WHERE h.consumer_id = $1 AND h.message_id = $2 AND h.kind = 0),
		EXISTS (SELECT 1 FROM held_messages h WHERE h.consumer_id = $1 AND h.order_key = $4 AND NOT (h.dead AND $5))
		FROM processed_messages p WHERE p.consumer_id = $1 AND p.message_id = $2`
)

func (e *engine) claimSQLite(ctx context.Context, q sqldb.Q, consumer int16, u Unit, items []*Item) ([]claimed, int32, error) {
	rows := make([]claimed, len(items))
	for i, it := range items {
		n, err := q.Exec(ctx, e.sql(sqlInsertClaim), consumer, it.ID, it.Fingerprint)
		if err != nil {
			return nil, 0, err
		}
		c := &rows[i]
		c.inserted = n == 1
		args := []any{consumer, it.ID, it.Fingerprint, it.OrderKey, u.ContinueAfterDead}
		if _, err := sqldb.QueryRow(ctx, q, e.sql(sqlProbeClaim), args, &c.state, &c.differs, &c.heldID, &c.heldKey); err != nil {
			return nil, 0, err
		}
	}
	return rows, 0, nil
}

// settleClaims judges the answers, asking again as long as a wait made the
// snapshot old, and holds what is behind a held message. open says whether the
// transaction has claims for a handler, dirty whether it has anything to commit.
func (e *engine) settleClaims(ctx context.Context, q sqldb.Q, consumer int16, u Unit, items []*Item, rows []claimed) (vs []Verdict, open, dirty bool, err error) {
	const asks = 5
	for ask := range asks {
		vs = vs[:0]
		again := false
		for _, r := range rows {
			v, old := r.judge()
			again = again || old
			vs = append(vs, v)
		}
		if !again {
			break
		}
		if ask == asks-1 {
			return nil, false, false, fmt.Errorf("claim: %w", ErrClaimTimeout)
		}
		before := rows
		if rows, _, err = e.claimOn(ctx, q, consumer, u, items); err != nil {
			return nil, false, false, err
		}
		for i := range rows {
			// What the first asking inserted is ours, and not there for the second.
			rows[i].inserted = rows[i].inserted || before[i].inserted
		}
	}
	for i, v := range vs {
		switch {
		case v == Claimed:
			open = true
		case v == Held && rows[i].inserted:
			dirty = true
			_, err = q.Exec(ctx, e.sql(sqlSetState), consumer, items[i].ID, stateHeld, nil)
		case v == Behind && u.HoldBehind:
			dirty = true
			_, err = e.insertHeld(ctx, q, consumer, heldRow{item: items[i], reason: ReasonBehind, continueAfterDead: u.ContinueAfterDead})
		case v == Behind:
			// A message that does not run must not leave its claim to the transaction's
			// other work: it would count as done.
			_, err = q.Exec(ctx, e.sql(sqlDeleteClaim), consumer, items[i].ID)
		}
		if err != nil {
			return nil, false, false, err
		}
	}
	return vs, open, dirty, nil
}

const (
	sqlSetState = `UPDATE {s}processed_messages SET state = $3, reason = $4, processed_at = {now}
		WHERE consumer_id = $1 AND message_id = $2`
	sqlDeleteClaim = `DELETE FROM {s}processed_messages WHERE consumer_id = $1 AND message_id = $2`
	sqlHasClaim    = `SELECT 1 FROM {s}processed_messages WHERE consumer_id = $1 AND message_id = $2`
)

// fold leaves the first of each ID, and says for the others where it is.
func fold(items []*Item) (first []*Item, of []int, conflict []bool) {
	at := make(map[string]int, len(items))
	of, conflict = make([]int, len(items)), make([]bool, len(items))
	for i, it := range items {
		j, ok := at[it.ID]
		if !ok {
			j = len(first)
			at[it.ID] = j
			first = append(first, it)
		} else {
			conflict[i] = !sameBytes(first[j].Fingerprint, it.Fingerprint)
		}
		of[i] = j
	}
	return first, of, conflict
}

// unfold gives each item of the unit its verdict.
func unfold(vs []Verdict, of []int, conflict []bool) []Verdict {
	out := make([]Verdict, len(of))
	seen := make([]bool, len(vs))
	for i, j := range of {
		out[i] = vs[j]
		if conflict[i] {
			out[i] = Conflict
		} else if seen[j] && vs[j] == Claimed {
			out[i] = Copy
		}
		seen[j] = true
	}
	return out
}
