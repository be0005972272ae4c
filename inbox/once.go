package inbox

import (
	"context"
	"errors"
	"fmt"
)

// Once runs fn in a transaction that first claims id for consumer, and commits: the
// whole of the framework in one call, for a webhook, a cron job, or a consumer that
// you already run.
//
// Verdicts: Claimed (fn ran and is committed), Duplicate (it was done before), Held
// (a message of that ID is held). With an error the verdict is 0 and nothing is
// stored, except for ErrCommitUnknown: call Once again to know, with the same id.
func Once[Tx any](ctx context.Context, s Store[Tx], consumer, id string, fn func(ctx context.Context, tx Tx) error) (Verdict, error) {
	stored, err := StoredID(id)
	if err != nil {
		return 0, err
	}
	a, vs, err := s.Begin(ctx, Unit{Consumer: consumer, Items: []*Item{{ID: stored}}})
	if err != nil {
		return 0, err
	}
	if a == nil {
		return vs[0], nil
	}
	done := false
	defer func() {
		if !done { // fn panicked
			_ = a.Rollback(context.WithoutCancel(ctx))
		}
	}()
	err = fn(ctx, a.Tx())
	done = true
	if err != nil {
		return 0, errors.Join(err, ignoreEnded(a.Rollback(context.WithoutCancel(ctx))))
	}
	switch result, err := a.Commit(context.WithoutCancel(ctx)); result {
	case CommitYes:
		return Claimed, nil
	default:
		return 0, fmt.Errorf("commit: %w", err)
	}
}
