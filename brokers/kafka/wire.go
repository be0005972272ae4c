package kafka

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/segmentio/kafka-go/protocol"
	"github.com/segmentio/kafka-go/protocol/fetch"
)

// kafka-go's own reading of a fetch's answer forgets where a batch ends, drops what
// it cannot read of one, and bounds no decompression. rawFetch takes the answer off
// kafka-go's connection as it came; records.go reads it.

const (
	// The versions of Fetch that are read here. 4 brings transactions; from 12 on the
	// encoding is another one.
	minFetchVersion = 4
	maxFetchVersion = 11
	// maxAnswer bounds an answer: Kafka's own limit for a request is 100 MiB.
	maxAnswer = 1 << 30
)

var errAnswer = errors.New("the broker's answer makes no sense")

// rawFetch is a request for one partition. It implements kafka-go's RawExchanger.
type rawFetch struct {
	fetch.Request
	version int16
	into    []byte // for the answer, if it is large enough
}

var _ protocol.RawExchanger = (*rawFetch)(nil)

// newFetch asks for what lies at and after an offset.
func newFetch(topic string, partition int, offset int64, bytes int, committedOnly bool) *rawFetch {
	f := &rawFetch{Request: fetch.Request{
		ReplicaID: -1, MaxWaitTime: int32(fetchWait.Milliseconds()), MinBytes: 1, MaxBytes: int32(bytes),
		SessionID: -1, SessionEpoch: -1,
		Topics: []fetch.RequestTopic{{Topic: topic, Partitions: []fetch.RequestPartition{{
			Partition: int32(partition), CurrentLeaderEpoch: -1, FetchOffset: offset, LogStartOffset: -1, PartitionMaxBytes: int32(bytes),
		}}}},
	}}
	if committedOnly {
		f.IsolationLevel = 1
	}
	return f
}

// Required implements protocol.RawExchanger: always. It notes the version to speak.
func (f *rawFetch) Required(versions map[protocol.ApiKey]int16) bool {
	f.version = min(versions[protocol.Fetch], maxFetchVersion)
	return true
}

// RawExchange implements protocol.RawExchanger.
func (f *rawFetch) RawExchange(rw io.ReadWriter) (protocol.Message, error) {
	if f.version < minFetchVersion {
		return nil, fmt.Errorf("the broker speaks Fetch version %d only: Kafka 0.11 or later is needed", f.version)
	}
	const correlation = 1 // one request is in flight on a connection
	if err := protocol.WriteRequest(rw, f.version, correlation, "twiceproof", &f.Request); err != nil {
		return nil, err
	}
	var head [8]byte
	if _, err := io.ReadFull(rw, head[:]); err != nil {
		return nil, err
	}
	size := int64(int32(binary.BigEndian.Uint32(head[:]))) - 4
	if size < 0 || size > maxAnswer || binary.BigEndian.Uint32(head[4:]) != correlation {
		return nil, fmt.Errorf("%w: %d bytes", errAnswer, size)
	}
	body := f.into[:0]
	if body = body[:min(size, int64(cap(body)))]; int64(len(body)) < size {
		body = make([]byte, size)
	}
	if _, err := io.ReadFull(rw, body); err != nil {
		return nil, err
	}
	return parseFetched(body, f.version)
}

// fetched is the answer for the one partition. Its slices are parts of one buffer.
type fetchedPartition struct {
	code      int16 // of the answer as a whole, or of the partition
	end       int64 // high watermark
	stable    int64 // last stable offset, or -1
	aborted   []fetch.ResponseTransaction
	recordSet []byte
	body      []byte // all of it
}

// ApiKey implements protocol.Message.
func (*fetchedPartition) ApiKey() protocol.ApiKey { return protocol.Fetch }

// parseFetched reads the body of an answer.
func parseFetched(body []byte, version int16) (*fetchedPartition, error) {
	r := reader{b: body}
	p := &fetchedPartition{stable: -1, body: body}
	r.int32() // throttled for so long already
	if version >= 7 {
		if p.code = r.int16(); p.code != 0 {
			return p, r.err
		}
		r.int32() // session
	}
	if n := r.int32(); n != 1 && r.err == nil {
		return nil, fmt.Errorf("%w: %d topics for one", errAnswer, n)
	}
	r.bytes(int(r.int16())) // topic
	if n := r.int32(); n != 1 && r.err == nil {
		return nil, fmt.Errorf("%w: %d partitions for one", errAnswer, n)
	}
	r.int32() // partition
	p.code = r.int16()
	p.end, p.stable = r.int64(), r.int64()
	if version >= 5 {
		r.int64() // first offset
	}
	if n := int(r.int32()); n > 0 && r.need(16*n) {
		p.aborted = make([]fetch.ResponseTransaction, n)
		for i := range p.aborted {
			p.aborted[i] = fetch.ResponseTransaction{ProducerID: r.int64(), FirstOffset: r.int64()}
		}
	}
	if version >= 11 {
		r.int32() // a closer replica, which nobody asked for
	}
	if n := int(r.int32()); n > 0 {
		p.recordSet = r.bytes(n)
	}
	return p, r.err
}

// reader takes Kafka's primitive types off a buffer. After an error it returns zeros.
type reader struct {
	b   []byte
	err error
}

func (r *reader) need(n int) bool {
	if r.err == nil && (n < 0 || n > len(r.b)) {
		r.err = fmt.Errorf("%w: it ends in the middle", errAnswer)
	}
	return r.err == nil
}

// bytes returns the next n bytes, which stay part of the buffer.
func (r *reader) bytes(n int) []byte {
	if !r.need(n) {
		return nil
	}
	b := r.b[:n:n]
	r.b = r.b[n:]
	return b
}

func (r *reader) int8() int8 {
	if b := r.bytes(1); b != nil {
		return int8(b[0])
	}
	return 0
}

func (r *reader) int16() int16 {
	if b := r.bytes(2); b != nil {
		return int16(binary.BigEndian.Uint16(b))
	}
	return 0
}

func (r *reader) int32() int32 {
	if b := r.bytes(4); b != nil {
		return int32(binary.BigEndian.Uint32(b))
	}
	return 0
}

func (r *reader) int64() int64 {
	if b := r.bytes(8); b != nil {
		return int64(binary.BigEndian.Uint64(b))
	}
	return 0
}

// varint is a zigzag variable-length integer.
func (r *reader) varint() int64 {
	if r.err != nil {
		return 0
	}
	if len(r.b) > 0 && r.b[0] < 0x80 { // most are
		v := int64(r.b[0]>>1) ^ -int64(r.b[0]&1)
		r.b = r.b[1:]
		return v
	}
	v, n := binary.Varint(r.b)
	if n <= 0 {
		r.err = fmt.Errorf("%w: no integer where one should be", errAnswer)
		return 0
	}
	r.b = r.b[n:]
	return v
}

// varbytes is a length and as many bytes; nil for a length of -1.
func (r *reader) varbytes() []byte {
	n := r.varint()
	if n == -1 || r.err != nil {
		return nil
	}
	if n > maxAnswer {
		n = maxAnswer // more than there can be
	}
	b := r.bytes(int(n))
	if b == nil && r.err == nil {
		b = []byte{}
	}
	return b
}
