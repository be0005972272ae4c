package outbox

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/internal/msgcodec"
	"github.com/twiceproof/twiceproof/internal/sqldb"
)

// Queue is the relay's side of an outbox. It is implemented by the outboxes of this
// package.
type Queue interface {
	// lease says that the relay lives, renews its shares, takes free ones up to its
	// part, gives up what is more, and returns how many it has.
	lease(ctx context.Context, relay string, d time.Duration) (int, error)
	// fetch returns the next messages of the relay's shares, in order, without those
	// of blocked keys.
	fetch(ctx context.Context, relay string, most int) ([]*row, error)
	// published marks rows, as far as the relay still owns their shares, and returns
	// how many it has marked.
	published(ctx context.Context, relay string, seqs []int64) (int, error)
	// failed keeps a failed attempt of a row, on the same condition.
	failed(ctx context.Context, relay string, r *row, delay time.Duration, parked bool, why string) error
	// leave gives up all shares.
	leave(ctx context.Context, relay string) error
	check(ctx context.Context) error
	nudged() <-chan struct{}
	// Nudge tells relays of this process that there is work.
	Nudge()
}

// row is one message of the outbox.
type row struct {
	seq      int64
	attempts int
	m        *brokers.Message
}

// session runs fn in one transaction.
type session func(ctx context.Context, fn func(q sqldb.Q) error) error

// queue is a Queue on any database.
type queue struct {
	*engine
	tx session
}

func (q queue) nudged() <-chan struct{} { return q.engine.nudge.wait() }

// Nudge implements [Queue] and [Writer].
func (q queue) Nudge() { q.engine.nudge.wake() }

const (
	sqlHeartbeat  = `INSERT INTO {s}outbox_relays (id, seen_at) VALUES ($1, {now}) ON CONFLICT (id) DO UPDATE SET seen_at = {now}`
	sqlForget     = `DELETE FROM {s}outbox_relays WHERE {age:seen_at} > {int:$1}`
	sqlLive       = `SELECT count(*) FROM {s}outbox_relays`
	sqlRenew      = `UPDATE {s}outbox_shares SET until = {after:$2} WHERE owner = $1 AND until > {now}`
	sqlTakeShares = `WITH f AS MATERIALIZED (SELECT share FROM {s}outbox_shares WHERE until <= {now} ORDER BY share LIMIT $3 {skip})
		UPDATE {s}outbox_shares SET owner = $1, token = token + 1, until = {after:$2} WHERE share IN (SELECT share FROM f)`
	sqlGiveShares = `WITH f AS MATERIALIZED (SELECT share FROM {s}outbox_shares WHERE owner = $1 ORDER BY share DESC LIMIT $2)
		UPDATE {s}outbox_shares SET owner = NULL, until = {now} WHERE share IN (SELECT share FROM f) AND owner = $1`
	sqlLeave      = `UPDATE {s}outbox_shares SET owner = NULL, until = {now} WHERE owner = $1`
	sqlLeaveRelay = `DELETE FROM {s}outbox_relays WHERE id = $1`
	sqlCleanup    = `DELETE FROM {s}outbox_messages WHERE seq IN (SELECT seq FROM {s}outbox_messages
		WHERE published_at IS NOT NULL AND {age:published_at} > {int:$1} LIMIT 1000)`

	sqlFetch = `WITH blocked AS MATERIALIZED (
			SELECT DISTINCT message_key AS k FROM {s}outbox_messages
			WHERE (parked OR next_at IS NOT NULL) AND published_at IS NULL AND message_key IS NOT NULL AND (parked OR next_at > {now}))
		SELECT m.seq, m.attempts, m.message_id, m.topic, m.message_key, m.type, m.content_type, m.produced_at, m.headers, m.payload, m.payload IS NULL
		FROM {s}outbox_messages m LEFT JOIN blocked ON blocked.k = m.message_key
		WHERE m.published_at IS NULL AND NOT m.parked AND (m.next_at IS NULL OR m.next_at <= {now}) AND blocked.k IS NULL
		AND m.share IN (SELECT share FROM {s}outbox_shares WHERE owner = $1 AND until > {now})
		ORDER BY m.seq LIMIT $2`

	ownedSeqs = ` WHERE seq IN (SELECT {pg:unnest($2::text::bigint[])}{lite:value FROM json_each($2)})
		AND share IN (SELECT share FROM {s}outbox_shares WHERE owner = $1 AND until > {now})`
	sqlDelete = `DELETE FROM {s}outbox_messages` + ownedSeqs
	sqlMark   = `UPDATE {s}outbox_messages SET published_at = {now}, next_at = NULL` + ownedSeqs
	sqlFailed = `UPDATE {s}outbox_messages SET attempts = $3, next_at = {after:$4}, parked = $5, last_error = $6
		WHERE seq = $2 AND share IN (SELECT share FROM {s}outbox_shares WHERE owner = $1 AND until > {now})`
	sqlProbe = `SELECT m.seq, s.token, r.seen_at FROM {s}outbox_messages m, {s}outbox_shares s, {s}outbox_relays r WHERE 1 = 0`
)

