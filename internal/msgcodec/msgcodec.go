// Package msgcodec turns the parts of a message that are not plain bytes into
// columns and back, the same for held messages and the outbox: headers keep their
// order, their repeated keys and every byte; times keep their nanoseconds.
package msgcodec

import (
	"encoding/binary"
	"errors"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
)

// ErrCorrupt: the stored headers cannot be read.
var ErrCorrupt = errors.New("stored headers are corrupt")

// Headers encodes headers as length-prefixed keys and values; nil for none. A
// value's prefix is its length plus one, 0 for a nil value.
func Headers(hs brokers.Headers) []byte {
	if len(hs) == 0 {
		return nil
	}
	var b []byte
	for _, h := range hs {
		b = binary.AppendUvarint(b, uint64(len(h.Key)))
		b = append(b, h.Key...)
		if h.Value == nil {
			b = append(b, 0)
			continue
		}
		b = binary.AppendUvarint(b, uint64(len(h.Value))+1)
		b = append(b, h.Value...)
	}
	return b
}

// ParseHeaders decodes what Headers made.
func ParseHeaders(b []byte) (brokers.Headers, error) {
	var hs brokers.Headers
	next := func() (uint64, bool) {
		n, w := binary.Uvarint(b)
		if w <= 0 {
			return 0, false
		}
		b = b[w:]
		return n, true
	}
	for len(b) > 0 {
		n, ok := next()
		if !ok || n > uint64(len(b)) {
			return hs, ErrCorrupt
		}
		h := brokers.Header{Key: string(b[:n])}
		b = b[n:]
		if n, ok = next(); !ok || n > uint64(len(b))+1 {
			return hs, ErrCorrupt
		}
		if n > 0 {
			h.Value = append([]byte{}, b[:n-1]...)
			b = b[n-1:]
		}
		hs = append(hs, h)
	}
	return hs, nil
}

// Time encodes a producer's time; nil for the zero Time and for one that RFC 3339
// cannot hold.
func Time(t time.Time) *string {
	if t.IsZero() {
		return nil
	}
	b, err := t.MarshalText()
	if err != nil {
		return nil
	}
	s := string(b)
	return &s
}

// ParseTime decodes what Time made.
func ParseTime(s *string) time.Time {
	if s == nil {
		return time.Time{}
	}
	t, err := time.Parse(time.RFC3339Nano, *s)
	if err != nil {
		return time.Time{}
	}
	return t
}
