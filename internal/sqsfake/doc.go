// Package sqsfake is an SQS server in the process, for tests of what no emulator
// does: partial failures on demand, lost answers, throttling, the in-flight limit, and
// 12 hours that pass in no time.
//
// It speaks AWS JSON 1.0 as an [net/http.Handler], or without any socket as an
// [net/http.RoundTripper]: with that, server and client live in one testing/synctest
// bubble, whose clock is the server's.
//
// It is stricter than emulators, and follows AWS's documentation: a handle that expired
// is refused, a delete with an old handle answers success and deletes nothing (standard
// queues), a message cannot be held for more than 12 hours, a batch counts bytes and
// attributes, and the messages of a FIFO group come together and lock it.
//
// It knows what brokers/sqs and its tests need, and nothing of access control, tags,
// retention or move tasks.
package sqsfake
