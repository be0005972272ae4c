// Package sqs receives from and publishes to Amazon SQS, standard and FIFO queues,
// through aws-sdk-go-v2.
//
// # What it guarantees
//
// A [Source] keeps the visibility of everything it has received, whether handed over
// or not, from the receive on, and ends a delivery's Context with
// brokers.ErrOwnershipLost before the message can become visible again. After that
// nothing is sent for the delivery: a late delete or a late extension could touch the
// next consumer's hand-over. Settlements carry the receipt handle of their own
// delivery, and each entry of a batch has its own answer.
//
// On a FIFO queue a lane is a message group. What is given back, or lost, takes all
// later messages of its group in hand with it, so that no later message runs in its
// place. Nothing is received there that nobody waits for.
//
// A [Publisher] reports a message as Accepted only if SQS answered so for this very
// entry. An answer that never came is Unknown; send the message again with the same
// ID. Messages of one Key go out one after the other, and what follows one that was
// not accepted is not sent.
//
// # What it does not
//
// A standard queue has no order. SQS may deliver again what was deleted, and answers a
// delete with success either way.
//
// Every receive counts against the redrive policy's maxReceiveCount, also of messages
// that were given back unrun as neighbours in their group: keep it at ten or more.
// A dead-letter queue behind a FIFO queue breaks the order of its groups.
//
// SQS has no way to end a waiting receive that does not risk hiding a message for its
// visibility timeout. Close therefore lets the last receives come to their end, at
// most [SourceConfig.Wait], and cuts them off only when its ctx ends.
//
// A FIFO queue drops a message whose deduplication ID (here: the Message's ID) it has
// seen within five minutes, and answers that it was accepted. Give a message that was
// deleted and shall be run again another deduplication ID ([PublisherConfig.DedupID]).
//
// # How a Message travels
//
//	Message       attribute, where SQS has no place of its own
//	ID            message-id; on FIFO queues also the deduplication ID
//	Topic         the queue's name
//	Key           message-key; on FIFO queues the message group
//	Type          message-type
//	ContentType   content-type
//	Time          message-time, else when SQS got the message
//	Headers       attributes, or all of them in one, message-headers, as JSON
//	Payload       body; what is no text goes as base64 with content-encoding=base64
//
// A message has ten attributes at most, and attributes have no order: headers that are
// too many, repeated, or named as SQS does not allow go into the one attribute.
// SQS's own MessageId is never a message's ID: a producer's retry, a redrive or a copy
// from a dead-letter queue has another one.
package sqs
