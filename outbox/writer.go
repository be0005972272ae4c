package outbox

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/internal/msgcodec"
	"github.com/twiceproof/twiceproof/internal/sqldb"
)

// Shares is the number of shares that keys are divided into.
const Shares = 256

// ErrCommitUnknown: the answer to COMMIT did not come, so the transaction is done or
// not. Run it again with the same *Message values: their IDs stay, the outbox takes
// an ID twice, and consumers deduplicate. Whether the business rows are there
// already is for the transaction to find out.
var ErrCommitUnknown = errors.New("commit outcome unknown")

// Writer enqueues messages in a transaction of type Tx.
type Writer[Tx any] interface {
	// Enqueue inserts the messages in tx. Empty IDs (a UUIDv7) and zero Times are set
	// once, here, on the messages themselves. Topic is required. IDs have at most 255
	// bytes of UTF-8 without NUL and need not be unique; every other field may hold any
	// bytes. An unusable message is an error before anything is inserted, and tx
	// lives on. Lock the business row first: see the package on order.
	Enqueue(ctx context.Context, tx Tx, ms ...*brokers.Message) error
	// Begin opens a transaction, for InTx.
	Begin(ctx context.Context) (tx Tx, commit func(context.Context) error, rollback func(context.Context) error, err error)
	// Nudge tells relays of this process on the same outbox that there is work.
	Nudge()
}

// InTx runs fn in a transaction, commits it, and tells the relays of this process
// that use w. With an error from fn (returned as it is), a panic, or a ctx that ends
// before the commit, nothing is stored. ErrCommitUnknown is in the error's tree when
// the commit may have been done.
func InTx[Tx any](ctx context.Context, w Writer[Tx], fn func(ctx context.Context, tx Tx) error) error {
	tx, commit, rollback, err := w.Begin(ctx)
	if err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	ended := false
	defer func() {
		if !ended {
			_ = rollback(context.WithoutCancel(ctx))
		}
	}()
	if err := fn(ctx, tx); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("not committed: %w", err) // nothing is unknown yet
	}
	ended = true
	if err := commit(ctx); err != nil {
		rolledBack := errors.Is(err, pgx.ErrTxCommitRollback)
		if sqldb.CommitUncertain(err) && !sqldb.Busy(err) && !rolledBack {
			err = errors.Join(ErrCommitUnknown, err)
			w.Nudge() // it may be there
		}
		return fmt.Errorf("commit: %w", err)
	}
	w.Nudge()
	return nil
}

// Option configures an outbox: [Schema], [SerializeKeys], [KeepPublished]. Writers and
// relays of one outbox need the same Schema; KeepPublished is the relay's, SerializeKeys
// the writer's.
type Option func(*options)

type options struct {
	schema        string
	serializeKeys bool
	keep          time.Duration
}

// Schema says where the tables are (PostgreSQL only); use the same in migrations.Up.
// The default, and "", is the connection's search_path.
func Schema(name string) Option { return func(o *options) { o.schema = name } }

// SerializeKeys makes Enqueue take a lock for each key until the transaction ends
// (PostgreSQL; on SQLite write transactions are alone anyway), so that the order of
// a key is the order of its commits even for writers that do not lock a business row
// first. It costs a round trip a key; transactions of one key wait for each other, and
// two Enqueue calls in each of two transactions can deadlock (SQLSTATE 40P01: run one
// again), a single call with many keys cannot. Off by default.
func SerializeKeys() Option { return func(o *options) { o.serializeKeys = true } }

// KeepPublished keeps published rows for d after their publishing instead of
// deleting them at once; relays clean up what is older. Marking costs about twice
// what deleting does. 0, the default: they are deleted.
func KeepPublished(d time.Duration) Option { return func(o *options) { o.keep = d } }

// engine is what all outboxes share.
type engine struct {
	dialect sqldb.Dialect
	o       options
	nudge   nudge
	texts   sync.Map // statements as written -> as rendered
	inserts sync.Map // number of rows -> INSERT
}

func newEngine(d sqldb.Dialect, opts []Option) *engine {
	e := &engine{dialect: d}
	for _, f := range opts {
		f(&e.o)
	}
	return e
}

// sql renders a statement, once.
func (e *engine) sql(text string) string {
	if s, ok := e.texts.Load(text); ok {
		return s.(string)
	}
	s := e.dialect.SQL(text, e.o.schema)
	e.texts.Store(text, s)
	return s
}

