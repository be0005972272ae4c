package chaos

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/jackc/pgx/v5/stdlib" // PostgreSQL through database/sql
	_ "modernc.org/sqlite"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/inbox"
	"github.com/twiceproof/twiceproof/internal/sqldb"
	"github.com/twiceproof/twiceproof/migrations"
	"github.com/twiceproof/twiceproof/outbox"
)

// Kinds of databases.
const (
	onPostgres   = "postgres"   // pgx
	onPostgresDB = "postgresdb" // database/sql
	onSQLite     = "sqlite"
)

// database is a store and an outbox with what the tests do beside them.
type database[Tx any] struct {
	store  inbox.Store[Tx]
	outbox interface {
		outbox.Writer[Tx]
		outbox.Queue
	}
	exec  func(ctx context.Context, tx Tx, sql string, args ...any) error // in a transaction
	count func(ctx context.Context, sql string) (int, error)
	text  func(ctx context.Context, sql string) (string, error)
	setup func(ctx context.Context, schema string) error // all tables
	close func()
}

func openPostgres(ctx context.Context, dsn string, conns int32) (*database[pgx.Tx], error) {
	cfg, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return nil, err
	}
	cfg.MaxConns = conns
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return nil, err
	}
	return &database[pgx.Tx]{
		store: inbox.Postgres(pool), outbox: outbox.Postgres(pool), close: pool.Close,
		exec: func(ctx context.Context, tx pgx.Tx, q string, args ...any) error {
			_, err := tx.Exec(ctx, sqldb.Postgres.SQL(q, ""), args...)
			return err
		},
		count: func(ctx context.Context, q string) (n int, err error) {
			err = pool.QueryRow(ctx, q).Scan(&n)
			return n, err
		},
		text: func(ctx context.Context, q string) (s string, err error) {
			err = pool.QueryRow(ctx, q).Scan(&s)
			return s, err
		},
		setup: func(ctx context.Context, schema string) error {
			if _, err := migrations.Up(ctx, migrations.Pool(pool)); err != nil {
				return err
			}
			_, err := pool.Exec(ctx, schema)
			return err
		},
	}, nil
}

func openSQL(dsn, kind string) (*database[*sql.Tx], error) {
	driver, dialect, conns := "pgx", sqldb.Postgres, 10
	if kind == onSQLite {
		driver, dialect, conns = "sqlite", sqldb.SQLite, 1
	}
	db, err := sql.Open(driver, dsn)
	if err != nil {
		return nil, err
	}
	db.SetMaxOpenConns(conns)
	d := &database[*sql.Tx]{
		close: func() { _ = db.Close() },
		exec: func(ctx context.Context, tx *sql.Tx, q string, args ...any) error {
			_, err := tx.ExecContext(ctx, dialect.SQL(q, ""), args...)
			return err
		},
		count: func(ctx context.Context, q string) (n int, err error) {
			err = db.QueryRowContext(ctx, q).Scan(&n)
			return n, err
		},
		setup: func(ctx context.Context, schema string) error {
			if _, err := migrations.Up(ctx, migrations.SQLDB(db, dialect)); err != nil {
				return err
			}
			_, err := db.ExecContext(ctx, schema)
			return err
		},
	}
	if kind == onSQLite {
		d.store, d.outbox = inbox.SQLite(db), outbox.SQLite(db)
	} else {
		d.store, d.outbox = inbox.PostgresDB(db), outbox.PostgresDB(db)
	}
	return d, nil
}

// enqueue puts messages into the outbox in one transaction.
func (d *database[Tx]) enqueue(ctx context.Context, ms ...*brokers.Message) error {
	return outbox.InTx(ctx, d.outbox, func(ctx context.Context, tx Tx) error { return d.outbox.Enqueue(ctx, tx, ms...) })
}

// tables is a database whose transaction type does not matter.
type tables interface {
	enqueue(ctx context.Context, ms ...*brokers.Message) error
	number(ctx context.Context, sql string) (int, error)
	prepare(ctx context.Context, schema string) error
	shut()
}

func (d *database[Tx]) number(ctx context.Context, q string) (int, error) { return d.count(ctx, q) }
func (d *database[Tx]) prepare(ctx context.Context, schema string) error  { return d.setup(ctx, schema) }
func (d *database[Tx]) shut()                                             { d.close() }

func openTables(ctx context.Context, kind, dsn string) (tables, error) {
	switch kind {
	case onPostgres:
		return openPostgres(ctx, dsn, 10)
	case onPostgresDB, onSQLite:
		return openSQL(dsn, kind)
	}
	return nil, errors.Join(fmt.Errorf("unknown database %q", kind))
}
