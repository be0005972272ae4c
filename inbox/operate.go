package inbox

import (
	"context"
	"errors"
	"fmt"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/internal/msgcodec"
	"github.com/twiceproof/twiceproof/internal/sqldb"
)

// actions of the audit.
const (
	actionReplay  = "replay"
	actionDiscard = "discard"
	actionEdit    = "edit"
)

// By says who acts and why, for the audit.
type By struct {
	// Actor is a person or a program. Required.
	Actor string
	// Reason is free text.
	Reason string
}

const (
	sqlLockHeld = `SELECT h.consumer_id, c.name, h.kind, h.dead, h.starts, h.attempts, h.reason, coalesce(h.message_id, ''), h.order_key, h.position,
		coalesce(h.message_id, ''), h.raw_id, h.topic, h.message_key, h.type, h.content_type, h.produced_at, h.headers, h.payload, h.payload IS NULL, h.coordinates
		FROM {s}held_messages h JOIN {s}inbox_consumers c ON c.id = h.consumer_id WHERE h.seq = $1 {pg:FOR UPDATE OF h}`
	// The key's first message alone may be due; nothing of a key is due while an earlier
	// one is dead. Where a dead one does not block (AfterDead: Continue), the runner's
	// own repair makes the next one due within seconds.
	sqlUnDue  = `UPDATE {s}held_messages SET due_at = NULL WHERE consumer_id = $1 AND order_key = $2 AND position > $3 AND due_at IS NOT NULL`
	sqlRevive = `UPDATE {s}held_messages SET dead = false, attempts = 0, starts = 0, tx_mark = NULL, reason = $2, updated_at = {now},
		due_at = CASE WHEN {bytes:$3} IS NULL OR NOT EXISTS (SELECT 1 FROM {s}held_messages e WHERE e.consumer_id = $4 AND e.order_key = $3 AND e.position < $5)
			THEN {now} ELSE NULL END
		WHERE seq = $1`
	sqlDeleteHeld = `DELETE FROM {s}held_messages WHERE seq = $1`
	sqlAudit      = `INSERT INTO {s}twiceproof_audit (at, actor, action, consumer, seq, message_id, new_message_id, reason) VALUES ({now}, $1, $2, $3, $4, $5, $6, $7)`
	sqlNewClaim   = `INSERT INTO {s}processed_messages (processed_at, consumer_id, message_id, fp, state) VALUES ({now}, $1, $2, $3, 1) ON CONFLICT DO NOTHING`
	sqlReplace    = `INSERT INTO {s}held_messages (position, consumer_id, kind, dead, attempts, starts, reason, message_id, raw_id, fp, order_key,
		coordinates, topic, message_key, type, content_type, produced_at, headers, payload, held_at, updated_at, edited_from, due_at)
		VALUES ($1, $2, 0, false, 0, 0, 'retry', $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, {now}, {now}, $15,
		CASE WHEN {bytes:$6} IS NULL OR NOT EXISTS (SELECT 1 FROM {s}held_messages e WHERE e.consumer_id = $2 AND e.order_key = $6 AND e.position < $1)
			THEN {now} ELSE NULL END)`
)

// locked is a held message that this transaction has locked, and its key with it.
type locked struct {
	Choice
	consumer    int16
	name        string
	kind        int
	reason      string
	id          string
	orderKey    []byte
	position    int64
	coordinates string
	message     *brokers.Message
}

// lock locks a held message, and then its key, in the consumers' own order. One that
// runs now is waited for.
func (o *Operator) lock(ctx context.Context, q sqldb.Q, c Choice) (l locked, err error) {
	var raw, topic, mkey, typ, ct, headers, payload []byte
	var at *string
	var noPayload bool
	var id string
	found, err := sqldb.QueryRow(ctx, q, o.e.sql(sqlLockHeld), []any{c.Seq}, &l.consumer, &l.name, &l.kind, &l.Dead, &l.Starts, &l.Attempts, &l.reason, &l.id,
		&l.orderKey, &l.position, &id, &raw, &topic, &mkey, &typ, &ct, &at, &headers, &payload, &noPayload, &l.coordinates)
	switch {
	case err != nil:
		return l, err
	case !found:
		return l, ErrNotHeld
	}
	l.Seq = c.Seq
	if l.Choice != c {
		return l, ErrChanged
	}
	if err := o.e.lockKey(ctx, q, l.consumer, l.orderKey); err != nil {
		return l, err
	}
	l.message, err = message(id, raw, topic, mkey, typ, ct, at, headers, payload, noPayload)
	return l, err
}

