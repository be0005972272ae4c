//go:build !twiceproof_ackfirst && !twiceproof_claimapart

package demo

import (
	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/inbox"
)

// Duplicates is the part of the messages that the demo's broker delivers twice.
const Duplicates = 1.0

// breakRunner returns what it is given. The build tags twiceproof_ackfirst and
// twiceproof_claimapart put a mistake here instead, to show that the demo's counts
// find it: what never fails proves nothing.
func breakRunner[Tx any](s inbox.Store[Tx], src brokers.Source) (inbox.Store[Tx], brokers.Source) {
	return s, src
}
