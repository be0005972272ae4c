package main

import (
	"context"
	"errors"
	"strings"

	"github.com/twiceproof/twiceproof/inbox"
	"github.com/twiceproof/twiceproof/internal/sqldb"
	"github.com/twiceproof/twiceproof/migrations"
	"github.com/twiceproof/twiceproof/outbox"
)

// Exit codes, for scripts. They are listed in the command's documentation.
const (
	exitFailed      = 1
	exitUsage       = 2
	exitNothing     = 3 // nothing matches, or there is no such message
	exitTables      = 4 // tables are missing or old
	exitRefused     = 5 // the database refuses the login or the access
	exitPartly      = 6 // some of the messages could not be changed
	exitInterrupted = 130
)

// usageError marks an error of the command line.
type usageError struct{ error }

var (
	// errNothing: a command that changes things found nothing to change.
	errNothing = errors.New("nothing matches; see what there is with `list`")
	// errPartly: it could not change all that it was to.
	errPartly = errors.New("not all was done")
	// errInterrupted: a signal came between two changes.
	errInterrupted = errors.New("interrupted between two messages: what is done is done whole; give the command again for the rest")
)

// exitCode decides by types and SQLSTATEs, never by texts.
func exitCode(ctx context.Context, err error) int {
	var usage usageError
	var missing *migrations.MissingError
	state := sqldb.State(err)
	is := func(targets ...error) bool {
		for _, t := range targets {
			if errors.Is(err, t) {
				return true
			}
		}
		return false
	}
	switch {
	case errors.As(err, &usage):
		return exitUsage
	case is(errInterrupted), ctx.Err() != nil && is(context.Canceled):
		return exitInterrupted
	case errors.As(err, &missing), state == sqldb.UndefinedTable, state == sqldb.UndefinedColumn, state == sqldb.InvalidSchemaName:
		return exitTables
	case state == "42501", strings.HasPrefix(state, "28"):
		return exitRefused
	case is(errNothing, inbox.ErrNotHeld, outbox.ErrNotParked):
		return exitNothing
	case is(errPartly):
		return exitPartly
	}
	return exitFailed
}
