package kafka

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/segmentio/kafka-go/compress"
	"github.com/segmentio/kafka-go/protocol"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// encode writes a record set as kafka-go sends it, without its length.
func encode(t require.TestingT, version int8, codec compress.Compression, rs ...protocol.Record) []byte {
	set := protocol.RecordSet{Version: version, Attributes: protocol.Attributes(codec), Records: protocol.NewRecordReader(rs...)}
	var buf bytes.Buffer
	_, err := set.WriteTo(&buf)
	require.NoError(t, err)
	return buf.Bytes()[4:]
}

// readAll reads all batches of a set.
func readAll(set []byte, limit int) (rs []rec, next int64, err error) {
	u := &unpacker{limit: limit}
	for {
		var b *batch
		if b, set, err = nextBatch(set, u); b == nil || err != nil {
			return rs, next, err
		}
		if err := b.records(func(r *rec) error { rs = append(rs, *r); return nil }); err != nil {
			return rs, next, err
		}
		next = b.last + 1
	}
}

// readBack sends a record through the wire's format.
func readBack(t *testing.T, r protocol.Record) *rec {
	t.Helper()
	if r.Key != nil { // a record's bytes are read once
		k, err := protocol.ReadAll(r.Key)
		require.NoError(t, err)
		r.Key = protocol.NewBytes(k)
	}
	rs, _, err := readAll(encode(t, 2, compress.None, r), 1<<20)
	require.NoError(t, err)
	require.Len(t, rs, 1)
	return &rs[0]
}

// What kafka-go writes is read as it was, in every format and codec.
func TestBatchesAreReadAsTheyWereWritten(t *testing.T) {
	t.Parallel()
	maybe := func(t *rapid.T, name string) []byte {
		return rapid.OneOf(rapid.Just([]byte(nil)), rapid.SliceOfN(rapid.Byte(), 0, 40)).Draw(t, name)
	}
	bytesOf := func(b []byte) protocol.Bytes {
		if b == nil {
			return nil
		}
		return protocol.NewBytes(b)
	}
	rapid.Check(t, func(t *rapid.T) {
		version := rapid.SampledFrom([]int8{1, 2}).Draw(t, "version")
		codec := rapid.SampledFrom([]compress.Compression{compress.None, compress.Gzip, compress.Snappy, compress.Lz4, compress.Zstd}).Draw(t, "codec")
		type in struct {
			key, value []byte
			at         time.Time
			headers    []protocol.Header
		}
		var want []in
		var recs []protocol.Record
		for range rapid.IntRange(1, 20).Draw(t, "n") {
			w := in{maybe(t, "key"), maybe(t, "value"), time.UnixMilli(rapid.Int64Range(1, 4e12).Draw(t, "ms")), nil}
			if version == 2 {
				for range rapid.IntRange(0, 3).Draw(t, "headers") {
					w.headers = append(w.headers, protocol.Header{Key: rapid.String().Draw(t, "name"), Value: rapid.SliceOfN(rapid.Byte(), 0, 20).Draw(t, "v")})
				}
			}
			want = append(want, w)
			recs = append(recs, protocol.Record{Key: bytesOf(w.key), Value: bytesOf(w.value), Time: w.at, Headers: w.headers})
		}
		got, next, err := readAll(encode(t, version, codec, recs...), 1<<20)
		require.NoError(t, err)
		require.Len(t, got, len(want))
		require.EqualValues(t, len(want), next)
		for i, r := range got {
			w := want[i]
			require.EqualValues(t, i, r.offset)
			require.True(t, bytes.Equal(w.key, r.key) && (w.key == nil) == (r.key == nil), "key %d: %v, want %v", i, r.key, w.key)
			require.True(t, bytes.Equal(w.value, r.value) && (w.value == nil) == (r.value == nil), "value %d", i)
			require.True(t, w.at.Equal(r.time), "time %d: %v, want %v", i, r.time, w.at)
			require.Equal(t, len(w.headers), r.count)
			for _, h := range w.headers {
				name, value := r.header()
				require.Equal(t, h.Key, string(name))
				require.True(t, bytes.Equal(h.Value, value))
			}
		}
	})
}

// seal sets a batch's length and checksum.
func seal(b []byte) []byte {
	binary.BigEndian.PutUint32(b[8:], uint32(len(b)-batchPrefix))
	binary.BigEndian.PutUint32(b[batchCRCFrom-4:], crc32.Checksum(b[batchCRCFrom:], castagnoli))
	return b
}

