// Package memory is an in-process broker for tests, demos and benchmarks. It
// behaves like the three kinds of real brokers, with their faults on demand:
//
//   - [Broker.Queue]: visibility timeouts, receipt handles and, with FIFO, locked
//     groups (Amazon SQS);
//   - [Broker.Channel]: sessions with unacknowledged messages, the redelivered
//     flag, delivery limits, a single active consumer (RabbitMQ);
//   - [Broker.Topic]: a partitioned log with consumer groups, generations,
//     rebalances and committed offsets, and no way to give a message back (Kafka).
//
// The short form needs no declaration:
//
//	b := memory.New(memory.Config{})
//	src := b.Source("orders") // a standard queue, visibility timeout 30 s
//	pub := b.Publisher()
//
// # Guarantees
//
// The Sources keep the contract of [brokers.Source] to the letter, and their
// Capabilities are true of what they do. A message that a Publisher answered
// Accepted for is on the broker until it is settled, rejected, moved to a dead
// letter queue or past its retention; [Broker.Check] verifies this and the other
// invariants. Stored messages and deliveries share no memory with the caller's.
//
// The package uses only the time, context and sync packages, starts goroutines in
// Open alone and ends them in Close, and never polls, so that it runs under
// testing/synctest, where an hour of heartbeats takes no time. With [Config.Seed]
// set, a run there is repeatable to the byte: see [Broker.History].
//
// # What it is not
//
// Nothing survives the process, nothing is shared between processes, and memory
// is not bounded. It is not a broker for production.
package memory
