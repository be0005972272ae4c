package inbox

import (
	"context"
	"errors"
	"fmt"
	"time"

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
	sqlKeyOfHeld = `SELECT consumer_id, kind, order_key, message_key FROM {s}held_messages WHERE seq = $1`
	sqlLockHeld  = `SELECT c.name, h.dead, h.starts, h.reason, coalesce(h.message_id, ''), h.position, {micros:h.updated_at},
		h.raw_id, h.topic, h.message_key, h.type, h.content_type, h.produced_at, h.headers, h.payload, h.payload IS NULL, h.coordinates
		FROM {s}held_messages h JOIN {s}inbox_consumers c ON c.id = h.consumer_id WHERE h.seq = $1 {pg:FOR UPDATE OF h NOWAIT}`
	sqlRevive = `UPDATE {s}held_messages SET dead = false, attempts = 0, starts = 0, tx_mark = NULL, reason = 'retry', updated_at = {now},
		due_at = CASE WHEN order_key IS NULL THEN {now} ELSE due_at END WHERE seq = $1`
	sqlDeleteHeld     = `DELETE FROM {s}held_messages WHERE seq = $1`
	sqlAudit          = `INSERT INTO {s}twiceproof_audit (at, actor, action, consumer, seq, message_id, new_message_id, reason) VALUES ({now}, $1, $2, $3, $4, $5, $6, $7)`
	sqlNewClaim       = `INSERT INTO {s}processed_messages (processed_at, consumer_id, message_id, fp, state) VALUES ({now}, $1, $2, $3, 1) ON CONFLICT DO NOTHING`
	sqlSetFingerprint = `UPDATE {s}processed_messages SET fp = $3 WHERE consumer_id = $1 AND message_id = $2`
	sqlReplace        = `INSERT INTO {s}held_messages (position, consumer_id, kind, dead, attempts, starts, reason, message_id, raw_id, fp, order_key,
		coordinates, topic, message_key, type, content_type, produced_at, headers, payload, held_at, updated_at, edited_from, due_at)
		VALUES ($1, $2, 0, false, 0, 0, 'retry', $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, {now}, {now}, $15,
		CASE WHEN {bytes:$6} IS NULL THEN {now} ELSE NULL END) RETURNING seq`
)

// How long a message that runs now is waited for, and how often it is looked at. It is
// not waited for in the database: the run's own transaction needs the lock of the key
// at its end.
const (
	runWait     = time.Minute
	runPoll     = 5 * time.Millisecond
	runPollMost = 500 * time.Millisecond
)

// locked is a held message that this transaction has locked, and its key with it.
type locked struct {
	Choice
	consumer    int16
	name        string
	kind        int
	reason      string
	id          string
	orderKey    []byte // the one that it has, or that its edited copy gets
	position    int64
	coordinates string
	message     *brokers.Message
	continues   bool // the key goes on behind a dead message: AfterDead is Continue
}

// find reads what never changes of a held message, without a lock.
func (o *Operator) find(ctx context.Context, q sqldb.Q, c Choice) (l locked, err error) {
	var key []byte
	found, err := sqldb.QueryRow(ctx, q, o.e.sql(sqlKeyOfHeld), []any{c.Seq}, &l.consumer, &l.kind, &l.orderKey, &key)
	if err == nil && !found {
		err = ErrNotHeld
	}
	if l.kind != kindOrdinary {
		// It waits for nobody and nobody for it; its edited copy is a message like any other.
		l.orderKey = OrderKey(string(key))
	}
	return l, err
}

