// Package outbox writes messages in the business transaction that they tell of, and
// publishes them afterwards, at least once, with an ID that never changes.
//
// [Writer.Enqueue] inserts rows into outbox_messages inside the caller's transaction: they
// are published if, and only if, it commits. A [Relay] publishes them outside any
// transaction and then deletes them. Any number of relays may run: they divide the
// keys among them, never the rows of one key.
//
// # Order
//
// Messages of one Key are published in the order of their rows, which is the order
// of their transactions where these are serialized before Enqueue, for example by
// locking the business row first. A row that is inserted before the business row is
// locked draws its number too early.
//
// # What is not guaranteed
//
// A relay that dies between publishing and deleting publishes again, with the same
// ID: consumers deduplicate. A message that the broker refuses for good is parked; it
// blocks its key until somebody looks at it.
package outbox
