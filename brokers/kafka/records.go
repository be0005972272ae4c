package kafka

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"time"

	"github.com/segmentio/kafka-go/compress"
	"github.com/segmentio/kafka-go/protocol"
)

// The layout of a record batch, version 2: https://kafka.apache.org/documentation/#recordbatch
const (
	batchPrefix  = 12 // first offset and length
	batchMagicAt = 16
	batchHeader  = 61
	batchCRCFrom = 21 // the checksum is over everything from the attributes on
	attrCodec    = 0x07
	attrAppended = 0x08 // the broker's time counts, not the producers'
	attrTx       = 0x10
	attrControl  = 0x20
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

var (
	errCorrupt = errors.New("a record batch is corrupt")
	errTooBig  = errors.New("a record batch is too large when it is unpacked")
)

// batch is a group of records that were stored together.
type batch struct {
	base, last int64 // offsets; compaction may have taken records, these two stay
	producer   int64
	tx         bool // part of a transaction
	control    bool // a transaction's marker
	count      int
	first, max time.Time // the first record's, and the broker's if appended
	appended   bool
	data       []byte            // the records, unpacked
	legacy     []protocol.Record // of a topic from before Kafka 0.11, instead of data
}

// rec is one record of a batch.
type rec struct {
	offset     int64
	time       time.Time
	key, value []byte // nil is null
	headers    reader // as many as count, each a name and a value
	count      int
}

// header takes the next header off.
func (r *rec) header() (name, value []byte) { return r.headers.varbytes(), r.headers.varbytes() }

// nextBatch takes the first batch off a record set and unpacks it. It returns nil at the end of the set, which may be a part of a batch.
func nextBatch(set []byte, u *unpacker) (*batch, []byte, error) {
	if len(set) < batchMagicAt+1 {
		return nil, nil, nil
	}
	size := batchPrefix + int(int32(binary.BigEndian.Uint32(set[8:])))
	if size < batchMagicAt+1 {
		return nil, nil, fmt.Errorf("%w: it says that it has %d bytes", errCorrupt, size)
	}
	if size > len(set) {
		return nil, nil, nil
	}
	if magic := set[batchMagicAt]; magic < 2 {
		b, err := legacyBatch(set[:size])
		return b, set[size:], err
	} else if magic > 2 {
		return nil, nil, fmt.Errorf("%w: its format is version %d", errCorrupt, magic)
	}
	if size < batchHeader {
		return nil, nil, fmt.Errorf("%w: %d bytes", errCorrupt, size)
	}
	raw := set[:size:size]
	if got, want := crc32.Checksum(raw[batchCRCFrom:], castagnoli), binary.BigEndian.Uint32(raw[batchCRCFrom-4:]); got != want {
		return nil, nil, fmt.Errorf("%w at offset %d: its checksum is %08x, not %08x", errCorrupt, binary.BigEndian.Uint64(raw), got, want)
	}
	r := reader{b: raw}
	b := &batch{base: r.int64()}
	r.bytes(batchCRCFrom - 8) // length, leader epoch, format, checksum
	attr := r.int16()
	b.last = b.base + int64(r.int32())
	b.first, b.max = timeOf(r.int64()), timeOf(r.int64())
	b.producer = r.int64()
	r.bytes(2 + 4) // the producer's epoch and sequence
	if b.count = int(r.int32()); b.count < 0 {
		return nil, nil, fmt.Errorf("%w at offset %d: it says that it has %d records", errCorrupt, b.base, b.count)
	}
	b.tx, b.control, b.appended = attr&attrTx != 0, attr&attrControl != 0, attr&attrAppended != 0
	var err error
	b.data, err = u.unpack(r.b, compress.Compression(attr&attrCodec))
	if err != nil {
		return nil, nil, fmt.Errorf("batch at offset %d: %w", b.base, err)
	}
	return b, set[size:], nil
}

// timeOf reads milliseconds; -1 is unknown.
func timeOf(ms int64) time.Time {
	if ms < 0 {
		return time.Time{}
	}
	return time.UnixMilli(ms)
}

// unpacker decompresses batches of one partition, which are much alike.
type unpacker struct {
	limit int     // bytes of one batch
	ratio float64 // of the last batch: how much larger it became
	kept  bool    // a batch was not packed: its records are parts of the answer itself
}

// unpack decompresses. The buffer it returns is nobody else's, or p itself.
func (u *unpacker) unpack(p []byte, c compress.Compression) ([]byte, error) {
	if c == compress.None || len(p) == 0 {
		u.kept = true
		return p, nil
	}
	codec := c.Codec()
	if codec == nil {
		return nil, fmt.Errorf("%w: unknown codec %d", errCorrupt, c)
	}
	r := codec.NewReader(bytes.NewReader(p))
	defer r.Close() //nolint:errcheck // it gives memory back
	var out bytes.Buffer
	out.Grow(int(min(max(u.ratio, 1)*1.05*float64(len(p)), float64(u.limit))) + 2*bytes.MinRead)
	n, err := out.ReadFrom(io.LimitReader(r, int64(u.limit)+1))
	if n > int64(u.limit) {
		return nil, fmt.Errorf("%w: MaxBatchBytes is %d", errTooBig, u.limit)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errCorrupt, err)
	}
	u.ratio = float64(n) / float64(len(p))
	return out.Bytes(), nil
}