// lock locks the key of a held message, and then the message. ErrRunning: it runs now.
//
// The order is what keeps consumers and operators out of each other's way. A run has
// its row locked from its beginning and takes the key at its end, so whoever has the
// key must not wait for a row.
func (o *Operator) lock(ctx context.Context, q sqldb.Q, c Choice, l *locked) (err error) {
	if err := o.e.lockKey(ctx, q, l.consumer, l.orderKey); err != nil {
		return err
	}
	var raw, topic, mkey, typ, ct, headers, payload []byte
	var at *string
	var noPayload bool
	l.Seq = c.Seq
	found, err := sqldb.QueryRow(ctx, q, o.e.sql(sqlLockHeld), []any{c.Seq}, &l.name, &l.dead, &l.starts, &l.reason, &l.id, &l.position, &l.changed,
		&raw, &topic, &mkey, &typ, &ct, &at, &headers, &payload, &noPayload, &l.coordinates)
	switch {
	case sqldb.State(err) == sqldb.LockNotAvailable:
		return ErrRunning
	case err != nil:
		return err
	case !found:
		return ErrNotHeld
	case l.Choice != c:
		return ErrChanged
	}
	if l.message, err = message(l.id, raw, topic, mkey, typ, ct, at, headers, payload, noPayload); err != nil {
		return err
	}
	l.continues, err = o.e.continues(ctx, q, l.consumer, l.orderKey)
	return err
}

// changeTimeout bounds one transaction of an operator, which the end of the caller's
// context does not interrupt: with its commit on the way nobody could say whether it
// was done.
const changeTimeout = 30 * time.Second

func (o *Operator) once(ctx context.Context, fn func(ctx context.Context, q sqldb.Q) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), changeTimeout)
	defer cancel()
	return o.inTx(ctx, func(q sqldb.Q) error { return fn(ctx, q) })
}

func (o *Operator) change(ctx context.Context, what string, seq int64, by By, fn func(ctx context.Context, q sqldb.Q) error) error {
	if by.Actor == "" {
		return fmt.Errorf("%s: By.Actor is empty: say who does it, for the audit", what)
	}
	begun, pause := time.Now(), runPoll
	const tries = 10
	for n := 1; ; {
		err := o.once(ctx, fn)
		switch {
		case errors.Is(err, ErrRunning) && time.Since(begun) < runWait:
			if !sleep(ctx, pause) {
				return fmt.Errorf("%s held message %d: %w", what, seq, errors.Join(ctx.Err(), err))
			}
			pause = min(2*pause, runPollMost)
		case (Rerun(err) || sqldb.Busy(err)) && n < tries && sleep(ctx, runPoll):
			n++
		case err != nil:
			return fmt.Errorf("%s held message %d: %w", what, seq, unreadable(err))
		default:
			return nil
		}
	}
}

func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

func (o *Operator) audit(ctx context.Context, q sqldb.Q, by By, action string, l locked, newID any, reason string) error {
	_, err := q.Exec(ctx, o.e.sql(sqlAudit), text(by.Actor), action, l.name, l.Seq, orNil(l.id), newID, orNil(text(reason)))
	return err
}

// Replay makes a chosen message run again from its first attempt, as soon as its turn
// in its key comes. Its ID stays, so that what was done under it before stays done
// once. A message that runs right now is waited for, for a minute at most
// (ErrRunning). Errors: ErrNotHeld, ErrChanged (it was replayed already, or has run
// since it was chosen) and ErrNotReplayable; then nothing is changed. A replayed
// message may run beside later ones of its key that are in hand already where AfterDead
// is Continue.
func (o *Operator) Replay(ctx context.Context, c Choice, by By) error {
	return o.change(ctx, actionReplay, c.Seq, by, func(ctx context.Context, q sqldb.Q) error {
		l, err := o.find(ctx, q, c)
		if err != nil {
			return err
		}
		if l.kind != kindOrdinary {
			return ErrNotReplayable
		}
		if err := o.lock(ctx, q, c, &l); err != nil {
			return err
		}
		if _, err := q.Exec(ctx, o.e.sql(sqlRevive), l.Seq); err != nil {
			return err
		}
		if err := o.e.restoreHead(ctx, q, l.consumer, l.orderKey, l.continues); err != nil {
			return err
		}
		return o.audit(ctx, q, by, actionReplay, l, nil, by.Reason)
	})
}

