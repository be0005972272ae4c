package outbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/internal/msgcodec"
	"github.com/twiceproof/twiceproof/internal/sqldb"
)

// Queue is the relay's side of an outbox.
//
// It is sealed: the outboxes of this package implement it and nobody else can. What
// keeps messages in order and unlost is not the list of its methods but the
// conditions inside their statements (the token of a share, the row locks, what
// counts as blocked), which still change before v1. A foreign store would have to
// copy them, and follow them. Package outboxtest is the suite of what they add up to.
type Queue interface {
	// lease says that the relay lives, renews its shares, takes free ones up to its
	// part and gives up what is more. It returns the shares it has now with the
	// tokens that marks of their rows must carry; short: they are less than its part.
	lease(ctx context.Context, relay string, d time.Duration) (shares map[int]int64, short bool, err error)
	// fetch returns the next messages of the relay's shares, in order, without those
	// of blocked keys.
	fetch(ctx context.Context, relay string, f fetch) ([]*row, error)
	// published deletes or marks rows whose shares the relay still has under the
	// same token, and returns how many.
	published(ctx context.Context, relay string, rows []*row) (int, error)
	// failed keeps what became of rows, on the same condition.
	failed(ctx context.Context, relay string, fs []failure) (int, error)
	// again makes rows that wait for another try due now, on the same condition.
	again(ctx context.Context, relay string, rows []*row) error
	// cleanup deletes published rows whose time is over; more: there may be more.
	cleanup(ctx context.Context) (more bool, err error)
	// left describes what is not published.
	left(ctx context.Context, relay string) (*LeftError, error)
	// leave gives up all shares.
	leave(ctx context.Context, relay string) error
	// check reports missing tables; passing says that the error may pass by itself.
	check(ctx context.Context) (err error, passing bool) //nolint:staticcheck // the error is the answer
	// connections is the size of the pool, 0 for no limit, where it limits relays.
	connections() int
	nudged() <-chan struct{}
	// Nudge tells relays of this process that there is work.
	Nudge()
}

// row is one message of the outbox, fetched under a token of its share.
type row struct {
	seq      int64
	share    int
	token    int64
	attempts int
	m        *brokers.Message
}

// fetch is what a fetch is limited to.
type fetch struct {
	most       int
	bytes      int
	except     []*row // published, their mark is on its way
	skipParked bool
}

// failure is a row that was not published.
type failure struct {
	row    *row
	delay  time.Duration
	parked bool
	why    string
}

// queue is a Queue on any database.
type queue struct {
	*engine
	// tx runs fn in one transaction.
	tx func(ctx context.Context, fn func(q sqldb.Q) error) error
	// one runs single statements, each a transaction of its own.
	one sqldb.Q
	// walk is a query behind sqlWalk.
	walk func(ctx context.Context, sql string, args []any, each func(scan func(...any) error) error) error
}

func (q queue) nudged() <-chan struct{} { return q.engine.nudge.wait() }

// Nudge implements [Queue] and [Writer].
func (q queue) Nudge() { q.engine.nudge.wake() }