func (q queue) lease(ctx context.Context, relay string, d time.Duration) (have int, err error) {
	err = q.tx(ctx, func(c sqldb.Q) error {
		if _, err := c.Exec(ctx, q.sql(sqlHeartbeat), relay); err != nil {
			return err
		}
		if _, err := c.Exec(ctx, q.sql(sqlForget), d.Microseconds()); err != nil {
			return err
		}
		live := 0
		if _, err := sqldb.QueryRow(ctx, c, q.sql(sqlLive), nil, &live); err != nil {
			return err
		}
		n, err := c.Exec(ctx, q.sql(sqlRenew), relay, d.Microseconds())
		if err != nil {
			return err
		}
		want := (Shares + live - 1) / max(1, live)
		switch have = int(n); {
		case have < want:
			n, err = c.Exec(ctx, q.sql(sqlTakeShares), relay, d.Microseconds(), want-have)
			have += int(n)
		case have > want:
			n, err = c.Exec(ctx, q.sql(sqlGiveShares), relay, have-want)
			have -= int(n)
		}
		if err == nil && q.o.keep > 0 {
			_, err = c.Exec(ctx, q.sql(sqlCleanup), q.o.keep.Microseconds())
		}
		return err
	})
	return have, err
}

func (q queue) leave(ctx context.Context, relay string) error {
	return q.tx(ctx, func(c sqldb.Q) error {
		if _, err := c.Exec(ctx, q.sql(sqlLeave), relay); err != nil {
			return err
		}
		_, err := c.Exec(ctx, q.sql(sqlLeaveRelay), relay)
		return err
	})
}

func (q queue) fetch(ctx context.Context, relay string, most int) (rs []*row, err error) {
	err = q.tx(ctx, func(c sqldb.Q) error {
		return c.Query(ctx, q.sql(sqlFetch), []any{relay, most}, func(scan func(...any) error) error {
			r := &row{m: &brokers.Message{}}
			var topic, key, typ, ct, headers []byte
			var at *string
			var noPayload bool
			err := scan(&r.seq, &r.attempts, &r.m.ID, &topic, &key, &typ, &ct, &at, &headers, &r.m.Payload, &noPayload)
			if err != nil {
				return err
			}
			r.m.Topic, r.m.Key, r.m.Type, r.m.ContentType, r.m.Time = string(topic), string(key), string(typ), string(ct), msgcodec.ParseTime(at)
			if !noPayload && r.m.Payload == nil {
				r.m.Payload = []byte{}
			}
			r.m.Headers, err = msgcodec.ParseHeaders(headers)
			rs = append(rs, r)
			return err
		})
	})
	return rs, err
}

func (q queue) published(ctx context.Context, relay string, seqs []int64) (marked int, err error) {
	text := make([]string, len(seqs))
	for i, s := range seqs {
		text[i] = strconv.FormatInt(s, 10)
	}
	list := "{" + strings.Join(text, ",") + "}"
	if q.dialect == sqldb.SQLite {
		list = "[" + strings.Join(text, ",") + "]"
	}
	stmt := sqlDelete
	if q.o.keep > 0 {
		stmt = sqlMark
	}
	err = q.tx(ctx, func(c sqldb.Q) error {
		n, err := c.Exec(ctx, q.sql(stmt), relay, list)
		marked = int(n)
		return err
	})
	return marked, err
}

func (q queue) failed(ctx context.Context, relay string, r *row, delay time.Duration, parked bool, why string) error {
	why = strings.ReplaceAll(strings.ToValidUTF8(why, "\uFFFD"), "\x00", "")
	if len(why) > 8<<10 {
		why = strings.ToValidUTF8(why[:8<<10], "")
	}
	return q.tx(ctx, func(c sqldb.Q) error {
		n, err := c.Exec(ctx, q.sql(sqlFailed), relay, r.seq, r.attempts, delay.Microseconds(), parked, why)
		if err == nil && n == 0 {
			err = errLeaseLost
		}
		return err
	})
}

func (q queue) check(ctx context.Context) error {
	err := q.tx(ctx, func(c sqldb.Q) error {
		return c.Query(ctx, q.sql(sqlProbe), nil, func(func(...any) error) error { return nil })
	})
	if err != nil {
		return fmt.Errorf("outbox tables cannot be read; if they are missing, run `twiceproof migrate up`: %w", err)
	}
	return nil
}