// Discard ends a held message unprocessed, with the reason: its claim stays, so that a
// redelivery is a duplicate, and the next message of its key goes on. Of a conflict,
// the claim is that of the content which was processed, and is left alone. A message
// that runs right now is waited for. Errors: ErrNotHeld, ErrChanged, ErrRunning.
func (o *Operator) Discard(ctx context.Context, c Choice, by By) error {
	if by.Reason == "" {
		return errors.New("discard: By.Reason is empty: say why, for the audit and the inbox")
	}
	return o.change(ctx, actionDiscard, c.Seq, by, func(ctx context.Context, q sqldb.Q) error {
		l, err := o.find(ctx, q, c)
		if err != nil {
			return err
		}
		if err := o.lock(ctx, q, c, &l); err != nil {
			return err
		}
		if err := o.remove(ctx, q, l, "discarded: "+by.Reason); err != nil {
			return err
		}
		if l.kind == kindOrdinary {
			if err := o.e.restoreHead(ctx, q, l.consumer, l.orderKey, l.continues); err != nil {
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
// payload is m's. The key cannot be changed. The copy of a conflict, or of a message
// without a usable ID, neither of which ever waited in its key, takes its place there
// among what is held. Errors: ErrNotHeld, ErrChanged, ErrRunning, ErrIDTaken, ErrNoID,
// ErrBadID.
func (o *Operator) Edit(ctx context.Context, c Choice, m *brokers.Message, by By) (seq int64, err error) {
	id, err := StoredID(m.ID)
	if err != nil {
		return 0, fmt.Errorf("edit held message %d: %w", c.Seq, err)
	}
	err = o.change(ctx, actionEdit, c.Seq, by, func(ctx context.Context, q sqldb.Q) error {
		seq, err = o.edit(ctx, q, c, m, id, by)
		return err
	})
	return seq, err
}

func (o *Operator) edit(ctx context.Context, q sqldb.Q, c Choice, m *brokers.Message, id string, by By) (seq int64, err error) {
	l, err := o.find(ctx, q, c)
	if err != nil {
		return 0, err
	}
	// The claim comes before the lock of the key, as it does for a message that a
	// consumer holds. Its fingerprint is known once the old message is.
	n, err := q.Exec(ctx, o.e.sql(sqlNewClaim), l.consumer, id, nil)
	if err != nil {
		return 0, err
	}
	if err := o.lock(ctx, q, c, &l); err != nil {
		return 0, err
	}
	switch {
	case l.id == id:
		return 0, fmt.Errorf("%w: %q is the old message's: give it another one, for example with a suffix", ErrIDTaken, m.ID)
	case n == 0:
		return 0, fmt.Errorf("%w by consumer %q: %q", ErrIDTaken, l.name, m.ID)
	}
	edited := merge(m, l.message)
	if edited.Key != l.message.Key {
		return 0, fmt.Errorf("the key cannot be changed from %q to %q: its place is in its key; discard it and publish another message", l.message.Key, edited.Key)
	}
	fp := Fingerprint(edited)
	if _, err := q.Exec(ctx, o.e.sql(sqlSetFingerprint), l.consumer, id, fp); err != nil {
		return 0, err
	}
	if err := o.remove(ctx, q, l, "replaced by "+m.ID); err != nil {
		return 0, err
	}
	var raw []byte
	if id != m.ID {
		raw = []byte(m.ID)
	}
	old := l.id
	if old == "" {
		old = text(l.message.ID)
	}
	found, err := sqldb.QueryRow(ctx, q, o.e.sql(sqlReplace), []any{l.position, l.consumer, id, raw, fp, l.orderKey, text(l.coordinates), []byte(edited.Topic),
		bytesOrNil(edited.Key), []byte(edited.Type), []byte(edited.ContentType), msgcodec.Time(edited.Time), msgcodec.Headers(edited.Headers), edited.Payload, orNil(old)}, &seq)
	if err == nil && !found {
		err = errors.New("the copy was not stored") // its claim was free, so nothing can be in its way
	}
	if err == nil {
		err = o.e.restoreHead(ctx, q, l.consumer, l.orderKey, l.continues)
	}
	if err != nil {
		return 0, err
	}
	return seq, o.audit(ctx, q, by, actionEdit, l, id, by.Reason)
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
