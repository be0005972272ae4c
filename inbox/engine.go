package inbox

import (
	"context"
	"errors"
	"sync"

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
