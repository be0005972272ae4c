package inbox

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/internal/msgcodec"
	"github.com/twiceproof/twiceproof/internal/sqldb"
)

// engine is what all stores share: the statements, and the logic between them,
// on any connection.
type engine struct {
	dialect sqldb.Dialect
	schema  string

	mu        sync.Mutex
	probed    bool // what the server can do is known
	watch     bool // it can notice by itself that a client is gone
	consumers map[string]int16
	rendered  map[string]string
}

func newEngine(d sqldb.Dialect, schema string) *engine {
	return &engine{dialect: d, schema: schema, consumers: map[string]int16{}, rendered: map[string]string{}}
}

// sql renders text once.
func (e *engine) sql(text string) string {
	e.mu.Lock()
	defer e.mu.Unlock()
	s, ok := e.rendered[text]
	if !ok {
		s = e.dialect.SQL(text, e.schema)
		e.rendered[text] = s
	}
	return s
}

// consumer returns the consumer's number, known or stored; 0 when it is neither.
func (e *engine) consumer(ctx context.Context, q sqldb.Q, name string) (int16, error) {
	e.mu.Lock()
	id := e.consumers[name]
	e.mu.Unlock()
	if id != 0 {
		return id, nil
	}
	if err := e.probe(ctx, q); err != nil {
		return 0, err
	}
	found, err := sqldb.QueryRow(ctx, q, e.sql(sqlSelectConsumer), []any{name}, &id)
	if err != nil || !found {
		return 0, err
	}
	e.remember(name, id)
	return id, nil
}

// probe finds out, outside any transaction, whether the server has
// client_connection_check_interval: from PostgreSQL 14, and not on every system it
// runs on.
func (e *engine) probe(ctx context.Context, q sqldb.Q) error {
	e.mu.Lock()
	done := e.probed || e.dialect != sqldb.Postgres
	e.mu.Unlock()
	if done {
		return nil
	}
	var set *string
	_, err := sqldb.QueryRow(ctx, q, `SELECT CASE WHEN current_setting('client_connection_check_interval', true) IS NOT NULL
		THEN set_config('client_connection_check_interval', '1000', true) END`, nil, &set)
	if err != nil && sqldb.State(err) != sqldb.InvalidParameter {
		return err
	}
	e.mu.Lock()
	e.probed, e.watch = true, err == nil && set != nil
	e.mu.Unlock()
	return nil
}

func (e *engine) remember(name string, id int16) {
	e.mu.Lock()
	e.consumers[name] = id
	e.mu.Unlock()
}

// addConsumer stores the name, inside a transaction that is alone (lock).
func (e *engine) addConsumer(ctx context.Context, q sqldb.Q, name string) error {
	if e.dialect == sqldb.Postgres {
		if _, err := q.Exec(ctx, e.sql(sqlLockConsumers)); err != nil {
			return err
		}
	}
	_, err := q.Exec(ctx, e.sql(sqlInsertConsumer), name)
	return err
}

const (
	sqlSelectConsumer = `SELECT id FROM {s}inbox_consumers WHERE name = $1`
	sqlLockConsumers  = `LOCK TABLE {s}inbox_consumers IN SHARE ROW EXCLUSIVE MODE`
	sqlInsertConsumer = `INSERT INTO {s}inbox_consumers (id, name)
		SELECT (SELECT coalesce(max(id), 0) + 1 FROM {s}inbox_consumers), {text:$1}
		WHERE NOT EXISTS (SELECT 1 FROM {s}inbox_consumers WHERE name = $1)`
)

const (
	stateDone      = 0
	stateHeld      = 1
	stateDiscarded = 2
)

// claimed is one row of the claim statement's answer.
type claimed struct {
	inserted, differs, heldID, heldKey bool
	state                              *int16
}

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
// parameters are: consumer, lock timeout, idle timeout, whether dead ones do not
// block, whether to watch the client; then id, fingerprint and order key of each message.
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

