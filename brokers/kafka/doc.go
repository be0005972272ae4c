// Package kafka consumes from and publishes to Apache Kafka 2.1 and later, through
// segmentio/kafka-go.
//
// # What it guarantees
//
// A [Source] is a member of a consumer group. What is committed for a partition is
// always the contiguous prefix of what is done: an offset is never committed while an
// earlier message is unfinished. Commits go out in the generation that the messages
// were received in, one at a time, and never move an offset back; a settlement that
// comes after the generation is fenced sends nothing and returns
// brokers.ErrOwnershipLost. kafka-go's Reader does not give these guarantees, which is
// why it is not used: a late commit of its goes out in whatever generation lives then.
//
// When partitions are about to move, the Source stops handing out, closes Draining,
// and lets started messages settle for up to [SourceConfig.DrainFor]; commits keep the
// membership alive meanwhile. Then it fences: contexts end with
// brokers.ErrOwnershipLost.
//
// Messages of aborted transactions, transaction markers and holes of compaction are
// passed over exactly. Messages that are gone before they were read (retention, a
// topic made anew, expired offsets) are an EventGap with the exact offsets, never
// silence; [SourceConfig.OnGap] and [SourceConfig.OnReset] say what happens then.
// A topic that does not exist is an error and is not created.
//
// A [Publisher] waits for all in-sync replicas (acks=all), keeps one request in flight
// per partition, and reports per message: Accepted only when the broker said so,
// Unknown when an answer never came. Keys go to the partitions that Java's default
// partitioner chooses.
//
// # What it does not
//
// Kafka gives nothing back and counts no deliveries: Retry and Reject are unsupported,
// Release is for Draining and Close alone. A message that cannot be processed is held
// in the database by the runner.
//
// One message that never finishes stops its partition after
// [SourceConfig.MaxLaneSpan] later ones, and only that partition.
//
// Every rebalance of kafka-go's group protocol stops all members for a moment (it is
// neither cooperative nor static), and all members of a group, whatever client they
// use, must share one of the assignors "range" and "roundrobin".
//
// kafka-go does not authenticate again on a living connection: with credentials that
// expire, the broker cuts the connections at every expiry and the group rebalances.
//
// What is fetched ahead is bounded in compressed bytes ([SourceConfig.FetchBytes] per
// partition, and one record batch in any case). How large a batch becomes when it is
// decompressed is up to its producer, and to [SourceConfig.MaxBatchBytes]. All messages
// of a batch share its memory: the last one that lives keeps it.
//
// Adding partitions to a topic moves keys to other partitions: messages of one key
// before and after the change may overtake each other.
//
// # How a Message travels
//
//	Message       record
//	ID            header message-id
//	Topic         topic
//	Key           key; no key if empty
//	Type          header message-type
//	ContentType   header content-type
//	Time          header message-time, else the record's timestamp
//	Headers       headers, in order, repeated ones too
//	Payload       value; nil is a tombstone
//
// The record's own timestamp is the message's Time only when that lies in the last
// day: Kafka refuses records from the future and deletes those from the past.
package kafka
