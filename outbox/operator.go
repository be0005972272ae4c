package outbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/internal/msgcodec"
	"github.com/twiceproof/twiceproof/internal/sqldb"
)

// Operator is what a person does to parked messages: those that the broker refused too
// often, or for good. Each change is one transaction that also writes a row of
// twiceproof_audit. Relays may run meanwhile. It is safe for concurrent use.
type Operator struct{ q queue }

// Operator returns the operator of the outbox.
func (o *PostgresOutbox) Operator() *Operator { return &Operator{o.queue} }

// Operator returns the operator of the outbox.
func (o *SQLOutbox) Operator() *Operator { return &Operator{o.queue} }

// ErrNotParked: there is no such parked message.
var ErrNotParked = errors.New("no such parked message: it was retried or discarded meanwhile, or never was")

// ParkedFilter chooses parked messages. The zero value chooses all.
type ParkedFilter struct {
	Topic, ID string
	// OlderThan is how long ago it was enqueued, at least.
	OlderThan time.Duration
	// Seqs chooses by number; nil any.
	Seqs []int64
	// After continues a list behind a number, Max bounds it; 0 is no bound.
	After int64
	Max   int
}

// ParkedMessage is one parked message.
type ParkedMessage struct {
	Seq      int64
	Attempts int
	Age      time.Duration // since it was enqueued
	Error    string        // the last refusal
	// Behind is the number of messages of its key that wait for it.
	Behind  int
	Message *brokers.Message
}

func (f ParkedFilter) where() (string, []any) {
	cond := "m.parked AND m.published_at IS NULL"
	var args []any
	add := func(c string, arg any) {
		args = append(args, arg)
		cond += " AND " + strings.ReplaceAll(c, "$?", fmt.Sprintf("$%d", len(args)))
	}
	if f.Topic != "" {
		add("m.topic = $?", []byte(f.Topic))
	}
	if f.ID != "" {
		add("m.message_id = $?", f.ID)
	}
	if f.OlderThan > 0 {
		add("{age:m.created_at} >= $?", f.OlderThan.Microseconds())
	}
	if f.After != 0 {
		add("m.seq > $?", f.After)
	}
	if f.Seqs != nil {
		// One parameter, whatever their number: every database has a limit of those.
		list, _ := json.Marshal(f.Seqs) // integers
		add("m.seq IN (SELECT {pg:value::bigint FROM json_array_elements_text($?::text::json)}{lite:value FROM json_each($?)})", string(list))
	}
	return cond, args
}

// List returns the parked messages of a filter in the order in which they were
// enqueued.
func (o *Operator) List(ctx context.Context, f ParkedFilter) ([]ParkedMessage, error) {
	where, args := f.where()
	limit := ""
	if f.Max > 0 {
		limit = fmt.Sprintf(" LIMIT %d", f.Max)
	}
	// What waits is counted for all of them in one pass: there is no index by key.
	q := `WITH p AS MATERIALIZED (SELECT m.seq, m.message_key FROM {s}outbox_messages m WHERE ` + where + ` ORDER BY m.seq` + limit + `),
		n AS MATERIALIZED (SELECT p.seq, count(b.seq) AS behind FROM p LEFT JOIN {s}outbox_messages b
			ON b.message_key = p.message_key AND b.published_at IS NULL AND b.seq > p.seq GROUP BY p.seq)
		SELECT m.seq, m.attempts, {age:m.created_at}, coalesce(m.last_error, ''), m.message_id, m.topic, m.message_key, m.type, m.content_type,
		m.produced_at, m.headers, m.payload, m.payload IS NULL, n.behind FROM n JOIN {s}outbox_messages m ON m.seq = n.seq ORDER BY m.seq`
	var ps []ParkedMessage
	err := o.q.one.Query(ctx, o.q.sql(q), args, func(scan func(...any) error) error {
		p := ParkedMessage{Message: &brokers.Message{}}
		m := p.Message
		var age int64
		var topic, key, typ, ct, headers, payload []byte
		var at *string
		var noPayload bool
		if err := scan(&p.Seq, &p.Attempts, &age, &p.Error, &m.ID, &topic, &key, &typ, &ct, &at, &headers, &payload, &noPayload, &p.Behind); err != nil {
			return err
		}
		p.Age = time.Duration(age) * time.Microsecond
		m.Topic, m.Key, m.Type, m.ContentType, m.Time = string(topic), string(key), string(typ), string(ct), msgcodec.ParseTime(at)
		if m.Payload = payload; !noPayload && payload == nil {
			m.Payload = []byte{}
		}
		var err error
		m.Headers, err = msgcodec.ParseHeaders(headers)
		ps = append(ps, p)
		return err
	})
	return ps, refused(err)
}

