package sqldb

import (
	"errors"
	"reflect"
	"strings"
)

// State returns the SQLSTATE that err carries, or "". It knows every driver whose
// error has a SQLState method (pgx, lib/pq).
func State(err error) string {
	var s interface{ SQLState() string }
	if errors.As(err, &s) {
		return s.SQLState()
	}
	return ""
}

// SQLSTATEs that decide something.
const (
	LockNotAvailable     = "55P03"
	SerializationFailure = "40001"
	DeadlockDetected     = "40P01"
	InFailedTransaction  = "25P02"
	UndefinedTable       = "42P01"
	UndefinedColumn      = "42703"
	InvalidSchemaName    = "3F000"
	QueryCanceled        = "57014"
	InvalidParameter     = "22023"
)

// Rerun reports whether err is a serialization failure or a deadlock: the
// transaction is gone through no fault of its own.
func Rerun(err error) bool {
	s := State(err)
	return s == SerializationFailure || s == DeadlockDetected
}

// CommitUncertain reports whether an error of COMMIT leaves open whether it was
// done: no SQLSTATE (the answer did not come), or a state that says so itself.
func CommitUncertain(err error) bool {
	s := State(err)
	return s == "" || s == "40003" || strings.HasPrefix(s, "08") || strings.HasPrefix(s, "57P")
}

// sqliteCode returns SQLite's primary result code in err, or 0. modernc.org/sqlite
// has a Code method; github.com/mattn/go-sqlite3 a Code field.
func sqliteCode(err error) int {
	for e := err; e != nil; e = errors.Unwrap(e) {
		if c, ok := e.(interface{ Code() int }); ok {
			return c.Code() & 0xff
		}
		v := reflect.ValueOf(e)
		if v.Kind() == reflect.Pointer && !v.IsNil() {
			v = v.Elem()
		}
		if v.Kind() == reflect.Struct {
			if f := v.FieldByName("Code"); f.IsValid() && f.CanInt() {
				return int(f.Int()) & 0xff
			}
		}
	}
	return 0
}

// Busy reports whether err is SQLite's BUSY or LOCKED: another connection writes.
func Busy(err error) bool {
	c := sqliteCode(err)
	return c == 5 || c == 6
}
