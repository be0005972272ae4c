package inbox

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// guard is the pgx.Tx that handlers get: everything works, but Commit and Rollback
// belong to the consumer. It remembers the last SQL error, which handlers may hide,
// and whether a statement may have ended the transaction.
type guard struct {
	conn    *pgx.Conn
	depth   int
	suspect bool
	lastErr *pgconn.PgError
}

func (g *guard) saw(err error) error {
	var pe *pgconn.PgError
	if errors.As(err, &pe) {
		g.lastErr = pe
	}
	return err
}

// Begin opens a savepoint.
func (g *guard) Begin(ctx context.Context) (pgx.Tx, error) {
	g.depth++
	s := &nested{guard: g, name: "sp_" + strconv.Itoa(g.depth)}
	_, err := g.Exec(ctx, "SAVEPOINT "+s.name)
	if err != nil {
		return nil, err
	}
	return s, nil
}

func (g *guard) Commit(context.Context) error   { return ErrTxOwned }
func (g *guard) Rollback(context.Context) error { return ErrTxOwned }
func (g *guard) Conn() *pgx.Conn                { return g.conn }

func (g *guard) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, src pgx.CopyFromSource) (int64, error) {
	n, err := g.conn.CopyFrom(ctx, table, columns, src)
	return n, g.saw(err)
}

func (g *guard) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	return &guardedBatch{g.conn.SendBatch(ctx, b), g}
}

// LargeObjects needs a transaction of pgx's own type. An empty SELECT in place of
// BEGIN makes one on the connection without touching the open transaction.
func (g *guard) LargeObjects() pgx.LargeObjects {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	tx, err := g.conn.BeginTx(ctx, pgx.TxOptions{BeginQuery: "SELECT"})
	if err != nil {
		return pgx.LargeObjects{}
	}
	return tx.LargeObjects()
}

func (g *guard) Prepare(ctx context.Context, name, sql string) (*pgconn.StatementDescription, error) {
	d, err := g.conn.Prepare(ctx, name, sql)
	return d, g.saw(err)
}

func (g *guard) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	tag, err := g.conn.Exec(ctx, sql, args...)
	// ROLLBACK TO has the tag of ROLLBACK, so this is a suspicion, no more.
	if t := tag.String(); t == "COMMIT" || t == "ROLLBACK" || strings.HasPrefix(t, "PREPARE TRANSACTION") {
		g.suspect = true
	}
	return tag, g.saw(err)
}

func (g *guard) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	rows, err := g.conn.Query(ctx, sql, args...)
	if rows != nil {
		rows = &guardedRows{rows, g}
	}
	return rows, g.saw(err)
}

func (g *guard) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return guardedRow{g.conn.QueryRow(ctx, sql, args...), g}
}

type guardedRow struct {
	pgx.Row
	g *guard
}

func (r guardedRow) Scan(dest ...any) error { return r.g.saw(r.Row.Scan(dest...)) }

type guardedRows struct {
	pgx.Rows
	g *guard
}

func (r *guardedRows) Close()     { r.Rows.Close(); _ = r.g.saw(r.Rows.Err()) }
func (r *guardedRows) Err() error { return r.g.saw(r.Rows.Err()) }
func (r *guardedRows) Next() bool {
	ok := r.Rows.Next()
	if !ok {
		_ = r.g.saw(r.Rows.Err())
	}
	return ok
}

type guardedBatch struct {
	pgx.BatchResults
	g *guard
}

func (b *guardedBatch) Exec() (pgconn.CommandTag, error) {
	tag, err := b.BatchResults.Exec()
	return tag, b.g.saw(err)
}

func (b *guardedBatch) Query() (pgx.Rows, error) {
	rows, err := b.BatchResults.Query()
	if rows != nil {
		rows = &guardedRows{rows, b.g}
	}
	return rows, b.g.saw(err)
}

func (b *guardedBatch) QueryRow() pgx.Row { return guardedRow{b.BatchResults.QueryRow(), b.g} }
func (b *guardedBatch) Close() error      { return b.g.saw(b.BatchResults.Close()) }

// nested is a savepoint of the handler's own.
type nested struct {
	*guard
	name   string
	closed bool
}

func (n *nested) end(ctx context.Context, sql string) error {
	if n.closed {
		return pgx.ErrTxClosed
	}
	n.closed = true
	// Not through Exec: ROLLBACK TO of our own is no suspicion.
	_, err := n.conn.Exec(ctx, sql)
	return n.saw(err)
}

func (n *nested) Commit(ctx context.Context) error { return n.end(ctx, "RELEASE SAVEPOINT "+n.name) }
func (n *nested) Rollback(ctx context.Context) error {
	if n.closed {
		return pgx.ErrTxClosed
	}
	return n.end(ctx, "ROLLBACK TO SAVEPOINT "+n.name)
}
