package inbox

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/twiceproof/twiceproof/internal/sqldb"
)

const sqlTakeHeads = `WITH h AS MATERIALIZED (
	SELECT seq FROM {s}held_messages WHERE consumer_id = $1 AND due_at <= {now} ORDER BY due_at LIMIT $2 {skip}
)
UPDATE {s}held_messages SET starts = starts + 1, due_at = {after:$3}
WHERE seq IN (SELECT seq FROM h)
RETURNING seq, starts, attempts, reason, {age:held_at}, message_id, raw_id, fp, order_key, coordinates,
	topic, message_key, type, content_type, produced_at, headers, payload, payload IS NULL`

// takeHeads marks due heads as started. Only the first message of a key is ever
// due, so sharing them out cannot change an order.
func (e *engine) takeHeads(ctx context.Context, q sqldb.Q, consumer int16, hq HeadQuery) (hs []*Head, err error) {
	args := []any{consumer, hq.Max, hq.Lease.Microseconds()}
	err = q.Query(ctx, e.sql(sqlTakeHeads), args, func(scan func(...any) error) error {
		h, it := &Head{consumer: consumer}, &Item{}
		var age int64
		var topic, key, typ, ct, headers, payload []byte
		var at *string
		var noPayload bool
		err := scan(&h.Seq, &h.Starts, &h.Attempts, &h.Reason, &age, &it.ID, &it.RawID, &it.Fingerprint, &it.OrderKey, &it.Coordinates,
			&topic, &key, &typ, &ct, &at, &headers, &payload, &noPayload)
		if err != nil {
			return err
		}
		h.Age = time.Duration(age) * time.Microsecond
		it.Message, err = message(it.ID, it.RawID, topic, key, typ, ct, at, headers, payload, noPayload)
		h.Item = it
		hs = append(hs, h)
		return err
	})
	if err != nil {
		return nil, err
	}
	return hs, nil
}

const (
	sqlLockHead = `SELECT tx_mark FROM {s}held_messages WHERE seq = $1 AND starts = $2 {lock}`
	sqlMarkHead = `UPDATE {s}held_messages SET tx_mark = 'running' WHERE seq = $1 AND starts = $2`
	// A first one that somebody has locked is left to him: it runs now, beside an earlier
	// one that an operator has put before it, and its run will end. Waiting for it here,
	// with the key locked that it needs at its end, would be a deadlock.
	sqlNextDue = `UPDATE {s}held_messages SET due_at = {now} WHERE seq IN (SELECT seq FROM {s}held_messages
		WHERE seq = (SELECT seq FROM {s}held_messages WHERE consumer_id = $1 AND order_key = $2 AND NOT (dead AND $3) ORDER BY position LIMIT 1)
		AND NOT dead AND due_at IS NULL {skip})`
	sqlDeleteHead = `DELETE FROM {s}held_messages WHERE seq = $1 AND starts = $2`
	// A run that counts as no attempt takes its start back, or it would look like one
	// that died.
	sqlRetryHead = `UPDATE {s}held_messages SET starts = CASE WHEN attempts = $3 THEN starts - 1 ELSE starts END, attempts = $3, reason = $4, dead = $5, tx_mark = NULL, updated_at = {now},
		due_at = CASE WHEN $5 OR ` + sqlOvertaken + ` THEN NULL ELSE {after:$6} END,
		first_error_class = coalesce(first_error_class, $7), first_error = coalesce(first_error, $8),
		last_error_class = $7, last_error = $8, last_stack = $9
		WHERE seq = $1 AND starts = $2`
	sqlReturnHead = `UPDATE {s}held_messages SET starts = starts - 1, tx_mark = NULL, due_at = CASE WHEN ` + sqlOvertaken + ` THEN NULL ELSE {after:$3} END
		WHERE seq = $1 AND starts = $2`
	// An operator has put an earlier message of the key before this one while it ran:
	// it is not the first any more.
	sqlOvertaken = `EXISTS (SELECT 1 FROM {s}held_messages e WHERE e.consumer_id = {s}held_messages.consumer_id
		AND e.order_key = {s}held_messages.order_key AND e.position < {s}held_messages.position AND e.due_at IS NOT NULL)`
	sqlRepair = `UPDATE {s}held_messages SET due_at = {now} WHERE seq IN (SELECT seq FROM {s}held_messages WHERE consumer_id = $1 AND due_at IS NULL AND NOT dead AND (order_key IS NULL OR seq IN (
		WITH RECURSIVE k(key) AS (
			SELECT (SELECT order_key FROM {s}held_messages WHERE consumer_id = $1 AND order_key IS NOT NULL ORDER BY order_key LIMIT 1)
			UNION ALL
			SELECT (SELECT order_key FROM {s}held_messages WHERE consumer_id = $1 AND order_key > k.key ORDER BY order_key LIMIT 1) FROM k WHERE k.key IS NOT NULL
		)
		SELECT (SELECT seq FROM {s}held_messages f WHERE f.consumer_id = $1 AND f.order_key = k.key AND NOT (f.dead AND $2) ORDER BY f.position LIMIT 1)
		FROM k WHERE k.key IS NOT NULL)) {skip})`
	sqlHeldStats = `SELECT count(*), count(CASE WHEN dead THEN 1 END), count(CASE WHEN due_at <= {now} THEN 1 END),
		coalesce(max(CASE WHEN due_at <= {now} THEN {age:due_at} END), 0) FROM {s}held_messages WHERE consumer_id = $1`
)

