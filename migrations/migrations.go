// Package migrations holds the tables of Twiceproof as plain, numbered SQL, one
// folder a dialect, embedded, and applies them.
//
// [Up] is safe when many processes start it at once, and when it runs again: all
// statements are idempotent, and it takes a lock. The files are plain SQL, with goose's
// annotation and golang-migrate's names: both tools apply them from [FS] (tested with
// goose v3.30 and golang-migrate v4.20 on both dialects), each writes down its own
// versions, and one may take over from the other. There are no down migrations.
// [Check] looks at the tables themselves, not at a version number, so it tells the
// truth whoever applied them.
package migrations

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/twiceproof/twiceproof/internal/sqldb"
)

//go:embed postgres/*.sql sqlite/*.sql
var files embed.FS

// Dialect is the SQL of a database.
type Dialect = sqldb.Dialect

// The dialects.
const (
	Postgres = sqldb.Postgres
	SQLite   = sqldb.SQLite
)

// FS returns the migrations of a dialect, for goose, golang-migrate and others.
func FS(d Dialect) fs.FS {
	sub, err := fs.Sub(files, d.String())
	if err != nil {
		panic(err) // the folders are compiled in
	}
	return sub
}

// Migration is one file.
type Migration struct {
	Version int
	Name    string // the file's name without number and ending
	SQL     string
}

// All returns the migrations of a dialect in order.
func All(d Dialect) []Migration {
	names, err := fs.Glob(files, d.String()+"/*.up.sql")
	if err != nil {
		panic(err) // the pattern is constant
	}
	slices.Sort(names)
	ms := make([]Migration, 0, len(names))
	for _, n := range names {
		text, err := files.ReadFile(n)
		if err != nil {
			panic(err) // compiled in
		}
		base := strings.TrimSuffix(n[strings.LastIndexByte(n, '/')+1:], ".up.sql")
		number, name, _ := strings.Cut(base, "_")
		version, err := strconv.Atoi(number)
		if err != nil {
			panic(err) // a file without a number does not pass the tests
		}
		ms = append(ms, Migration{version, name, string(text)})
	}
	return ms
}

// DB is a database to migrate; made by [Pool] or [SQLDB].
type DB struct {
	dialect Dialect
	// session runs fn on one connection.
	session func(ctx context.Context, fn func(q sqldb.Q) error) error
}

// Pool is a PostgreSQL database behind a pgx pool.
func Pool(pool *pgxpool.Pool) DB {
	return DB{Postgres, func(ctx context.Context, fn func(sqldb.Q) error) error {
		return pool.AcquireFunc(ctx, func(c *pgxpool.Conn) error { return fn(sqldb.Pgx(c)) })
	}}
}

// Conn is a PostgreSQL database behind one pgx connection.
func Conn(c *pgx.Conn) DB {
	return DB{Postgres, func(_ context.Context, fn func(sqldb.Q) error) error { return fn(sqldb.Pgx(c)) }}
}

// SQLDB is a database behind database/sql.
func SQLDB(db *sql.DB, d Dialect) DB {
	return DB{d, func(ctx context.Context, fn func(sqldb.Q) error) error {
		c, err := db.Conn(ctx)
		if err != nil {
			return err
		}
		defer c.Close()
		return fn(sqldb.SQL(c))
	}}
}

// Option changes where the tables are.
type Option func(*options)

type options struct{ schema string }

// Schema puts the tables into a schema of their own, which Up creates. PostgreSQL
// only. The default is the connection's search_path.
func Schema(name string) Option { return func(o *options) { o.schema = name } }

// lockKey is the advisory lock that Up takes: "twicepf" as a number.
const lockKey = 0x74776963657066

const versionTable = `CREATE TABLE IF NOT EXISTS twiceproof_migrations (
	version integer PRIMARY KEY, name text NOT NULL, applied_at text NOT NULL)`