// refused says what to do about an error of the database.
func refused(err error) error {
	switch sqldb.State(err) {
	case sqldb.UndefinedTable, sqldb.UndefinedColumn, sqldb.InvalidSchemaName:
		return fmt.Errorf("the tables are missing or old; run `twiceproof migrate up`: %w", err)
	case "42501":
		return fmt.Errorf("the database refuses access: parked messages need SELECT, UPDATE and DELETE on outbox_messages, and INSERT on twiceproof_audit: %w", err)
	case "25006":
		return fmt.Errorf("the database is read-only; connect to the primary: %w", err)
	}
	return err
}

// Get returns one parked message: ErrNotParked where there is none.
func (o *Operator) Get(ctx context.Context, seq int64) (ParkedMessage, error) {
	ps, err := o.List(ctx, ParkedFilter{Seqs: []int64{seq}})
	if err != nil || len(ps) == 1 {
		return append(ps, ParkedMessage{})[0], err
	}
	return ParkedMessage{}, fmt.Errorf("outbox message %d: %w", seq, ErrNotParked)
}

const (
	sqlUnpark      = `UPDATE {s}outbox_messages SET parked = false, attempts = 0, next_at = NULL WHERE seq = $1 AND parked AND published_at IS NULL`
	sqlDropParked  = `DELETE FROM {s}outbox_messages WHERE seq = $1 AND parked AND published_at IS NULL`
	sqlAuditOutbox = `INSERT INTO {s}twiceproof_audit (at, actor, action, seq, message_id, reason) VALUES ({now}, $1, $2, $3, $4, $5)`
)

// Retry lets relays publish a parked message again, from its first attempt and with its
// ID; what waits behind it in its key follows. ErrNotParked where there is none.
func (o *Operator) Retry(ctx context.Context, seq int64, actor, reason string) error {
	err := o.change(ctx, "outbox-retry", sqlUnpark, seq, actor, reason)
	if err == nil {
		o.q.Nudge()
	}
	return err
}

// Discard deletes a parked message unpublished; what waits behind it in its key goes
// on. ErrNotParked where there is none.
func (o *Operator) Discard(ctx context.Context, seq int64, actor, reason string) error {
	if reason == "" {
		return errors.New("discard: the reason is empty: say why, for the audit")
	}
	return o.change(ctx, "outbox-discard", sqlDropParked, seq, actor, reason)
}

func (o *Operator) change(ctx context.Context, action, text string, seq int64, actor, reason string) error {
	if actor == "" {
		return fmt.Errorf("%s: the actor is empty: say who does it, for the audit", action)
	}
	err := o.q.tx(ctx, func(q sqldb.Q) error {
		var id string
		found, err := sqldb.QueryRow(ctx, q, o.q.sql(`SELECT message_id FROM {s}outbox_messages WHERE seq = $1 AND parked {pg:FOR UPDATE}`), []any{seq}, &id)
		if err != nil {
			return err
		}
		n, err := q.Exec(ctx, o.q.sql(text), seq)
		if err == nil && (n == 0 || !found) {
			err = ErrNotParked
		}
		if err != nil {
			return err
		}
		_, err = q.Exec(ctx, o.q.sql(sqlAuditOutbox), clean(actor), action, seq, id, clean(reason))
		return err
	})
	if err != nil {
		return fmt.Errorf("%s of outbox message %d: %w", action, seq, refused(err))
	}
	return nil
}