func (o *Operator) change(ctx context.Context, what string, seq int64, by By, fn func(q sqldb.Q) error) error {
	if by.Actor == "" {
		return fmt.Errorf("%s: By.Actor is empty: say who does it, for the audit", what)
	}
	const tries = 10
	for n := 1; ; n++ {
		err := o.inTx(ctx, fn)
		if (Rerun(err) || sqldb.Busy(err)) && n < tries && ctx.Err() == nil {
			continue
		}
		if err != nil {
			return fmt.Errorf("%s held message %d: %w", what, seq, unreadable(err))
		}
		return nil
	}
}

func (o *Operator) audit(ctx context.Context, q sqldb.Q, by By, action string, l locked, newID any, reason string) error {
	_, err := q.Exec(ctx, o.e.sql(sqlAudit), text(by.Actor), action, l.name, l.Seq, orNil(l.id), newID, orNil(text(reason)))
	return err
}

// Replay makes a chosen message run again from its first attempt, as soon as its turn
// in its key comes. Its ID stays, so that what was done under it before stays done
// once. A message that runs right now is waited for. Errors: ErrNotHeld, ErrChanged
// (it was replayed already, or has run since it was chosen) and ErrNotReplayable; then
// nothing is changed. A replayed message may run beside later ones of its key that are
// in hand already where AfterDead is Continue.
func (o *Operator) Replay(ctx context.Context, c Choice, by By) error {
	return o.change(ctx, actionReplay, c.Seq, by, func(q sqldb.Q) error {
		l, err := o.lock(ctx, q, c)
		if err != nil {
			return err
		}
		if l.kind != kindOrdinary {
			return ErrNotReplayable
		}
		if err := o.passTurn(ctx, q, l); err != nil {
			return err
		}
		if _, err := q.Exec(ctx, o.e.sql(sqlRevive), l.Seq, ReasonRetry, l.orderKey, l.consumer, l.position); err != nil {
			return err
		}
		return o.audit(ctx, q, by, actionReplay, l, nil, by.Reason)
	})
}

// passTurn takes the turn from messages of the key that come after this one.
func (o *Operator) passTurn(ctx context.Context, q sqldb.Q, l locked) error {
	if l.orderKey == nil {
		return nil
	}
	_, err := q.Exec(ctx, o.e.sql(sqlUnDue), l.consumer, l.orderKey, l.position)
	return err
}

// Discard ends a held message unprocessed, with the reason: its claim stays, so that a
// redelivery is a duplicate, and the next message of its key goes on. Of a conflict,
// the claim is that of the content which was processed, and is left alone. Errors:
// ErrNotHeld, ErrChanged.
func (o *Operator) Discard(ctx context.Context, c Choice, by By) error {
	if by.Reason == "" {
		return errors.New("discard: By.Reason is empty: say why, for the audit and the inbox")
	}
	return o.change(ctx, actionDiscard, c.Seq, by, func(q sqldb.Q) error {
		l, err := o.lock(ctx, q, c)
		if err != nil {
			return err
		}
		if err := o.remove(ctx, q, l, "discarded: "+by.Reason); err != nil {
			return err
		}
		if l.orderKey != nil {
			// Where dead ones block, the first that is left; where they do not, it is due already.
			if _, err := q.Exec(ctx, o.e.sql(sqlNextDue), l.consumer, l.orderKey, false); err != nil {
				return err
			}
		}
		return o.audit(ctx, q, by, actionDiscard, l, nil, by.Reason)
	})
}

