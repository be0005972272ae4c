package sqldb

import (
	"context"
	"database/sql"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Q runs statements in one transaction or on one connection.
type Q interface {
	// Exec returns the number of rows affected.
	Exec(ctx context.Context, sql string, args ...any) (int64, error)
	// Query calls each for every row. Rows are read to the end or closed.
	Query(ctx context.Context, sql string, args []any, each func(scan func(dest ...any) error) error) error
}

// QueryRow scans the only row of a query, and reports whether there was one.
func QueryRow(ctx context.Context, q Q, sql string, args []any, dest ...any) (found bool, err error) {
	err = q.Query(ctx, sql, args, func(scan func(...any) error) error {
		found = true
		return scan(dest...)
	})
	return found, err
}

// PgxQuerier is what pgx.Tx, *pgx.Conn and *pgxpool.Pool have in common.
type PgxQuerier interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// Pgx returns a Q on a pgx connection, transaction or pool.
func Pgx(c PgxQuerier) Q { return pgxQ{c} }

type pgxQ struct{ c PgxQuerier }

func (q pgxQ) Exec(ctx context.Context, sql string, args ...any) (int64, error) {
	tag, err := q.c.Exec(ctx, sql, args...)
	return tag.RowsAffected(), err
}

func (q pgxQ) Query(ctx context.Context, sql string, args []any, each func(func(...any) error) error) error {
	rows, err := q.c.Query(ctx, sql, args...)
	if err != nil {
		return err
	}
	defer rows.Close()
	return EachPgx(rows, each)
}

// EachPgx calls each for every row and returns the rows' error.
func EachPgx(rows pgx.Rows, each func(func(...any) error) error) error {
	for rows.Next() {
		if err := each(rows.Scan); err != nil {
			return err
		}
	}
	return rows.Err()
}

// SQLQuerier is what *sql.DB, *sql.Conn and *sql.Tx have in common.
type SQLQuerier interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

// SQL returns a Q on a database/sql handle.
func SQL(c SQLQuerier) Q { return sqlQ{c} }

type sqlQ struct{ c SQLQuerier }

func (q sqlQ) Exec(ctx context.Context, sql string, args ...any) (int64, error) {
	res, err := q.c.ExecContext(ctx, Now(sql), args...)
	if err != nil {
		return 0, err
	}
	return res.RowsAffected()
}

func (q sqlQ) Query(ctx context.Context, sql string, args []any, each func(func(...any) error) error) error {
	rows, err := q.c.QueryContext(ctx, Now(sql), args...)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		if err := each(rows.Scan); err != nil {
			return err
		}
	}
	return rows.Err()
}
