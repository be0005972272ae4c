//go:build twiceproof_claimapart && !twiceproof_ackfirst

package demo

import (
	"context"
	"errors"

	"github.com/google/uuid"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/inbox"
)

// Duplicates is the part of the messages that the demo's broker delivers twice.
const Duplicates = 1.0

// breakRunner makes the mistake of claiming outside the handler's transaction: the
// message is looked up first, the effect is committed by itself, and the claim
// follows with the acknowledgement. A crash in between doubles the effect.
func breakRunner[Tx any](s inbox.Store[Tx], src brokers.Source) (inbox.Store[Tx], brokers.Source) {
	return claimApart[Tx]{s}, claimLate[Tx]{src, s}
}

type claimApart[Tx any] struct{ inbox.Store[Tx] }

// SingleWriter hands on what consumer.New asks of a store.
func (c claimApart[Tx]) SingleWriter() bool {
	w, ok := c.Store.(interface{ SingleWriter() bool })
	return ok && w.SingleWriter()
}

func (c claimApart[Tx]) Begin(ctx context.Context, u inbox.Unit) (inbox.Attempt[Tx], []inbox.Verdict, error) {
	look, vs, err := c.Store.Begin(ctx, u)
	if err != nil || look == nil {
		return look, vs, err
	}
	if err := look.Rollback(ctx); err != nil {
		return nil, nil, err
	}
	it := *u.Items[0]
	it.ID = uuid.NewString() // the transaction has a claim, but of nothing
	u.Items = []*inbox.Item{&it}
	return c.Store.Begin(ctx, u)
}

type claimLate[Tx any] struct {
	brokers.Source
	store inbox.Store[Tx]
}

func (c claimLate[Tx]) Settle(ctx context.Context, ss ...brokers.Settlement) []error {
	for _, s := range ss {
		if s.Verb != brokers.Done {
			continue
		}
		if err := c.claim(ctx, s.Delivery); err != nil {
			errs := make([]error, len(ss))
			for i := range errs {
				errs[i] = err
			}
			return errs
		}
	}
	return c.Source.Settle(ctx, ss...)
}

func (c claimLate[Tx]) claim(ctx context.Context, d *brokers.Delivery) error {
	it, err := inbox.NewItem(&d.Message, d.Coordinates, nil)
	if err != nil {
		return err
	}
	a, _, err := c.store.Begin(ctx, inbox.Unit{Consumer: consumerName, Items: []*inbox.Item{it}})
	if err != nil || a == nil {
		return err
	}
	if r, err := a.Commit(ctx); r != inbox.CommitYes {
		return errors.Join(errors.New("the late claim failed"), err)
	}
	return nil
}
