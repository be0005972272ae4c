package inbox

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/internal/sqldb"
)

// Operator is what a person, or a program on a person's behalf, does to held
// messages: look at them, run them again, discard them, or replace one by a mended
// copy. Consumers may run meanwhile. Each change is one transaction that also writes
// a row of twiceproof_audit, so that an interrupted command has done a number of whole
// changes and nothing else: the end of a context ends the wait for a message that runs,
// but no transaction that has begun. It is safe for concurrent use.
type Operator struct {
	e    *engine
	q    sqldb.Q
	inTx func(ctx context.Context, fn func(q sqldb.Q) error) error
}

// Operator returns the operator of the store's database.
func (s *PostgresStore) Operator() *Operator {
	return &Operator{s.e, sqldb.Pgx(s.pool), func(ctx context.Context, fn func(sqldb.Q) error) error {
		return s.inTx(ctx, func(tx pgx.Tx) error { return fn(sqldb.Pgx(tx)) })
	}}
}

// Operator returns the operator of the store's database.
func (s *SQLStore) Operator() *Operator {
	return &Operator{s.e, sqldb.SQL(s.db), func(ctx context.Context, fn func(sqldb.Q) error) error {
		return s.inTx(ctx, func(tx *sql.Tx) error { return fn(sqldb.SQL(tx)) })
	}}
}

// Errors of an Operator.
var (
	// ErrNotHeld: there is no such held message; it may have been processed meanwhile.
	ErrNotHeld = errors.New("no such held message: it was processed, discarded or replaced meanwhile, or never was")
	// ErrChanged: it is not as it was when it was chosen.
	ErrChanged = errors.New("the held message has changed since it was chosen")
	// ErrRunning: it has been running for longer than it was waited for.
	ErrRunning = errors.New("the held message runs now; try again when its run is over")
	// ErrNotReplayable: a conflict or a message without a usable ID cannot be run as it is.
	ErrNotReplayable = errors.New("it cannot be run as it is: edit it, which gives it an ID of its own, or discard it")
	// ErrIDTaken: an edit's new ID was used before.
	ErrIDTaken = errors.New("the new message ID was used before")
)

// HeldFilter chooses held messages. The zero value chooses all.
type HeldFilter struct {
	Consumer string
	// Reason is one of the Reason constants; Class the class of the last error.
	Reason, Class string
	// ID is the message's ID. Key its key, nil for any.
	ID  string
	Key *string
	// Dead chooses dead ones (true) or those that wait (false); nil both.
	Dead *bool
	// OlderThan and NewerThan bound how long ago it was held; 0 is no bound.
	OlderThan, NewerThan time.Duration
	// Seqs chooses by number.
	Seqs []int64
	// After continues a list behind a number, Max bounds it; 0 is no bound.
	After int64
	Max   int
}

func (f HeldFilter) where() (string, []any) {
	var conds []string
	var args []any
	add := func(cond string, arg any) {
		args = append(args, arg)
		conds = append(conds, strings.ReplaceAll(cond, "$?", fmt.Sprintf("$%d", len(args))))
	}
	if f.Consumer != "" {
		add("c.name = $?", f.Consumer)
	}
	if f.Reason != "" {
		add("h.reason = $?", f.Reason)
	}
	if f.Class != "" {
		add("h.last_error_class = $?", f.Class)
	}
	if f.ID != "" {
		if stored, err := StoredID(f.ID); err == nil {
			add("h.message_id = $?", stored)
		} else {
			add("h.raw_id = $?", []byte(f.ID))
		}
	}
	switch {
	case f.Key != nil && *f.Key == "":
		conds = append(conds, "h.message_key IS NULL")
	case f.Key != nil:
		add("h.message_key = $?", []byte(*f.Key))
	}
	if f.Dead != nil {
		add("h.dead = $?", *f.Dead)
	}
	if f.OlderThan > 0 {
		add("{age:h.held_at} >= $?", f.OlderThan.Microseconds())
	}
	if f.NewerThan > 0 {
		add("{age:h.held_at} < $?", f.NewerThan.Microseconds())
	}
	if f.After != 0 {
		add("h.seq > $?", f.After)
	}
	if f.Seqs != nil {
		// One parameter, whatever their number: every database has a limit of those.
		list, _ := json.Marshal(f.Seqs) // integers
		add("h.seq IN (SELECT {pg:value::bigint FROM json_array_elements_text($?::text::json)}{lite:value FROM json_each($?)})", string(list))
	}
	if len(conds) == 0 {
		return "", args
	}
	return " WHERE " + strings.Join(conds, " AND "), args
}