// The settings ride with the claim. synchronous_commit is raised to on, never
// lowered. lock_timeout bounds the wait for a concurrent claim alone: it is put
// back before the handler runs. The two last ones end the transaction of a client
// that is gone, which would keep a duplicate waiting: while it is idle, and while a
// statement runs.
const sqlClaimPostgres = `WITH cfg AS MATERIALIZED (
	SELECT current_setting('lock_timeout') AS old, set_config('lock_timeout', $2::text, true) AS lock,
		set_config('idle_in_transaction_session_timeout', $3::text, true) AS idle,
		set_config('synchronous_commit', CASE WHEN current_setting('synchronous_commit') IN ('on', 'remote_apply')
			THEN current_setting('synchronous_commit') ELSE 'on' END, true) AS durable,
		CASE WHEN $5::boolean AND current_setting('client_connection_check_interval', true) = '0'
			THEN set_config('client_connection_check_interval', '1000', true) END AS watch
), req AS MATERIALIZED (
	SELECT v.ord, v.id, v.fp, v.key FROM cfg, (VALUES {values}) AS v (ord, id, fp, key)
), ins AS (
	INSERT INTO {s}processed_messages (consumer_id, message_id, fp)
	SELECT $1::smallint, id, fp FROM req ORDER BY id ON CONFLICT DO NOTHING RETURNING message_id
)
SELECT i.message_id IS NOT NULL, p.state, coalesce(p.fp <> r.fp, false),
	EXISTS (SELECT FROM {s}held_messages h WHERE h.consumer_id = $1::smallint AND h.message_id = r.id AND h.kind = 0),
	EXISTS (SELECT FROM {s}held_messages h WHERE h.consumer_id = $1::smallint AND h.order_key = r.key AND NOT (h.dead AND $4::boolean)),
	pg_backend_pid(),
	(SELECT set_config('lock_timeout', cfg.old, true) FROM cfg, (SELECT count(*) AS n FROM ins) x WHERE x.n >= 0) IS NOT NULL
FROM req r LEFT JOIN ins i ON i.message_id = r.id
LEFT JOIN LATERAL (SELECT state, fp FROM {s}processed_messages WHERE consumer_id = $1::smallint AND message_id = r.id LIMIT 1) p ON true
ORDER BY r.ord`

func milliseconds(d time.Duration) string {
	if d <= 0 {
		return "0"
	}
	return strconv.FormatInt(max(1, d.Milliseconds()), 10)
}