const savepoint = "twiceproof"

// lockHead begins a retry on an open transaction. ended: an earlier run had
// committed by itself, and the head is settled as done.
func (e *engine) lockHead(ctx context.Context, q sqldb.Q, h *Head, u Unit) (ended bool, pid int32, err error) {
	var lockTimeout string
	if e.dialect == sqldb.Postgres {
		// The same settings as a claim has; the wait is for the taker of a lease that
		// ran out while its handler still runs.
		_, err := sqldb.QueryRow(ctx, q, sqlRetrySettings, e.settingsArgs(u), &pid, &lockTimeout)
		if err != nil {
			return false, 0, err
		}
	}
	var mark *string
	found, err := sqldb.QueryRow(ctx, q, e.sql(sqlLockHead), []any{h.Seq, h.Starts}, &mark)
	if err != nil {
		return false, pid, err
	}
	if !found {
		return false, pid, ErrHeadLost
	}
	if e.dialect == sqldb.Postgres {
		if _, err := q.Exec(ctx, `SELECT set_config('lock_timeout', $1, true)`, lockTimeout); err != nil {
			return false, pid, err
		}
	}
	if mark != nil {
		return true, pid, e.finishHead(ctx, q, h, stateDone, nil, u.ContinueAfterDead)
	}
	if _, err := q.Exec(ctx, e.sql(sqlMarkHead), h.Seq, h.Starts); err != nil {
		return false, pid, err
	}
	_, err = q.Exec(ctx, "SAVEPOINT "+savepoint)
	return false, pid, err
}

const sqlRetrySettings = `WITH cfg AS MATERIALIZED (SELECT current_setting('lock_timeout') AS old, ` + sqlSettings + `)
	SELECT pg_backend_pid(), old FROM cfg`

