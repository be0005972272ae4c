// Package sqldb is the little that the stores of Twiceproof need to write one SQL
// text for PostgreSQL and SQLite and run it through pgx or database/sql: a
// dialect with placeholders for what differs, a narrow query interface, and error
// codes without importing a driver.
package sqldb

import (
	"regexp"
	"strconv"
	"strings"
	"time"
)

// Dialect is the SQL a database speaks.
type Dialect uint8

// The dialects.
const (
	Postgres Dialect = iota + 1
	SQLite
)

// String returns the dialect's name, which is also the folder of its migrations.
func (d Dialect) String() string {
	if d == SQLite {
		return "sqlite"
	}
	return "postgres"
}

var (
	placeholder = regexp.MustCompile(`\{(\w+)(?::([^}]*))?\}`)
	parameter   = regexp.MustCompile(`\$(\d+)`)
)

// SQL renders text for the dialect. Placeholders:
//
//	{s}          the schema with its dot, or nothing
//	{now}        the time; PostgreSQL's own clock, Go's for SQLite (see [Now])
//	{began}      the time when the statement began: the same wherever it stands in it,
//	             where {now} goes on while the statement runs
//	{after:$1}   the time in $1 microseconds
//	{age:col}    microseconds since col
//	{micros:col} col in microseconds since 1970
//	{lock}       FOR UPDATE, and {skip} with SKIP LOCKED; nothing on SQLite, where
//	             a write transaction is alone
//	{bytes:$1}, {text:$1}, {int:$1}   a parameter whose type cannot be inferred
//	{pg:…} and {lite:…}  text for one dialect only
func (d Dialect) SQL(text, schema string) string {
	prefix := ""
	if schema != "" {
		prefix = QuoteIdent(schema) + "."
	}
	out := placeholder.ReplaceAllStringFunc(text, func(m string) string {
		p := placeholder.FindStringSubmatch(m)
		return d.render(p[1], p[2], prefix)
	})
	if d == SQLite {
		out = parameter.ReplaceAllString(out, "?$1")
	}
	return out
}

func (d Dialect) render(name, arg, prefix string) string {
	pg := d == Postgres
	pick := func(postgres, sqlite string) string {
		if pg {
			return postgres
		}
		return sqlite
	}
	switch name {
	case "s":
		return prefix
	case "now":
		return pick("clock_timestamp()", nowMark)
	case "began":
		return pick("statement_timestamp()", nowMark)
	case "after":
		return pick("(clock_timestamp() + "+arg+"::bigint * interval '1 microsecond')", "("+nowMark+" + "+arg+")")
	case "age":
		return pick("(extract(epoch FROM clock_timestamp() - "+arg+") * 1000000)::bigint", "("+nowMark+" - "+arg+")")
	case "micros":
		return pick("(extract(epoch FROM "+arg+") * 1000000)::bigint", arg)
	case "lock":
		return pick("FOR UPDATE", "")
	case "skip":
		return pick("FOR UPDATE SKIP LOCKED", "")
	case "bytes":
		return pick(arg+"::bytea", arg)
	case "text":
		return pick(arg+"::text", arg)
	case "int":
		return pick(arg+"::bigint", arg)
	case "pg":
		return pick(arg, "")
	case "lite":
		return pick("", arg)
	}
	panic("sqldb: unknown placeholder {" + name + "}")
}

// nowMark stands in rendered SQLite text for the time, which is put in for each
// call: SQLite's own clock is not the program's (and stays real under fake time).
const nowMark = "/*now*/0"

// Now puts the current time, in microseconds since 1970, into rendered SQLite text.
func Now(sql string) string {
	if !strings.Contains(sql, nowMark) {
		return sql
	}
	return strings.ReplaceAll(sql, nowMark, strconv.FormatInt(time.Now().UnixMicro(), 10))
}

// QuoteIdent quotes an identifier.
func QuoteIdent(s string) string { return `"` + strings.ReplaceAll(s, `"`, `""`) + `"` }
