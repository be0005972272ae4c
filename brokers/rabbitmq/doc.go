// Package rabbitmq receives from and publishes to RabbitMQ (3.8 and later) over
// AMQP 0-9-1.
//
// # What it guarantees
//
// A [Source] never sends an answer under another ownership than the one it was
// received under. Every subscription (a channel with one consumer on it) is an
// epoch; when it ends, for whatever reason, what was buffered is dropped, the
// contexts of what was handed over end with brokers.ErrOwnershipLost, and late
// answers are counted (brokers.EventSettleLost) and dropped: no delivery tag of an
// old channel is ever put on the wire, where it would acknowledge somebody else's
// message. The client library's own recovery does exactly that and stays off; the
// Source reconnects itself, with backoff, to the nodes given in turn.
//
// A [Publisher] reports a message as Accepted only if the broker has confirmed it
// and did not return it as unroutable. Messages are persistent. What was in flight
// when a connection broke is Unknown, never accepted and never refused; send it
// again with the same ID. It uses a connection of its own: under a memory or disk
// alarm the broker stops reading from connections that publish, and acknowledgements
// must not stop with them.
//
// # What it does not
//
// A queue shared by several consumers has no order. Only a queue with a single
// active consumer has ([SourceConfig.SingleActiveConsumer]), and only as long as
// nothing is given back one by one: Release gives back the whole subscription there.
//
// AMQP cannot read a queue's arguments. With the default [Verify] the Source knows
// that the queue exists and believes the rest of its configuration; only [Declare]
// makes sure of it. Whoever declares a quorum queue by other means should know that
// since RabbitMQ 4.0 its messages are dropped after 20 returned deliveries unless it
// has a dead-letter exchange or a higher x-delivery-limit.
//
// Acknowledgements are not confirmed by the broker: one that is lost with its
// connection makes the message come again. There is no delayed retry; keep the
// message as held instead (package inbox).
//
// # How a Message travels
//
//	Message       property, or header where AMQP has none or a coarser one
//	ID            message_id
//	Topic         the routing key
//	Key           header "message-key"
//	Type          type
//	ContentType   content_type
//	Time          timestamp (whole seconds) and header "message-time"
//	Headers       headers; a key that repeats is an array
//	Payload       body; a nil one cannot be told from an empty one
//
// Header values are text where they are valid UTF-8 and byte arrays otherwise.
// Values of other types become text on the way in: numbers and booleans as written
// in Go, times in RFC 3339, tables and nested arrays as JSON. The remaining
// properties (correlation id, reply-to and so on) are headers named by the
// Property constants, in both directions. Headers have no order in AMQP; they are
// handed over sorted by name.
package rabbitmq
