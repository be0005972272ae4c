package inbox

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/twiceproof/twiceproof/internal/sqldb"
)

// DefaultWindow is how long claims are kept unless said otherwise: a day longer than
// SQS can keep a message.
const DefaultWindow = 15 * 24 * time.Hour

// ErrWindow: the inbox would forget messages that the broker can still deliver.
var ErrWindow = errors.New("the inbox would forget messages that the broker can still deliver, and process them again")

// CheckWindow compares how long claims are kept with how long a broker can redeliver
// (brokers.Capabilities.RedeliveryHorizon: 0 unknown, negative for ever). A window of 0
// or less keeps claims for ever. A finite horizon beyond the window is an error that
// wraps ErrWindow; one that is unknown or endless is a warning.
func CheckWindow(window, horizon time.Duration) (warning string, err error) {
	switch {
	case window <= 0:
		return "", nil
	case horizon > window:
		return "", fmt.Errorf("%w: it redelivers for up to %s, and Window is %s: raise Window to at least %[2]s, or lower the broker's retention", ErrWindow, horizon, window)
	case horizon < 0:
		return fmt.Sprintf("the broker keeps messages for ever, and the inbox remembers them for %s: older ones are held, see TooOld", window), nil
	case horizon == 0:
		return fmt.Sprintf("how long the broker can redeliver is not known, and the inbox remembers for %s: older ones are held, see TooOld", window), nil
	}
	return "", nil
}

// RetainRequest asks for one step of the cleanup of a consumer's claims.
type RetainRequest struct {
	Consumer string
	// Owner is the process: one at a time cleans, for Lease.
	Owner string
	Lease time.Duration
	// Window is how long claims are kept.
	Window time.Duration
	// Batch is about how many rows one step looks at. 0 means 5,000.
	Batch int
}

// RetainResult is what a step has done.
type RetainResult struct {
	// Owner: the lease is the caller's.
	Owner bool
	// Allowed: the consumer has caught up once, or a whole window has passed.
	Allowed bool
	Deleted int
	// More: the walk over the table is not at its end.
	More bool
	// Forgets is the age from which on messages may have been processed and forgotten; 0
	// while nothing was ever deleted.
	Forgets time.Duration
}

const (
	sqlRetentionRow = `INSERT INTO {s}inbox_retention (consumer_id, since, until) VALUES ($1, {now}, {now}) ON CONFLICT DO NOTHING`
	sqlRetainLease  = `UPDATE {s}inbox_retention SET owner = $2, until = {after:$3}, window_us = $4
		WHERE consumer_id = $1 AND (owner = $2 OR owner IS NULL OR until <= {now})
		RETURNING caught_up_at IS NOT NULL OR {age:since} >= $4, place`
	sqlForgets = `SELECT coalesce({age:cleaned_at} + window_us, 0) FROM {s}inbox_retention WHERE consumer_id = $1 AND deleted > 0`
	// A held row guards its ID, conflicts included, however old the claim is.
	sqlForget = `DELETE FROM {s}processed_messages AS p WHERE p.consumer_id = $1 AND p.state <> 1 AND {age:p.processed_at} >= $2
		AND NOT EXISTS (SELECT 1 FROM {s}held_messages h WHERE h.consumer_id = p.consumer_id AND h.message_id = p.message_id)`
	// By the pages of the table: an index on the time would cost every claim. The time
	// decides, the page only bounds a step.
	sqlForgetPages = sqlForget + ` AND p.ctid >= format('(%s,0)', $3::bigint)::tid AND p.ctid < format('(%s,0)', $4::bigint)::tid`
	sqlPages       = `SELECT pg_relation_size('{s}processed_messages'::regclass) / current_setting('block_size')::bigint`
	sqlForgetSome  = `DELETE FROM processed_messages WHERE (consumer_id, message_id) IN (SELECT p.consumer_id, p.message_id FROM processed_messages p
		WHERE p.consumer_id = $1 AND p.state <> 1 AND {age:p.processed_at} >= $2
		AND NOT EXISTS (SELECT 1 FROM held_messages h WHERE h.consumer_id = p.consumer_id AND h.message_id = p.message_id) LIMIT $3)`
	sqlForgetSuspects = `DELETE FROM {s}inbox_suspects WHERE consumer_id = $1 AND {age:last_at} >= $2`
	sqlRetained       = `UPDATE {s}inbox_retention SET place = $2, deleted = deleted + $3, cleaned_at = CASE WHEN $4 THEN {now} ELSE cleaned_at END WHERE consumer_id = $1`
	sqlCaughtUp       = `UPDATE {s}inbox_retention SET caught_up_at = {now} WHERE consumer_id = $1 AND caught_up_at IS NULL`
)

