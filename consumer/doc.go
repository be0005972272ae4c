// Package consumer runs handlers on the messages of a broker, so that every message
// may safely come twice.
//
// For each delivery the runner opens a transaction, claims the message's ID in it,
// calls the handler with that transaction, commits, and only then settles the
// delivery. Duplicates are settled without calling the handler. A handler that
// fails is tried again in place, then the message is held in the database, with a
// growing delay, until it is dead; on every broker alike.
//
// # What handlers must know
//
// Only what goes through the given transaction happens at most once. Everything
// else in a handler may happen again: leave it to an outbox. The transaction
// belongs to the runner: return nil to commit, an error to roll back.
//
// # Order
//
// With ByKey (the default) messages of one Key are handled one at a time, and those
// behind a held message are held too. Order is never better than its source: on a
// shared queue two instances hold two messages of one key at once. RequireOrder
// makes start-up fail there.
package consumer
