package outbox

import (
	"context"
	"database/sql"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/internal/sqldb"
)

// PostgresOutbox is a Writer[pgx.Tx] and a Queue on PostgreSQL.
type PostgresOutbox struct {
	queue
	pool *pgxpool.Pool
}

var (
	_ Writer[pgx.Tx]  = (*PostgresOutbox)(nil)
	_ Writer[*sql.Tx] = (*SQLOutbox)(nil)
	_ Queue           = (*PostgresOutbox)(nil)
	_ Queue           = (*SQLOutbox)(nil)
)

// Postgres returns the outbox in a PostgreSQL database. It does no I/O.
func Postgres(pool *pgxpool.Pool, opts ...Option) *PostgresOutbox {
	tx := func(ctx context.Context, fn func(sqldb.Q) error) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return fn(sqldb.Pgx(tx)) })
	}
	walk := func(ctx context.Context, sql string, args []any, each func(func(...any) error) error) error {
		var b pgx.Batch // one round trip, one transaction
		b.Queue(sqlWalk)
		b.Queue(sql, args...).Query(func(rows pgx.Rows) error { return sqldb.EachPgx(rows, each) })
		return pool.SendBatch(ctx, &b).Close()
	}
	return &PostgresOutbox{queue{newEngine(sqldb.Postgres, opts), tx, sqldb.Pgx(pool), walk}, pool}
}

// Enqueue implements [Writer].
func (o *PostgresOutbox) Enqueue(ctx context.Context, tx pgx.Tx, ms ...*brokers.Message) error {
	return o.enqueue(ctx, sqldb.Pgx(tx), ms)
}

// Begin implements [Writer].
func (o *PostgresOutbox) Begin(ctx context.Context) (pgx.Tx, func(context.Context) error, func(context.Context) error, error) {
	tx, err := o.pool.Begin(ctx)
	if err != nil {
		return nil, nil, nil, err
	}
	return tx, tx.Commit, tx.Rollback, nil
}

// SQLOutbox is a Writer[*sql.Tx] and a Queue through database/sql.
type SQLOutbox struct {
	queue
	db *sql.DB
}

func (o *PostgresOutbox) connections() int { return int(o.pool.Config().MaxConns) }

// connections: on SQLite one connection is the rule, and a relay may share it.
func (o *SQLOutbox) connections() int {
	if o.dialect == sqldb.SQLite {
		return 0
	}
	return o.db.Stats().MaxOpenConnections
}

// PostgresDB returns the outbox in a PostgreSQL database behind database/sql.
func PostgresDB(db *sql.DB, opts ...Option) *SQLOutbox { return newSQL(db, sqldb.Postgres, opts) }

// SQLite returns the outbox in an SQLite database; see inbox.SQLite for how to open
// it.
func SQLite(db *sql.DB, opts ...Option) *SQLOutbox { return newSQL(db, sqldb.SQLite, opts) }

func newSQL(db *sql.DB, d sqldb.Dialect, opts []Option) *SQLOutbox {
	tx := func(ctx context.Context, fn func(sqldb.Q) error) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		if err := fn(sqldb.SQL(tx)); err != nil {
			_ = tx.Rollback()
			return err
		}
		return tx.Commit()
	}
	walk := func(ctx context.Context, sql string, args []any, each func(func(...any) error) error) error {
		if d == sqldb.SQLite {
			return sqldb.SQL(db).Query(ctx, sql, args, each)
		}
		return tx(ctx, func(q sqldb.Q) error {
			if err := q.Query(ctx, sqlWalk, nil, func(func(...any) error) error { return nil }); err != nil {
				return err
			}
			return q.Query(ctx, sql, args, each)
		})
	}
	return &SQLOutbox{queue{newEngine(d, opts), tx, sqldb.SQL(db), walk}, db}
}

// Enqueue implements [Writer].
func (o *SQLOutbox) Enqueue(ctx context.Context, tx *sql.Tx, ms ...*brokers.Message) error {
	return o.enqueue(ctx, sqldb.SQL(tx), ms)
}

// Begin implements [Writer].
func (o *SQLOutbox) Begin(ctx context.Context) (*sql.Tx, func(context.Context) error, func(context.Context) error, error) {
	tx, err := o.db.BeginTx(ctx, nil)
	if err != nil {
		return nil, nil, nil, err
	}
	return tx, func(context.Context) error { return tx.Commit() }, func(context.Context) error { return tx.Rollback() }, nil
}