// records calls f with each record, whose slices are part of the batch's buffer.
func (b *batch) records(f func(*rec) error) error {
	if b.legacy != nil {
		return b.legacyRecords(f)
	}
	r := reader{b: b.data}
	var one rec
	for i := range b.count {
		one = rec{}
		body := reader{b: r.varbytes(), err: r.err}
		body.int8() // unused
		at := b.max
		if delta := body.varint(); !b.appended && !b.first.IsZero() {
			at = b.first.Add(time.Duration(delta) * time.Millisecond)
		}
		one.time = at
		one.offset = b.base + body.varint()
		one.key, one.value = body.varbytes(), body.varbytes()
		if n := body.varint(); n > 0 && body.need(int(min(2*n, maxAnswer))) {
			one.count, one.headers = int(n), body
			for range n { // now: an error in here is the batch's
				body.varbytes()
				body.varbytes()
			}
		}
		if body.err != nil {
			return fmt.Errorf("%w: record %d of the batch at offset %d: %w", errCorrupt, i, b.base, body.err)
		}
		if err := f(&one); err != nil {
			return err
		}
	}
	return nil
}

// aborts tells whether a control batch ends an aborted transaction.
func (b *batch) aborts() (abort bool, err error) {
	err = b.records(func(r *rec) error {
		if len(r.key) >= 4 && binary.BigEndian.Uint16(r.key[2:]) == abortMarker {
			abort = true
		}
		return nil
	})
	return abort, err
}

// legacyBatch reads a message set of the formats 0 and 1, by kafka-go's own reader.
func legacyBatch(raw []byte) (*batch, error) {
	var rs protocol.RecordSet
	sized := append(binary.BigEndian.AppendUint32(nil, uint32(len(raw))), raw...)
	if _, err := rs.ReadFrom(bytes.NewBuffer(sized)); err != nil {
		return nil, fmt.Errorf("%w: %w", errCorrupt, err)
	}
	b := &batch{base: int64(binary.BigEndian.Uint64(raw)), producer: -1}
	b.last, b.legacy = b.base, []protocol.Record{}
	for rs.Records != nil {
		r, err := rs.Records.ReadRecord()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("%w: %w", errCorrupt, err)
		}
		b.legacy = append(b.legacy, *r)
		b.last = max(b.last, r.Offset)
	}
	return b, nil
}

func (b *batch) legacyRecords(f func(*rec) error) error {
	for i := range b.legacy {
		r := &b.legacy[i]
		one := rec{offset: r.Offset, time: r.Time}
		for _, part := range []struct {
			from protocol.Bytes
			to   *[]byte
		}{{r.Key, &one.key}, {r.Value, &one.value}} {
			if part.from == nil {
				continue
			}
			p, err := protocol.ReadAll(part.from)
			if err != nil {
				return err
			}
			*part.to = append([]byte{}, p...)
		}
		if err := f(&one); err != nil {
			return err
		}
	}
	return nil
}
