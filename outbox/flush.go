package outbox

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/twiceproof/twiceproof/internal/sqldb"
)

// LeftError says what Flush has left behind, each message in one of the numbers.
type LeftError struct {
	// Parked messages wait for a person, Waiting ones for their next try.
	Parked, Waiting int
	// Unsent ones are behind such a message of their key, or the publisher could not
	// send them (see Cause).
	Unsent int
	// Elsewhere is what is in shares of another relay, or of one that died: its lease
	// has to end first.
	Elsewhere int
	// First are up to five parked or waiting messages, with their IDs and errors.
	First []string
	// Cause is why Flush ended early, if it did: the last error of the publisher.
	Cause error
}

// Error implements error.
func (e *LeftError) Error() string {
	s := fmt.Sprintf("messages are left in the outbox: %d parked, %d waiting for another try, %d not sent, %d in shares of other relays",
		e.Parked, e.Waiting, e.Unsent, e.Elsewhere)
	if len(e.First) > 0 {
		s += ": " + strings.Join(e.First, "; ")
	}
	if e.Cause != nil {
		s += ": " + e.Cause.Error()
	}
	return s
}

// Unwrap returns the cause.
func (e *LeftError) Unwrap() error { return e.Cause }

// Flush publishes everything that can be published now, each message at most once
// unless its outcome is unknown, and returns: for commands, tests, and programs
// that stop. It joins the relays that run, if there are some, and leaves them at
// its end. A *LeftError names what is left; nil means that nothing is.
func (r *Relay) Flush(ctx context.Context) error {
	if !r.running.CompareAndSwap(false, true) {
		return errRunning
	}
	defer r.running.Store(false)
	if err, _ := r.q.check(ctx); err != nil {
		return err
	}
	u := r.newRun()
	defer u.end(ctx)
	var cause error
	for ctx.Err() == nil {
		before := r.refused.Load() + r.unknown.Load()
		worked, err := u.step(ctx)
		// A step in which nothing passed is the end, unless it has put messages aside
		// for a later try: then there may be others behind them.
		if !worked && before == r.refused.Load()+r.unknown.Load() {
			cause = err
			break
		}
	}
	if err := errors.Join(u.finishMark(), ctx.Err()); err != nil {
		return errors.Join(err, cause)
	}
	left, err := r.q.left(ctx, u.id)
	switch {
	case err != nil:
		return errors.Join(fmt.Errorf("count what is left: %w", err), cause)
	case left != nil:
		left.Cause = cause
		return left
	}
	return cause
}

func (q queue) left(ctx context.Context, relay string) (*LeftError, error) {
	e := &LeftError{}
	all := 0
	if _, err := sqldb.QueryRow(ctx, q.one, q.sql(sqlLeft), []any{relay}, &all, &e.Parked, &e.Waiting, &e.Elsewhere); err != nil {
		return nil, err
	}
	if all == 0 {
		return nil, nil
	}
	e.Unsent = max(0, all-e.Parked-e.Waiting-e.Elsewhere)
	err := q.one.Query(ctx, q.sql(sqlLeftFirst), nil, func(scan func(...any) error) error {
		var id, why string
		var parked bool
		err := scan(&id, &parked, &why)
		state := "waiting"
		if parked {
			state = "parked"
		}
		e.First = append(e.First, fmt.Sprintf("%s %q (%s)", state, id, why))
		return err
	})
	return e, err
}