// rowsPerPage is a guess: claims with a UUID and a fingerprint.
const rowsPerPage = 70

// retain does one step in one transaction.
func (e *engine) retain(ctx context.Context, q sqldb.Q, consumer int16, r RetainRequest) (res RetainResult, err error) {
	if r.Batch <= 0 {
		r.Batch = 5000
	}
	if _, err := q.Exec(ctx, e.sql(sqlRetentionRow), consumer); err != nil {
		return res, err
	}
	var place int64
	res.Owner, err = sqldb.QueryRow(ctx, q, e.sql(sqlRetainLease), []any{consumer, r.Owner, r.Lease.Microseconds(), r.Window.Microseconds()}, &res.Allowed, &place)
	if err == nil && res.Owner && res.Allowed {
		err = e.forget(ctx, q, consumer, r, place, &res)
	}
	if err != nil {
		return res, err
	}
	var forgets int64
	_, err = sqldb.QueryRow(ctx, q, e.sql(sqlForgets), []any{consumer}, &forgets)
	res.Forgets = time.Duration(forgets) * time.Microsecond
	return res, err
}

func (e *engine) forget(ctx context.Context, q sqldb.Q, consumer int16, r RetainRequest, place int64, res *RetainResult) error {
	window := r.Window.Microseconds()
	var n, next int64
	var err error
	if e.dialect == sqldb.SQLite {
		n, err = q.Exec(ctx, e.sql(sqlForgetSome), consumer, window, r.Batch)
		res.More = n == int64(r.Batch)
	} else {
		var pages int64
		if _, err = sqldb.QueryRow(ctx, q, e.sql(sqlPages), nil, &pages); err == nil {
			next = place + int64(max(1, r.Batch/rowsPerPage))
			n, err = q.Exec(ctx, e.sql(sqlForgetPages), consumer, window, place, next)
			if res.More = next < pages; !res.More {
				next = 0
			}
		}
	}
	if err != nil {
		return err
	}
	if !res.More {
		if _, err := q.Exec(ctx, e.sql(sqlForgetSuspects), consumer, window); err != nil {
			return err
		}
	}
	res.Deleted = int(n)
	_, err = q.Exec(ctx, e.sql(sqlRetained), consumer, next, n, !res.More)
	return err
}

func (e *engine) caughtUp(ctx context.Context, q sqldb.Q, consumer int16) error {
	if _, err := q.Exec(ctx, e.sql(sqlRetentionRow), consumer); err != nil {
		return err
	}
	_, err := q.Exec(ctx, e.sql(sqlCaughtUp), consumer)
	return err
}

// Retain implements [Store].
func (s *PostgresStore) Retain(ctx context.Context, r RetainRequest) (res RetainResult, err error) {
	id, err := s.consumer(ctx, r.Consumer)
	if err == nil {
		err = s.inTx(ctx, func(tx pgx.Tx) error {
			res, err = s.e.retain(ctx, sqldb.Pgx(tx), id, r)
			return err
		})
	}
	return res, classify(err)
}

// CaughtUp implements [Store].
func (s *PostgresStore) CaughtUp(ctx context.Context, consumer string) error {
	id, err := s.consumer(ctx, consumer)
	if err == nil {
		err = s.inTx(ctx, func(tx pgx.Tx) error { return s.e.caughtUp(ctx, sqldb.Pgx(tx), id) })
	}
	return classify(err)
}

// Retain implements [Store].
func (s *SQLStore) Retain(ctx context.Context, r RetainRequest) (res RetainResult, err error) {
	id, err := s.consumer(ctx, r.Consumer)
	if err == nil {
		err = s.inTx(ctx, func(tx *sql.Tx) error {
			res, err = s.e.retain(ctx, sqldb.SQL(tx), id, r)
			return err
		})
	}
	return res, classify(err)
}

// CaughtUp implements [Store].
func (s *SQLStore) CaughtUp(ctx context.Context, consumer string) error {
	id, err := s.consumer(ctx, consumer)
	if err == nil {
		err = s.inTx(ctx, func(tx *sql.Tx) error { return s.e.caughtUp(ctx, sqldb.SQL(tx), id) })
	}
	return classify(err)
}
