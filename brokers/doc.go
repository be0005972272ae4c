// Package brokers is the seam between Twiceproof and the outside world of
// message brokers: the [Message] a producer wrote, the [Delivery] a broker hands
// over, the [Source] deliveries come from and are settled on, and the
// [Publisher] messages leave by.
//
// An adapter (brokers/rabbitmq, brokers/memory, …) knows its broker and nothing
// else. It does not deduplicate, retry, count attempts or talk to a database:
// that is the work of packages inbox, outbox and consumer, once, for every
// broker. What brokers cannot do alike is stated in [Capabilities], never
// emulated, and brokertest verifies each statement.
//
// # Guarantees of a Source
//
//   - Every delivery handed over by Receive is settled by exactly one Settle, or
//     goes back to the broker when the Source is closed or loses its ownership.
//   - A delivery is settled under the ownership it was received under. When that
//     ownership is gone, Settle answers [ErrOwnershipLost] and nothing is sent to
//     the broker.
//   - The Source keeps leases (visibility timeouts, group membership) alive by
//     itself from Receive to Settle, and ends a delivery's Context, with cause
//     [ErrOwnershipLost], as soon as the broker may have given the message to
//     somebody else.
//
// # What no Source guarantees
//
// A message may be delivered any number of times, to several consumers at once,
// and after it was settled. Order holds per lane, where [Capabilities] says
// LaneOrdered, and only until the first redelivery.
package brokers
