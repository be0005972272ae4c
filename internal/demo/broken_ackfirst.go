//go:build twiceproof_ackfirst && !twiceproof_claimapart

package demo

import (
	"context"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/inbox"
)

// Duplicates is the part of the messages that the demo's broker delivers twice: none
// here, since a second copy would make good for the one that is lost.
const Duplicates = 0.0

// breakRunner makes the mistake of acknowledging before the commit: what a crash
// finds in hand is lost.
func breakRunner[Tx any](s inbox.Store[Tx], src brokers.Source) (inbox.Store[Tx], brokers.Source) {
	return s, ackFirst{src}
}

type ackFirst struct{ brokers.Source }

func (a ackFirst) Receive(ctx context.Context, n int) ([]*brokers.Delivery, error) {
	ds, err := a.Source.Receive(ctx, n)
	ss := make([]brokers.Settlement, len(ds))
	for i, d := range ds {
		ss[i] = brokers.Settlement{Delivery: d, Verb: brokers.Done}
	}
	a.Source.Settle(context.WithoutCancel(ctx), ss...)
	return ds, err
}

func (a ackFirst) Settle(context.Context, ...brokers.Settlement) []error { return nil }