// finishHead turns the claim to its final state and removes the held row: the last
// writes of a retry, so that redeliveries wait for them and not for the handler.
func (e *engine) finishHead(ctx context.Context, q sqldb.Q, h *Head, state int, reason any, continueAfterDead bool) error {
	if err := e.lockKey(ctx, q, h.consumer, h.Item.OrderKey); err != nil {
		return err
	}
	n, err := q.Exec(ctx, e.sql(sqlSetState), h.consumer, h.Item.ID, state, reason)
	if err != nil {
		return err
	}
	if n == 0 {
		if _, err := q.Exec(ctx, e.sql(sqlInsertFinal), h.consumer, h.Item.ID, h.Item.Fingerprint, state, reason); err != nil {
			return err
		}
	}
	if n, err = q.Exec(ctx, e.sql(sqlDeleteHead), h.Seq, h.Starts); err != nil {
		return err
	}
	if n != 1 {
		return ErrHeadLost
	}
	return e.nextDue(ctx, q, h, continueAfterDead)
}

const sqlInsertFinal = `INSERT INTO {s}processed_messages (consumer_id, message_id, fp, state, reason, processed_at)
	VALUES ($1, $2, $3, $4, $5, {now})`

func (e *engine) nextDue(ctx context.Context, q sqldb.Q, h *Head, continueAfterDead bool) error {
	if h.Item.OrderKey == nil {
		return nil
	}
	_, err := q.Exec(ctx, e.sql(sqlNextDue), h.consumer, h.Item.OrderKey, continueAfterDead)
	return err
}

const (
	sqlContinues = `SELECT EXISTS (SELECT 1 FROM {s}held_messages h WHERE h.consumer_id = $1 AND h.order_key = $2 AND h.due_at IS NOT NULL
		AND EXISTS (SELECT 1 FROM {s}held_messages e WHERE e.consumer_id = $1 AND e.order_key = $2 AND e.position < h.position AND e.dead))`
	sqlUnDue = `UPDATE {s}held_messages SET due_at = NULL WHERE seq IN (SELECT seq FROM {s}held_messages
		WHERE consumer_id = $1 AND order_key = $2 AND due_at IS NOT NULL
		AND seq <> (SELECT seq FROM {s}held_messages WHERE consumer_id = $1 AND order_key = $2 AND NOT (dead AND $3) ORDER BY position LIMIT 1) {skip})`
)

// continues reports whether a locked key goes on behind a dead message, as it does
// where AfterDead is Continue, which the database is not told otherwise. Of a key that
// has nothing but dead messages it cannot be told: then the repair that runners do
// every few seconds makes the next one due.
func (e *engine) continues(ctx context.Context, q sqldb.Q, consumer int16, orderKey []byte) (yes bool, err error) {
	if orderKey == nil {
		return false, nil
	}
	_, err = sqldb.QueryRow(ctx, q, e.sql(sqlContinues), []any{consumer, orderKey}, &yes)
	return yes, err
}

// restoreHead makes the first message of a locked key the only due one, after a change
// of which that is. One that runs now keeps its turn to the end of its run.
func (e *engine) restoreHead(ctx context.Context, q sqldb.Q, consumer int16, orderKey []byte, continueAfterDead bool) error {
	if orderKey == nil {
		return nil
	}
	if _, err := q.Exec(ctx, e.sql(sqlUnDue), consumer, orderKey, continueAfterDead); err != nil {
		return err
	}
	_, err := q.Exec(ctx, e.sql(sqlNextDue), consumer, orderKey, continueAfterDead)
	return err
}

// failHead keeps the outcome of a failed retry.
func (e *engine) failHead(ctx context.Context, q sqldb.Q, h *Head, r heldRow, discard bool) error {
	if discard {
		return e.finishHead(ctx, q, h, stateDiscarded, text(r.failure.Text), r.continueAfterDead)
	}
	if err := e.lockKey(ctx, q, h.consumer, h.Item.OrderKey); err != nil {
		return err
	}
	n, err := q.Exec(ctx, e.sql(sqlRetryHead), h.Seq, h.Starts, r.attempts, r.reason, r.dead, r.delay.Microseconds(),
		orNil(text(r.failure.Class)), orNil(text(r.failure.Text)), orNil(text(r.failure.Stack)))
	if err != nil {
		return err
	}
	if n != 1 {
		return ErrHeadLost
	}
	if r.dead && r.continueAfterDead {
		return e.nextDue(ctx, q, h, true)
	}
	return nil
}

