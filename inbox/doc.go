// Package inbox keeps, in the user's own database, the record of which messages a
// consumer has dealt with, and the messages that it could not deal with yet.
//
// # Guarantees
//
// For one consumer name and one message ID the effects of a handler that writes
// through the given transaction are committed at most once. The claim, a row in
// processed_messages, is the first statement of that transaction: a concurrent
// duplicate waits for it, and then sees a duplicate, or becomes the first itself.
// Row counts and SQLSTATEs decide, never error texts.
//
// A message that cannot be processed now is kept in held_messages by the
// transaction that records why. Hold and claim of one ID exclude each other.
//
// # What is not guaranteed
//
// Effects outside the transaction (an HTTP call in a handler) may happen any number
// of times. A COMMIT whose answer is lost is neither success nor failure: claim
// the message again to know. After a failover that loses commits, the effects lost
// are as lost as their inbox rows.
//
// The interface [Store] is not stable before version 1.
package inbox
