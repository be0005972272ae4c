// Package outbox writes messages in the business transaction that they tell of, and
// publishes them afterwards, at least once, with an ID that never changes.
//
// [Writer.Enqueue] inserts rows into outbox_messages inside the caller's transaction:
// they are published if, and only if, it commits. A [Relay] publishes them outside any
// transaction and then deletes them, or marks them ([KeepPublished]). [InTx] is begin,
// commit and wake the relay in one.
//
// # What is guaranteed
//
//   - A message of a committed transaction is published, whatever crashes: the broker
//     has accepted it before its row goes. A rolled-back one never is.
//   - All bytes arrive as they were enqueued: key, type, headers with their order and
//     repeats, payload (nil and empty are two things), and every copy has the same ID.
//   - Messages of one Key are first published in the order of their rows, over any
//     number of relays. A key stops at its first message that is not accepted; no
//     other key waits for it. Late commits are not skipped: there is no cursor.
//   - Relays divide the keys into 256 shares. Each share has one owner at a time, with a
//     lease and a token on the database's clock; what a relay writes down under an
//     ownership that it has lost hits nothing, and is counted ([RelayStats].LeaseLost).
//   - A message that the broker refuses for good, or too often, is parked and blocks its
//     key alone. An outage parks nothing and counts no attempt: see
//     [RelayConfig].MaxAttempts.
//   - No session state, no LISTEN, no session-level lock, nothing that a transaction
//     pooler breaks; and no transaction is open while the broker is spoken to.
//
// # Order
//
// The order of the rows is the order of their transactions where these are serialized
// before Enqueue, for example by locking the business row first. A row that is
// inserted before the business row is locked draws its number too early; where that
// cannot be helped, use [SerializeKeys].
//
// # What is not guaranteed
//
// Exactly once: a relay that dies between publishing and deleting, or whose lease runs
// out meanwhile, is followed by another one that publishes again, with the same ID:
// consumers deduplicate. Such a repeat may come after later messages of its key: the
// order of first occurrences holds, the last record of a key may be an old one, which
// matters for compacted topics. Order among messages of different keys, or without one.
//
// docs/outbox.md tells how to run it, and which faults of other outboxes are tested.
package outbox
