package inbox

import (
	"context"
	"time"

	"github.com/twiceproof/twiceproof/internal/msgcodec"
	"github.com/twiceproof/twiceproof/internal/sqldb"
)

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

const (
	kindOrdinary = 0
	kindConflict = 1
	kindNoID     = 2
)

const sqlInsertHeld = `INSERT INTO {s}held_messages (consumer_id, kind, dead, attempts, starts, reason, message_id, raw_id, fp, order_key,
	coordinates, topic, message_key, type, content_type, produced_at, headers, payload, held_at, updated_at,
	first_error_class, first_error, last_error_class, last_error, last_stack, due_at)
	VALUES ($1, $2, $3, $4, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, {now}, {now}, $18, $19, $18, $19, $20,
	CASE WHEN $3 THEN NULL WHEN {bytes:$9} IS NULL THEN {after:$21}
		WHEN EXISTS (SELECT 1 FROM {s}held_messages h WHERE h.consumer_id = $1 AND h.order_key = $9 AND NOT (h.dead AND $22)) THEN NULL
		ELSE {after:$21} END) ON CONFLICT DO NOTHING`

const sqlPosition = `UPDATE held_messages SET position = seq WHERE seq = last_insert_rowid() AND position = 0`

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

// A message dies again only after somebody has replayed it.
const sqlReplays = `SELECT count(*) FROM {s}twiceproof_audit WHERE consumer = $1 AND message_id = $2 AND action = 'replay'`

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

func rowOf[Tx any](o Outcome[Tx], u Unit) heldRow {
	return heldRow{item: o.Item, reason: o.Reason, dead: o.Dead, delay: o.Delay, attempts: o.Attempts, failure: o.Failure,
		continueAfterDead: u.ContinueAfterDead}
}

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