func (e *engine) heldStats(ctx context.Context, q sqldb.Q, consumer int16) (s HeldStats, err error) {
	var oldest int64
	_, err = sqldb.QueryRow(ctx, q, e.sql(sqlHeldStats), []any{consumer}, &s.Total, &s.Dead, &s.Due, &oldest)
	s.OldestDue = time.Duration(oldest) * time.Microsecond
	return s, err
}

// unusable says what to do about a database that does not answer.
func unusable(state string, err error) error {
	switch {
	case state == "3D000":
		return fmt.Errorf("the database does not exist; check its name in the URL: %w", err)
	case strings.HasPrefix(state, "28"):
		return fmt.Errorf("the database refuses the login; check user and password in the URL: %w", err)
	case state == "42501":
		return fmt.Errorf("the database refuses access to the inbox tables; grant SELECT, INSERT, UPDATE and DELETE on them: %w", err)
	case state == "":
		return fmt.Errorf("the database does not answer; check host and port in the URL, and that it runs: %w", err)
	}
	return fmt.Errorf("check the inbox: %w", err)
}

// check says whether the tables are there and can be written.
func (e *engine) check(ctx context.Context, q sqldb.Q) error {
	for _, probe := range []string{
		`SELECT id, name FROM {s}inbox_consumers WHERE 1 = 0`,
		`SELECT consumer_id, message_id, fp, state, reason, processed_at FROM {s}processed_messages WHERE 1 = 0`,
		`SELECT seq, position, consumer_id, kind, dead, due_at, attempts, starts, tx_mark, reason, message_id, order_key, payload FROM {s}held_messages WHERE 1 = 0`,
	} {
		err := q.Query(ctx, e.sql(probe), nil, func(func(...any) error) error { return nil })
		switch s := sqldb.State(err); {
		case s == sqldb.UndefinedTable || s == sqldb.UndefinedColumn || s == sqldb.InvalidSchemaName:
			return fmt.Errorf("inbox tables are missing or old; run `twiceproof migrate up`: %w", err)
		case err != nil && e.dialect == sqldb.SQLite:
			return fmt.Errorf("inbox tables cannot be read; if they are missing, run `twiceproof migrate up`: %w", err)
		case err != nil:
			return unusable(s, err)
		}
	}
	if e.dialect == sqldb.SQLite {
		return nil
	}
	var readOnly string
	if _, err := sqldb.QueryRow(ctx, q, `SELECT current_setting('transaction_read_only')`, nil, &readOnly); err != nil {
		return fmt.Errorf("check the inbox: %w", err)
	}
	if readOnly == "on" {
		return fmt.Errorf("the database is read-only; connect to the primary (target_session_attrs=read-write)")
	}
	return e.checkUnique(ctx, q)
}

// A table that was partitioned by time has that time in its unique key, and then the
// same ID twice.
const sqlUniqueKey = `SELECT count(*) FROM pg_index i WHERE i.indrelid = '{s}processed_messages'::regclass AND i.indisunique AND i.indisvalid
	AND i.indpred IS NULL AND i.indnkeyatts = 2 AND (SELECT array_agg(a.attname::text ORDER BY a.attname) FROM pg_attribute a
		WHERE a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey)) = '{consumer_id,message_id}'`

func (e *engine) checkUnique(ctx context.Context, q sqldb.Q) error {
	n := 0
	if _, err := sqldb.QueryRow(ctx, q, e.sql(sqlUniqueKey), nil, &n); err != nil {
		return fmt.Errorf("check the inbox: %w", err)
	}
	if n == 0 {
		return fmt.Errorf("processed_messages has no unique key of exactly (consumer_id, message_id), so that one message could be processed twice: restore its primary key")
	}
	return nil
}
