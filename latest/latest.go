// Package latest is for events that carry a version of what they are about ("the price
// of product 17, version 4"): apply one only if it is newer than what was applied.
//
// Deduplication by message ID makes each event take effect once. It does not help where
// different events of one entity come in the wrong order, as they do on a shared queue,
// after a replay, or from two producers: then the older one would overwrite the newer.
// [Versions.Apply] decides inside the handler's transaction:
//
//	switch v, err := prices.Apply(ctx, tx, e.Body.Product, e.Body.Version); {
//	case err != nil:
//		return err
//	case v != latest.Newer:
//		return nil // late or repeated: nothing to do
//	}
//	_, err := tx.Exec(ctx, `UPDATE …`)
//
// What it guarantees: the version is recorded in the transaction, with the effect or
// not at all; transactions about one entity wait for each other, so that versions only
// rise; gaps are allowed. What it does not: it holds nothing back until a missing
// version comes, and it needs versions that rise (a counter, or a time in microseconds
// from one clock).
//
// Where the entity has a row of its own, a version column does the same without this
// package, and without a second row:
//
//	UPDATE products SET cents = $2, version = $3 WHERE id = $1 AND version < $3
//
// and no row affected means late or repeated.
package latest

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/twiceproof/twiceproof/internal/sqldb"
)

// Verdict is how a version compares with what was applied.
type Verdict uint8

const (
	// Newer: it is recorded; apply the event.
	Newer Verdict = iota + 1
	// Same: this version was applied.
	Same
	// Older: a later version was applied.
	Older
)

// String returns the verdict's name in lower case.
func (v Verdict) String() string {
	switch v {
	case Newer:
		return "newer"
	case Same:
		return "same"
	case Older:
		return "older"
	}
	return fmt.Sprintf("verdict(%d)", uint8(v))
}

// Versions records the newest versions of the entities of one scope, in the table
// entity_versions of the handler's database. It does no I/O but in Apply and is safe for
// concurrent use.
type Versions[Tx any] struct {
	scope       string
	apply, read string
	q           func(tx Tx) sqldb.Q
}

// Option configures Versions.
type Option func(*options)

type options struct{ schema string }

// Schema says which PostgreSQL schema has the table; default: the search_path.
func Schema(name string) Option { return func(o *options) { o.schema = name } }

// Postgres returns the versions of a scope, for handlers that get a pgx.Tx. Two
// consumers that apply the same events to different tables need different scopes.
func Postgres(scope string, opts ...Option) *Versions[pgx.Tx] {
	return newVersions(scope, sqldb.Postgres, opts, func(tx pgx.Tx) sqldb.Q { return sqldb.Pgx(tx) })
}

// PostgresDB is Postgres for handlers that get a *sql.Tx.
func PostgresDB(scope string, opts ...Option) *Versions[*sql.Tx] {
	return newVersions(scope, sqldb.Postgres, opts, func(tx *sql.Tx) sqldb.Q { return sqldb.SQL(tx) })
}

// SQLite returns the versions of a scope in an SQLite database.
func SQLite(scope string) *Versions[*sql.Tx] {
	return newVersions(scope, sqldb.SQLite, nil, func(tx *sql.Tx) sqldb.Q { return sqldb.SQL(tx) })
}

const (
	// A version that is not newer locks the row as well: it is judged by what is committed.
	sqlApply = `INSERT INTO {s}entity_versions AS v (scope, entity, version, updated_at) VALUES ($1, $2, $3, {now})
		ON CONFLICT (scope, entity) DO UPDATE SET version = $3, updated_at = {now} WHERE v.version < $3`
	sqlRead = `SELECT version FROM {s}entity_versions WHERE scope = $1 AND entity = $2`
)

func newVersions[Tx any](scope string, d sqldb.Dialect, opts []Option, q func(Tx) sqldb.Q) *Versions[Tx] {
	var o options
	for _, opt := range opts {
		opt(&o)
	}
	return &Versions[Tx]{scope: scope, apply: d.SQL(sqlApply, o.schema), read: d.SQL(sqlRead, o.schema), q: q}
}

// Apply compares version with the newest one of the entity and records it if it is
// newer. Entities are compared byte for byte. An error is the database's; return it, so
// that the message is tried again.
func (v *Versions[Tx]) Apply(ctx context.Context, tx Tx, entity string, version int64) (Verdict, error) {
	if entity == "" {
		return 0, errors.New("latest: the entity is empty: name what the version is of")
	}
	q := v.q(tx)
	n, err := q.Exec(ctx, v.apply, v.scope, entity, version)
	if err != nil {
		return 0, failed(err)
	}
	if n == 1 {
		return Newer, nil
	}
	var have int64
	if _, err := sqldb.QueryRow(ctx, q, v.read, []any{v.scope, entity}, &have); err != nil {
		return 0, failed(err)
	}
	if have == version {
		return Same, nil
	}
	return Older, nil
}

func failed(err error) error {
	if sqldb.State(err) == sqldb.UndefinedTable {
		return fmt.Errorf("the table entity_versions is missing; run `twiceproof migrate up`: %w", err)
	}
	return fmt.Errorf("compare the version: %w", err)
}