// remove deletes a held message and settles its claim as discarded.
func (o *Operator) remove(ctx context.Context, q sqldb.Q, l locked, reason string) error {
	if l.kind == kindOrdinary {
		n, err := q.Exec(ctx, o.e.sql(sqlSetState), l.consumer, l.id, stateDiscarded, text(reason))
		if err == nil && n == 0 {
			_, err = q.Exec(ctx, o.e.sql(sqlInsertFinal), l.consumer, l.id, Fingerprint(l.message), stateDiscarded, text(reason))
		}
		if err != nil {
			return err
		}
	}
	_, err := q.Exec(ctx, o.e.sql(sqlDeleteHeld), l.Seq)
	return err
}

// Edit replaces a held message by m, which keeps its place in its key and runs as soon
// as its turn comes. m needs an ID of its own, other than the old one's: the old ID is
// discarded ("replaced by …"), so that a redelivery of the broken message is a
// duplicate. Of a conflict the old ID's claim is left alone. An empty Topic, Key, Type,
// ContentType or Time of m is taken from the old message, Headers if they are nil; the
// payload is m's. Errors: ErrNotHeld, ErrChanged, ErrIDTaken, ErrNoID, ErrBadID.
func (o *Operator) Edit(ctx context.Context, c Choice, m *brokers.Message, by By) (seq int64, err error) {
	id, err := StoredID(m.ID)
	if err != nil {
		return 0, fmt.Errorf("edit held message %d: %w", c.Seq, err)
	}
	err = o.change(ctx, actionEdit, c.Seq, by, func(q sqldb.Q) error {
		l, err := o.lock(ctx, q, c)
		if err != nil {
			return err
		}
		edited := merge(m, l.message)
		if l.id == id {
			return fmt.Errorf("%w: %q is the old message's: give it another one, for example with a suffix", ErrIDTaken, m.ID)
		}
		if l.orderKey != nil && edited.Key != l.message.Key {
			return fmt.Errorf("the key cannot be changed from %q to %q: its place is in its key; discard it and publish another message", l.message.Key, edited.Key)
		}
		fp := Fingerprint(edited)
		n, err := q.Exec(ctx, o.e.sql(sqlNewClaim), l.consumer, id, fp)
		if err != nil {
			return err
		}
		if n == 0 {
			return fmt.Errorf("%w by consumer %q: %q", ErrIDTaken, l.name, m.ID)
		}
		if err := o.passTurn(ctx, q, l); err != nil {
			return err
		}
		if err := o.remove(ctx, q, l, "replaced by "+m.ID); err != nil {
			return err
		}
		var raw []byte
		if id != m.ID {
			raw = []byte(m.ID)
		}
		old := l.id
		if old == "" {
			old = text(l.message.ID)
		}
		_, err = q.Exec(ctx, o.e.sql(sqlReplace), l.position, l.consumer, id, raw, fp, l.orderKey, text(l.coordinates), []byte(edited.Topic),
			bytesOrNil(edited.Key), []byte(edited.Type), []byte(edited.ContentType), msgcodec.Time(edited.Time), msgcodec.Headers(edited.Headers), edited.Payload, orNil(old))
		if err != nil {
			return err
		}
		if _, err := sqldb.QueryRow(ctx, q, o.e.sql(`SELECT seq FROM {s}held_messages WHERE consumer_id = $1 AND message_id = $2 AND kind = 0`), []any{l.consumer, id}, &seq); err != nil {
			return err
		}
		return o.audit(ctx, q, by, actionEdit, l, id, by.Reason)
	})
	return seq, err
}

// merge fills what m leaves open from the old message.
func merge(m, old *brokers.Message) *brokers.Message {
	e := m.Clone()
	for _, f := range []struct{ to, from *string }{{&e.Topic, &old.Topic}, {&e.Key, &old.Key}, {&e.Type, &old.Type}, {&e.ContentType, &old.ContentType}} {
		if *f.to == "" {
			*f.to = *f.from
		}
	}
	if e.Time.IsZero() {
		e.Time = old.Time
	}
	if e.Headers == nil {
		e.Headers = old.Headers
	}
	return e
}