func value(s string) protocol.Record {
	return protocol.Record{Time: time.UnixMilli(1), Value: protocol.NewBytes([]byte(s))}
}

// Compaction leaves a batch's ends as they were, and sometimes nothing in between.
func TestABatchEndsWhereItSays(t *testing.T) {
	t.Parallel()
	b := encode(t, 2, compress.None, value("a"), value("b"))
	binary.BigEndian.PutUint64(b, 100)
	binary.BigEndian.PutUint32(b[batchCRCFrom+2:], 9) // the last offset is 109
	rs, next, err := readAll(seal(b), 1<<20)
	require.NoError(t, err)
	require.Len(t, rs, 2)
	require.EqualValues(t, 100, rs[0].offset)
	require.EqualValues(t, 110, next)

	empty := b[:batchHeader]
	binary.BigEndian.PutUint32(empty[batchHeader-4:], 0)
	rs, next, err = readAll(seal(empty), 1<<20)
	require.NoError(t, err)
	require.Empty(t, rs)
	require.EqualValues(t, 110, next)
}

// The last batch of an answer may be cut off: it comes whole with the next fetch.
func TestAPartOfABatchIsNotRead(t *testing.T) {
	t.Parallel()
	one := encode(t, 2, compress.Snappy, value("a"))
	whole := slices.Concat(one, encode(t, 2, compress.None, value("b")))
	for n := len(one); n < len(whole); n++ {
		rs, _, err := readAll(whole[:n], 1<<20)
		require.NoError(t, err)
		require.Len(t, rs, 1)
	}
}

func TestDamageIsNoticed(t *testing.T) {
	t.Parallel()
	good := encode(t, 2, compress.Gzip, value("payload"), value("another"))
	for i := range good {
		if i < 8 || i >= 12 && i < 16 || i >= 8 && i < 12 {
			continue // the base offset, the leader's epoch (both outside the checksum), the length
		}
		bad := slices.Clone(good)
		bad[i] ^= 0x40
		_, _, err := readAll(bad, 1<<20)
		assert.ErrorIs(t, err, errCorrupt, "byte %d", i)
	}
}

// A checksum says what was written, not that it makes sense.
func TestABatchOfLessThanNoRecordsIsDamage(t *testing.T) {
	t.Parallel()
	b := encode(t, 2, compress.None, value("a"))
	binary.BigEndian.PutUint32(b[batchHeader-4:], 1<<31)
	_, _, err := readAll(seal(b), 1<<20)
	require.ErrorIs(t, err, errCorrupt)
}

// A few bytes on the wire are no reason to take gigabytes of memory.
func TestABatchIsUnpackedToALimit(t *testing.T) {
	t.Parallel()
	for _, codec := range []compress.Compression{compress.Gzip, compress.Snappy, compress.Lz4, compress.Zstd} {
		bomb := encode(t, 2, codec, protocol.Record{Value: protocol.NewBytes(make([]byte, 32<<20))})
		require.Less(t, len(bomb), 4<<20)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, _, err := readAll(bomb, 1<<20)
		runtime.ReadMemStats(&after)
		require.ErrorIs(t, err, errTooBig, "%v", codec)
		assert.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(24<<20), "%v", codec)
	}
}

func FuzzBatches(f *testing.F) {
	f.Add(encode(f, 2, compress.None, value("a")), false)
	f.Add(encode(f, 2, compress.Zstd, value("a"), value("b")), true)
	f.Add(encode(f, 1, compress.Snappy, value("a")), false)
	f.Fuzz(func(t *testing.T, set []byte, resealed bool) {
		if resealed && len(set) >= batchHeader {
			set = seal(slices.Clone(set))
		}
		rs, _, err := readAll(set, 1<<16)
		for _, r := range rs {
			_, _ = messageOf("t", &r)
		}
		if err != nil && !errors.Is(err, errCorrupt) && !errors.Is(err, errTooBig) && !errors.Is(err, errAnswer) {
			t.Fatal(err)
		}
	})
}

func FuzzAnswers(f *testing.F) {
	f.Add(make([]byte, 60), int16(11))
	f.Fuzz(func(_ *testing.T, body []byte, version int16) {
		p, err := parseFetched(body, 4+(version&7))
		if err == nil && p != nil {
			_, _, _ = readAll(p.recordSet, 1<<16)
		}
	})
}