func (e *engine) claimArgs(consumer int16, u Unit, items []*Item) []any {
	timeout := u.ClaimTimeout
	if timeout <= 0 {
		timeout = 5 * time.Second
	}
	e.mu.Lock()
	watch := e.watch
	e.mu.Unlock()
	args := []any{consumer, milliseconds(timeout), milliseconds(u.IdleTimeout), u.ContinueAfterDead, watch}
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

// heldRow is what insertHeld writes.
type heldRow struct {
	item              *Item
	kind              int
	reason            string
	dead              bool
	delay             time.Duration
	attempts          int
	failure           Failure
	continueAfterDead bool
}

const sqlInsertHeld = `INSERT INTO {s}held_messages (consumer_id, kind, dead, attempts, starts, reason, message_id, raw_id, fp, order_key,
	coordinates, topic, message_key, type, content_type, produced_at, headers, payload, held_at, updated_at,
	first_error_class, first_error, last_error_class, last_error, last_stack, due_at)
	VALUES ($1, $2, $3, $4, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, {now}, {now}, $18, $19, $18, $19, $20,
	CASE WHEN $3 THEN NULL WHEN {bytes:$9} IS NULL THEN {after:$21}
		WHEN EXISTS (SELECT 1 FROM {s}held_messages h WHERE h.consumer_id = $1 AND h.order_key = $9 AND NOT (h.dead AND $22)) THEN NULL
		ELSE {after:$21} END) ON CONFLICT DO NOTHING`

// lockKey makes the change of a key's head exclusive until the transaction ends.
func (e *engine) lockKey(ctx context.Context, q sqldb.Q, consumer int16, key []byte) error {
	if key == nil || e.dialect == sqldb.SQLite {
		return nil
	}
	_, err := q.Exec(ctx, `SELECT pg_advisory_xact_lock($1)`, keyLock(consumer, key))
	return err
}

// insertHeld holds a message whose claim this transaction has (kind 0), or which
// has none. It reports false when it is held already.
func (e *engine) insertHeld(ctx context.Context, q sqldb.Q, consumer int16, r heldRow) (bool, error) {
	it, m := r.item, r.item.Message
	key := it.OrderKey
	if r.kind != kindOrdinary {
		key = nil // those never block their key
	}
	if err := e.lockKey(ctx, q, consumer, key); err != nil {
		return false, err
	}
	n, err := q.Exec(ctx, e.sql(sqlInsertHeld), consumer, r.kind, r.dead, r.attempts, r.reason,
		orNil(it.ID), it.RawID, it.Fingerprint, key, text(it.Coordinates), []byte(m.Topic), bytesOrNil(m.Key), []byte(m.Type),
		[]byte(m.ContentType), msgcodec.Time(m.Time), msgcodec.Headers(m.Headers), m.Payload,
		orNil(text(r.failure.Class)), orNil(text(r.failure.Text)), orNil(text(r.failure.Stack)),
		r.delay.Microseconds(), r.continueAfterDead)
	if err == nil && n > 0 && e.dialect == sqldb.SQLite {
		// PostgreSQL numbers the places by itself.
		_, err = q.Exec(ctx, sqlPosition)
	}
	if err != nil || r.kind != kindOrdinary {
		return n > 0, err
	}
	_, err = q.Exec(ctx, e.sql(sqlSetState), consumer, it.ID, stateHeld, nil)
	return n > 0, err
}

const sqlPosition = `UPDATE held_messages SET position = seq WHERE seq = last_insert_rowid() AND position = 0`

const (
	kindOrdinary = 0
	kindConflict = 1
	kindNoID     = 2
)

func orNil(s string) any {
	if s == "" {
		return nil
	}
	return s
}

func bytesOrNil(s string) []byte {
	if s == "" {
		return nil
	}
	return []byte(s)
}

// recordOn keeps one outcome on an open transaction.
func (e *engine) recordOn(ctx context.Context, q sqldb.Q, consumer int16, u Unit, it *Item, discard bool, r heldRow) (Verdict, error) {
	switch r.reason {
	case ReasonConflict, ReasonNoID, ReasonBadID:
		r.kind = kindNoID
		if r.reason == ReasonConflict {
			r.kind = kindConflict
		}
		if inserted, err := e.insertHeld(ctx, q, consumer, r); err != nil || inserted {
			return Recorded, err
		}
		return Held, nil
	}
	u.HoldBehind = false
	rows, _, err := e.claimOn(ctx, q, consumer, u, []*Item{it})
	if err != nil {
		return 0, err
	}
	vs, _, _, err := e.settleClaims(ctx, q, consumer, u, []*Item{it}, rows)
	if err != nil {
		return 0, err
	}
	switch vs[0] {
	case Claimed:
	case Behind:
		if _, err := q.Exec(ctx, e.sql(sqlInsertClaim), consumer, it.ID, it.Fingerprint); err != nil {
			return 0, err
		}
	default:
		return vs[0], nil
	}
	if discard {
		_, err = q.Exec(ctx, e.sql(sqlSetState), consumer, it.ID, stateDiscarded, text(r.failure.Text))
		return Recorded, err
	}
	_, err = e.insertHeld(ctx, q, consumer, r)
	return Recorded, err
}

// recordAll keeps outcomes on an open transaction.
func recordAll[Tx any](ctx context.Context, e *engine, tx Tx, q sqldb.Q, consumer int16, u Unit, outcomes []Outcome[Tx]) ([]Verdict, error) {
	vs := make([]Verdict, 0, len(outcomes))
	for _, o := range outcomes {
		v, err := e.recordOn(ctx, q, consumer, u, o.Item, o.Discard, rowOf(o, u))
		if err == nil && v == Recorded {
			err = runWith(ctx, e, tx, q, u, o)
		}
		if err != nil {
			return nil, err
		}
		vs = append(vs, v)
	}
	return vs, nil
}

// runWith runs what an outcome brings along.
func runWith[Tx any](ctx context.Context, e *engine, tx Tx, q sqldb.Q, u Unit, o Outcome[Tx]) error {
	if o.With == nil {
		return nil
	}
	death := 0
	if o.Dead && !o.Discard {
		if _, err := sqldb.QueryRow(ctx, q, e.sql(sqlReplays), []any{u.Consumer, o.Item.ID}, &death); err != nil {
			return err
		}
		death++
	}
	return o.With(ctx, tx, death)
}

// A message dies again only after somebody has replayed it.
const sqlReplays = `SELECT count(*) FROM {s}twiceproof_audit WHERE consumer = $1 AND message_id = $2 AND action = 'replay'`

func rowOf[Tx any](o Outcome[Tx], u Unit) heldRow {
	return heldRow{item: o.Item, reason: o.Reason, dead: o.Dead, delay: o.Delay, attempts: o.Attempts, failure: o.Failure,
		continueAfterDead: u.ContinueAfterDead}
}

// classify turns an error of the claim into what callers branch on.
func classify(err error) error {
	if err == nil {
		return nil
	}
	if sqldb.State(err) == sqldb.LockNotAvailable || sqldb.Busy(err) {
		return errors.Join(ErrClaimTimeout, err)
	}
	return err
}

// Rerun reports whether err is a serialization failure or deadlock: run the same
// attempt again, it counts for nothing.
func Rerun(err error) bool { return sqldb.Rerun(err) }

// message rebuilds a held message.
func message(id string, raw, topic, key, typ, ct []byte, at *string, headers, payload []byte, noPayload bool) (*brokers.Message, error) {
	hs, err := msgcodec.ParseHeaders(headers)
	m := &brokers.Message{ID: id, Topic: string(topic), Key: string(key), Type: string(typ), ContentType: string(ct),
		Time: msgcodec.ParseTime(at), Headers: hs, Payload: payload}
	if raw != nil {
		m.ID = string(raw)
	}
	if noPayload {
		m.Payload = nil
	} else if m.Payload == nil {
		m.Payload = []byte{}
	}
	return m, err
}