func (q queue) lease(ctx context.Context, relay string, d time.Duration) (shares map[int]int64, short bool, err error) {
	want := 0
	err = q.tx(ctx, func(c sqldb.Q) error {
		shares = map[int]int64{}
		collect := func(text string, args ...any) error {
			return c.Query(ctx, q.sql(text), args, func(scan func(...any) error) error {
				var share int
				var token int64
				err := scan(&share, &token)
				shares[share] = token
				return err
			})
		}
		if _, err := c.Exec(ctx, q.sql(sqlHeartbeat), relay, d.Microseconds()); err != nil {
			return err
		}
		if _, err := c.Exec(ctx, q.sql(sqlForget)); err != nil {
			return err
		}
		live := 0
		if _, err := sqldb.QueryRow(ctx, c, q.sql(sqlLive), nil, &live); err != nil {
			return err
		}
		if err := collect(sqlRenew, relay, d.Microseconds()); err != nil {
			return err
		}
		live = max(1, live)
		want = (Shares + live - 1) / live
		switch have := len(shares); {
		case have < want:
			return collect(sqlTakeShares, relay, d.Microseconds(), want-have)
		case have > want:
			return c.Query(ctx, q.sql(sqlGiveShares), []any{relay, have - want}, func(scan func(...any) error) error {
				var share int
				err := scan(&share)
				delete(shares, share)
				return err
			})
		}
		return nil
	})
	return shares, len(shares) < want, err
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

func (q queue) fetch(ctx context.Context, relay string, f fetch) (rs []*row, err error) {
	text := sqlFetch
	if f.skipParked {
		text = sqlFetchSkipParked
	}
	except := q.list(len(f.except), func(i int) int64 { return f.except[i].seq })
	err = q.walk(ctx, q.sql(text), []any{relay, f.most, except, f.bytes}, func(scan func(...any) error) error {
		r := &row{m: &brokers.Message{}}
		var topic, key, typ, ct, headers []byte
		var at *string
		var noPayload bool
		err := scan(&r.seq, &r.share, &r.attempts, &r.m.ID, &topic, &key, &typ, &ct, &at, &headers, &r.m.Payload, &noPayload)
		if err != nil {
			return err
		}
		r.m.Topic, r.m.Key, r.m.Type, r.m.ContentType, r.m.Time = string(topic), string(key), string(typ), string(ct), msgcodec.ParseTime(at)
		switch {
		case noPayload:
			r.m.Payload = nil
		case r.m.Payload == nil:
			r.m.Payload = []byte{}
		}
		r.m.Headers, err = msgcodec.ParseHeaders(headers)
		rs = append(rs, r)
		return err
	})
	return rs, err
}

// list is a list of integers as one parameter, an array or JSON by the dialect.
func (q queue) list(n int, at func(int) int64) string {
	b := make([]byte, 0, 2+12*n)
	b = append(b, q.pick('{', '['))
	for i := range n {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendInt(b, at(i), 10)
	}
	return string(append(b, q.pick('}', ']')))
}

func (q queue) pick(postgres, sqlite byte) byte {
	if q.dialect == sqldb.SQLite {
		return sqlite
	}
	return postgres
}

// owned is the list of the rows' shares with their tokens, each pair as one number.
func (q queue) owned(rows func(yield func(*row) bool)) string {
	var pairs []int64
	seen := map[int64]bool{}
	for r := range rows {
		if p := r.token*Shares + int64(r.share); !seen[p] {
			seen[p] = true
			pairs = append(pairs, p)
		}
	}
	return q.list(len(pairs), func(i int) int64 { return pairs[i] })
}

func (q queue) published(ctx context.Context, relay string, rows []*row) (int, error) {
	stmt := sqlDelete
	if q.o.keep > 0 {
		stmt = sqlMark
	}
	seqs := q.list(len(rows), func(i int) int64 { return rows[i].seq })
	n, err := q.one.Exec(ctx, q.sql(stmt), relay, seqs, q.owned(slices.Values(rows)))
	return int(n), err
}

func (q queue) failed(ctx context.Context, relay string, fs []failure) (int, error) {
	type record struct {
		Seq      int64  `json:"seq"`
		Attempts int    `json:"attempts"`
		Delay    int64  `json:"delay"`
		Parked   int    `json:"parked"`
		Why      string `json:"why"`
	}
	list := make([]record, len(fs))
	for i, f := range fs {
		list[i] = record{f.row.seq, f.row.attempts, f.delay.Microseconds(), 0, clean(f.why)}
		if f.parked {
			list[i].Parked = 1
		}
	}
	text, err := json.Marshal(list)
	if err != nil {
		return 0, err
	}
	n, err := q.one.Exec(ctx, q.sql(sqlFailed), relay, string(text), q.owned(func(yield func(*row) bool) {
		for _, f := range fs {
			if !yield(f.row) {
				return
			}
		}
	}))
	return int(n), err
}

func (q queue) again(ctx context.Context, relay string, rows []*row) error {
	seqs := q.list(len(rows), func(i int) int64 { return rows[i].seq })
	_, err := q.one.Exec(ctx, q.sql(sqlAgain), relay, seqs, q.owned(slices.Values(rows)))
	return err
}

// clean makes a text of an error that every database can hold.
func clean(s string) string {
	const most = 8 << 10
	s = strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "")
	if len(s) > most {
		s = strings.ToValidUTF8(s[:most], "")
	}
	return s
}

func (q queue) cleanup(ctx context.Context) (more bool, err error) {
	if q.o.keep <= 0 {
		return false, nil
	}
	n, err := q.one.Exec(ctx, q.sql(sqlCleanup), q.o.keep.Microseconds(), cleanupBatch)
	return n == cleanupBatch, err
}

func (q queue) check(ctx context.Context) (error, bool) { //nolint:staticcheck // see Queue
	err := q.one.Query(ctx, q.sql(sqlProbe), nil, func(func(...any) error) error { return nil })
	if err == nil {
		return nil, false
	}
	switch sqldb.State(err) {
	case sqldb.UndefinedTable, sqldb.UndefinedColumn, sqldb.InvalidSchemaName:
		return fmt.Errorf("outbox tables are missing or old; run `twiceproof migrate up`: %w", err), false
	}
	lite := q.dialect == sqldb.SQLite && !sqldb.Busy(err) && !errors.Is(err, context.Canceled)
	return fmt.Errorf("outbox tables cannot be read; if they are missing, run `twiceproof migrate up`: %w", err), !lite
}