// HeldMessage is one held message.
type HeldMessage struct {
	Seq      int64 // its number
	Consumer string
	Reason   string
	Dead     bool
	// Attempts is the number of failed runs, Starts of begun ones.
	Attempts, Starts int
	// Waiting: it is not its turn; an earlier message of its key comes first.
	Waiting bool
	// DueIn is when it runs, negative if it should have; meaningless if Dead or Waiting.
	DueIn time.Duration
	// HeldFor is how long it has been held.
	HeldFor time.Duration
	// First and Last are why its first and its last run failed; Last has the stack.
	First, Last Failure
	// Message is the whole message, byte for byte as the consumer received it.
	Message     *brokers.Message
	Coordinates string
	// Fingerprint is that of Message; ProcessedFingerprint, of a conflict, is that of
	// the content which was processed under its ID before.
	Fingerprint, ProcessedFingerprint []byte
	// EditedFrom is the ID of the message that this one replaces.
	EditedFrom string
}

const sqlListHeld = `SELECT h.seq, c.name, h.reason, h.dead, h.attempts, h.starts, h.due_at IS NULL, coalesce(-{age:h.due_at}, 0), {age:h.held_at},
	coalesce(h.first_error_class, ''), coalesce(h.first_error, ''), coalesce(h.last_error_class, ''), coalesce(h.last_error, ''), coalesce(h.last_stack, ''),
	coalesce(h.message_id, ''), h.raw_id, h.topic, h.message_key, h.type, h.content_type, h.produced_at, h.headers, h.payload, h.payload IS NULL,
	h.coordinates, h.fp, coalesce(h.first_fp, (SELECT p.fp FROM {s}processed_messages p WHERE h.kind = 1 AND p.consumer_id = h.consumer_id AND p.message_id = h.message_id)),
	coalesce(h.edited_from, '')
	FROM {s}held_messages h JOIN {s}inbox_consumers c ON c.id = h.consumer_id`

// List returns the held messages of a filter in the order in which they were held.
func (o *Operator) List(ctx context.Context, f HeldFilter) ([]HeldMessage, error) {
	where, args := f.where()
	q := sqlListHeld + where + " ORDER BY h.seq"
	if f.Max > 0 {
		q += fmt.Sprintf(" LIMIT %d", f.Max)
	}
	var out []HeldMessage
	err := o.q.Query(ctx, o.e.dialect.SQL(q, o.e.schema), args, func(scan func(...any) error) error {
		h, err := scanHeld(scan)
		out = append(out, h)
		return err
	})
	if err != nil {
		return nil, unreadable(err)
	}
	return out, nil
}

func scanHeld(scan func(...any) error) (h HeldMessage, err error) {
	var due, held int64
	var id string
	var raw, topic, key, typ, ct, headers, payload []byte
	var at *string
	var noPayload bool
	err = scan(&h.Seq, &h.Consumer, &h.Reason, &h.Dead, &h.Attempts, &h.Starts, &h.Waiting, &due, &held,
		&h.First.Class, &h.First.Text, &h.Last.Class, &h.Last.Text, &h.Last.Stack,
		&id, &raw, &topic, &key, &typ, &ct, &at, &headers, &payload, &noPayload,
		&h.Coordinates, &h.Fingerprint, &h.ProcessedFingerprint, &h.EditedFrom)
	if err != nil {
		return h, err
	}
	h.Waiting = h.Waiting && !h.Dead
	h.DueIn, h.HeldFor = time.Duration(due)*time.Microsecond, time.Duration(held)*time.Microsecond
	h.Message, err = message(id, raw, topic, key, typ, ct, at, headers, payload, noPayload)
	return h, err
}