// Up applies what is missing, in one transaction, and returns it. On PostgreSQL it
// waits for another Up until ctx ends, on SQLite for the write lock for 30 s at most.
func Up(ctx context.Context, db DB, opts ...Option) ([]Migration, error) {
	o, err := apply(db.dialect, opts)
	if err != nil {
		return nil, fmt.Errorf("migrate: %w", err)
	}
	var done []Migration
	err = db.session(ctx, func(q sqldb.Q) (err error) {
		if err := begin(ctx, q, db.dialect, o); err != nil {
			return err
		}
		defer func() {
			if err != nil {
				_, _ = q.Exec(context.WithoutCancel(ctx), "ROLLBACK")
			}
		}()
		if done, err = applyMissing(ctx, q, db.dialect); err != nil {
			return err
		}
		if db.dialect == SQLite {
			return execBusy(ctx, q, "COMMIT")
		}
		_, err = q.Exec(ctx, "COMMIT")
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("migrate: %w", err)
	}
	return done, nil
}

// busyWait is how long Up waits for SQLite's write lock.
const busyWait = 30 * time.Second

// execBusy is Exec for SQLite, which answers at once that another connection writes
// where no busy_timeout is set.
func execBusy(ctx context.Context, q sqldb.Q, stmt string) error {
	end, pause := time.Now().Add(busyWait), time.Millisecond
	for {
		_, err := q.Exec(ctx, stmt)
		if !sqldb.Busy(err) {
			return err
		}
		t := time.NewTimer(pause)
		select {
		case <-t.C:
			pause = min(2*pause, 100*time.Millisecond)
		case <-ctx.Done():
			t.Stop()
			return fmt.Errorf("another connection writes to the database: %w", errors.Join(ctx.Err(), err))
		}
		if time.Now().After(end) {
			return fmt.Errorf("another connection has been writing to the database for %s; end it and try again: %w", busyWait, err)
		}
	}
}

func begin(ctx context.Context, q sqldb.Q, d Dialect, o options) error {
	if d == SQLite {
		return execBusy(ctx, q, "BEGIN IMMEDIATE")
	}
	if _, err := q.Exec(ctx, "BEGIN"); err != nil {
		return err
	}
	stmts := []string{fmt.Sprintf("SELECT pg_advisory_xact_lock(%d)", int64(lockKey))}
	if o.schema != "" {
		id := sqldb.QuoteIdent(o.schema)
		stmts = append(stmts, "CREATE SCHEMA IF NOT EXISTS "+id, "SET LOCAL search_path = "+id)
	}
	for _, s := range stmts {
		if _, err := q.Exec(ctx, s); err != nil {
			_, _ = q.Exec(context.WithoutCancel(ctx), "ROLLBACK")
			return err
		}
	}
	return nil
}

func applyMissing(ctx context.Context, q sqldb.Q, d Dialect) (done []Migration, err error) {
	if _, err := q.Exec(ctx, versionTable); err != nil {
		return nil, err
	}
	applied := map[int]bool{}
	err = q.Query(ctx, "SELECT version FROM twiceproof_migrations", nil, func(scan func(...any) error) error {
		var v int
		err := scan(&v)
		applied[v] = true
		return err
	})
	if err != nil {
		return nil, err
	}
	now := "now()::text"
	if d == SQLite {
		now = "datetime('now')"
	}
	for _, m := range All(d) {
		if applied[m.Version] {
			continue
		}
		if _, err := q.Exec(ctx, m.SQL); err != nil {
			return nil, fmt.Errorf("%04d_%s: %w", m.Version, m.Name, err)
		}
		insert := fmt.Sprintf("INSERT INTO twiceproof_migrations VALUES (%d, '%s', %s)", m.Version, m.Name, now)
		if _, err := q.Exec(ctx, insert); err != nil {
			return nil, err
		}
		done = append(done, m)
	}
	return done, nil
}

func apply(d Dialect, opts []Option) (options, error) {
	var o options
	for _, f := range opts {
		f(&o)
	}
	if o.schema != "" && d == SQLite {
		return o, errors.New("SQLite has no schemas: leave Schema out, and give each schema a file of its own")
	}
	return o, nil
}
