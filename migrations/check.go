package migrations

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/twiceproof/twiceproof/internal/sqldb"
)

// MissingError lists what Check found missing.
type MissingError struct {
	Dialect Dialect
	Schema  string   // "" is the search_path
	Missing []string // "table held_messages", "column outbox_messages.share"
}

// Error implements error.
func (e *MissingError) Error() string {
	where := ""
	if e.Schema != "" {
		where = " in schema " + e.Schema
	}
	return fmt.Sprintf("the database lacks%s: %s; run `twiceproof migrate up`, or apply the files of `twiceproof migrate print --dialect %s` with your own tool",
		where, strings.Join(e.Missing, ", "), e.Dialect)
}

var (
	createTable = regexp.MustCompile(`(?s)CREATE TABLE IF NOT EXISTS (\w+) \((.*?)\n\)`)
	columnName  = regexp.MustCompile(`^\t(\w+) +[A-Za-z]`)
)

// wanted is the tables and columns that the migrations themselves declare.
func wanted(d Dialect) (order []string, columns map[string][]string) {
	columns = map[string][]string{}
	for _, m := range All(d) {
		for _, t := range createTable.FindAllStringSubmatch(m.SQL, -1) {
			order = append(order, t[1])
			for line := range strings.SplitSeq(t[2], "\n") {
				if c := columnName.FindStringSubmatch(line); c != nil && c[1] != "PRIMARY" {
					columns[t[1]] = append(columns[t[1]], c[1])
				}
			}
		}
	}
	return order, columns
}

// Check compares the tables and columns of the database with the migrations and
// returns a *MissingError that lists what is missing, nil when nothing is.
func Check(ctx context.Context, db DB, opts ...Option) error {
	o, err := apply(db.dialect, opts)
	if err != nil {
		return fmt.Errorf("check the tables: %w", err)
	}
	order, columns := wanted(db.dialect)
	var missing []string
	err = db.session(ctx, func(q sqldb.Q) error {
		for _, table := range order {
			have, err := columnsOf(ctx, q, db.dialect, o.schema, table)
			if err != nil {
				return err
			}
			if len(have) == 0 {
				missing = append(missing, "table "+table)
				continue
			}
			for _, c := range columns[table] {
				if !slices.Contains(have, c) {
					missing = append(missing, "column "+table+"."+c)
				}
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("check the tables: %w", err)
	}
	if len(missing) > 0 {
		return &MissingError{db.dialect, o.schema, missing}
	}
	return nil
}

func columnsOf(ctx context.Context, q sqldb.Q, d Dialect, schema, table string) ([]string, error) {
	query, args := `SELECT name FROM pragma_table_info(?1)`, []any{table}
	if d == Postgres {
		// to_regclass follows the search_path as the stores' own statements do.
		name := sqldb.QuoteIdent(table)
		if schema != "" {
			name = sqldb.QuoteIdent(schema) + "." + name
		}
		query, args = `SELECT attname::text FROM pg_attribute
			WHERE attrelid = to_regclass($1) AND attnum > 0 AND NOT attisdropped`, []any{name}
	}
	var names []string
	err := q.Query(ctx, query, args, func(scan func(...any) error) error {
		var n string
		err := scan(&n)
		names = append(names, n)
		return err
	})
	return names, err
}