// Get returns one held message: ErrNotHeld where there is none.
func (o *Operator) Get(ctx context.Context, seq int64) (HeldMessage, error) {
	hs, err := o.List(ctx, HeldFilter{Seqs: []int64{seq}})
	if err != nil || len(hs) == 1 {
		return append(hs, HeldMessage{})[0], err
	}
	return HeldMessage{}, fmt.Errorf("held message %d: %w", seq, ErrNotHeld)
}

// HeldGroup is held messages that failed alike.
type HeldGroup struct {
	Consumer, Reason, Class string
	// Error is the beginning of the last error, which they share.
	Error string
	Dead  bool
	Count int
	// Oldest is how long the first of them has been held.
	Oldest time.Duration
	// First is the number of the first, for an example.
	First int64
}

// Groups counts the held messages of a filter by consumer, reason and error, the
// largest group first.
func (o *Operator) Groups(ctx context.Context, f HeldFilter) ([]HeldGroup, error) {
	where, args := f.where()
	const text = `coalesce(substr(h.last_error, 1, 200), '')`
	q := `SELECT c.name, h.reason, coalesce(h.last_error_class, ''), ` + text + `, h.dead, count(*), max({age:h.held_at}), min(h.seq)
		FROM {s}held_messages h JOIN {s}inbox_consumers c ON c.id = h.consumer_id` + where +
		` GROUP BY c.name, h.reason, coalesce(h.last_error_class, ''), ` + text + `, h.dead ORDER BY count(*) DESC, c.name, h.reason, min(h.seq)`
	if f.Max > 0 {
		q += fmt.Sprintf(" LIMIT %d", f.Max)
	}
	var gs []HeldGroup
	err := o.q.Query(ctx, o.e.dialect.SQL(q, o.e.schema), args, func(scan func(...any) error) error {
		var g HeldGroup
		var oldest int64
		err := scan(&g.Consumer, &g.Reason, &g.Class, &g.Error, &g.Dead, &g.Count, &oldest, &g.First)
		g.Oldest = time.Duration(oldest) * time.Microsecond
		gs = append(gs, g)
		return err
	})
	if err != nil {
		return nil, unreadable(err)
	}
	return gs, nil
}

// Choice is a held message as it was when it was chosen. A change of a choice does
// nothing to one that has changed since.
type Choice struct {
	Seq int64 // its number

	starts  int
	dead    bool
	changed int64 // when it last was, in microseconds: runs and failures alone may come to the same numbers again
}

// Choose freezes the list of what a filter finds now: what is held later is not in it.
func (o *Operator) Choose(ctx context.Context, f HeldFilter) ([]Choice, error) {
	where, args := f.where()
	q := `SELECT h.seq, h.starts, h.dead, {micros:h.updated_at} FROM {s}held_messages h JOIN {s}inbox_consumers c ON c.id = h.consumer_id` + where + ` ORDER BY h.position`
	if f.Max > 0 {
		q += fmt.Sprintf(" LIMIT %d", f.Max)
	}
	var cs []Choice
	err := o.q.Query(ctx, o.e.dialect.SQL(q, o.e.schema), args, func(scan func(...any) error) error {
		var c Choice
		err := scan(&c.Seq, &c.starts, &c.dead, &c.changed)
		cs = append(cs, c)
		return err
	})
	if err != nil {
		return nil, unreadable(err)
	}
	return cs, nil
}

// unreadable says what to do about tables that cannot be used.
func unreadable(err error) error {
	switch sqldb.State(err) {
	case "":
		return err
	case sqldb.UndefinedTable, sqldb.UndefinedColumn, sqldb.InvalidSchemaName:
		return fmt.Errorf("the tables are missing or old; run `twiceproof migrate up`: %w", err)
	case "42501":
		return fmt.Errorf("the database refuses access: held messages need SELECT, UPDATE and DELETE on held_messages and processed_messages, and INSERT on processed_messages and twiceproof_audit: %w", err)
	case "25006":
		return fmt.Errorf("the database is read-only; connect to the primary: %w", err)
	}
	return err
}