// nudge wakes everybody who waits.
type nudge struct {
	mu sync.Mutex
	ch chan struct{}
}

func (n *nudge) wait() <-chan struct{} {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ch == nil {
		n.ch = make(chan struct{})
	}
	return n.ch
}

func (n *nudge) wake() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ch != nil {
		close(n.ch)
		n.ch = nil
	}
}

// shareOf is the share of a key, or of the ID of a message without one.
func shareOf(m *brokers.Message) int {
	h := fnv.New64a()
	if m.Key != "" {
		h.Write([]byte(m.Key))
	} else {
		h.Write([]byte(m.ID))
	}
	return int(h.Sum64() % Shares)
}

// prepare completes a message, or says what is wrong with it.
func prepare(m *brokers.Message) error {
	if m == nil {
		return errors.New("enqueue: message is nil")
	}
	if m.ID == "" {
		id, err := uuid.NewV7()
		if err != nil {
			return err
		}
		m.ID = id.String()
	}
	if m.Time.IsZero() {
		m.Time = time.Now()
	}
	switch {
	case len(m.ID) > 255:
		return fmt.Errorf("enqueue: message id of %d bytes is too long: at most 255", len(m.ID))
	case !utf8.ValidString(m.ID) || strings.IndexByte(m.ID, 0) >= 0:
		return fmt.Errorf("enqueue: message id %q has a NUL byte or is not valid UTF-8", m.ID)
	case m.Topic == "":
		return fmt.Errorf("enqueue: message %q has no Topic: say where to publish it", m.ID)
	}
	return nil
}

const columns = 9

// insertBatch is the most rows of one INSERT: nine parameters each, of at most
// 32,766 (SQLite) or 65,535.
const insertBatch = 500

func (e *engine) enqueue(ctx context.Context, q sqldb.Q, ms []*brokers.Message) error {
	for _, m := range ms {
		if err := prepare(m); err != nil {
			return err
		}
	}
	if e.o.serializeKeys {
		if err := e.lockKeys(ctx, q, ms); err != nil {
			return fmt.Errorf("enqueue: lock the keys: %w", err)
		}
	}
	for part := range slices.Chunk(ms, insertBatch) {
		if err := e.insert(ctx, q, part); err != nil {
			return fmt.Errorf("enqueue: %w", err)
		}
	}
	return nil
}

// lockKeys takes the transaction locks of the messages' keys, in one order, so that
// two calls with the same keys cannot wait for each other.
func (e *engine) lockKeys(ctx context.Context, q sqldb.Q, ms []*brokers.Message) error {
	if e.dialect != sqldb.Postgres {
		return nil // a write transaction is alone
	}
	var locks []int64
	for _, m := range ms {
		if m.Key != "" {
			h := fnv.New64a()
			h.Write([]byte("twiceproof/outbox/" + e.o.schema + "/" + m.Key))
			locks = append(locks, int64(h.Sum64()))
		}
	}
	slices.Sort(locks)
	for _, l := range slices.Compact(locks) {
		if _, err := q.Exec(ctx, `SELECT pg_advisory_xact_lock($1)`, l); err != nil {
			return err
		}
	}
	return nil
}

func insertSQL(rows int) string {
	var b strings.Builder
	b.WriteString(`INSERT INTO {s}outbox_messages (created_at, share, message_id, topic, message_key, type, content_type, produced_at, headers, payload) VALUES `)
	for i := range rows {
		if i > 0 {
			b.WriteString(", ")
		}
		p := columns * i
		fmt.Fprintf(&b, "({now}, $%d, $%d, $%d, $%d, $%d, $%d, $%d, $%d, $%d)", p+1, p+2, p+3, p+4, p+5, p+6, p+7, p+8, p+9)
	}
	return b.String()
}

func (e *engine) insert(ctx context.Context, q sqldb.Q, ms []*brokers.Message) error {
	args := make([]any, 0, columns*len(ms))
	for _, m := range ms {
		var key []byte
		if m.Key != "" {
			key = []byte(m.Key)
		}
		args = append(args, shareOf(m), m.ID, []byte(m.Topic), key, []byte(m.Type), []byte(m.ContentType),
			msgcodec.Time(m.Time), msgcodec.Headers(m.Headers), m.Payload)
	}
	text, ok := e.inserts.Load(len(ms))
	if !ok {
		text = e.dialect.SQL(insertSQL(len(ms)), e.o.schema)
		e.inserts.Store(len(ms), text)
	}
	_, err := q.Exec(ctx, text.(string), args...)
	return err
}
