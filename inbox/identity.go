package inbox

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"hash/fnv"
	"regexp"
	"strings"
	"unicode/utf8"

	"github.com/twiceproof/twiceproof/brokers"
)

// MaxIDBytes is the longest message ID that is stored as it is; a longer one is
// stored as "sha256:" and its hash in hex.
const MaxIDBytes = 255

var (
	// ErrNoID: the message carries no ID.
	ErrNoID = errors.New("message has no id: the producer must assign one")
	// ErrBadID: the ID has a NUL byte or is not valid UTF-8, so that no text column
	// can hold it.
	ErrBadID = errors.New("message id has a NUL byte or is not valid UTF-8")

	hashedID = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)
)

// StoredID returns the form of a message ID that the tables hold: the ID itself,
// or its hash when it is over MaxIDBytes or looks like such a hash. Nothing is
// trimmed or folded. An ID of white space alone counts as none.
func StoredID(id string) (string, error) {
	switch {
	case strings.TrimSpace(id) == "":
		return "", ErrNoID
	case !utf8.ValidString(id) || strings.IndexByte(id, 0) >= 0:
		return "", ErrBadID
	case len(id) > MaxIDBytes || hashedID.MatchString(id):
		sum := sha256.Sum256([]byte(id))
		return "sha256:" + hex.EncodeToString(sum[:]), nil
	}
	return id, nil
}

// Fingerprint returns 128 bits over the message's type and payload, never its
// headers or time: the same ID with another fingerprint is a conflict.
func Fingerprint(m *brokers.Message) []byte {
	h := sha256.New()
	h.Write(binary.AppendUvarint(nil, uint64(len(m.Type))))
	h.Write([]byte(m.Type))
	if m.Payload == nil {
		h.Write([]byte{0})
	} else {
		h.Write([]byte{1})
		h.Write(m.Payload)
	}
	return h.Sum(nil)[:16]
}

// OrderKey returns the bytes by which messages are kept in order: key itself, or a
// hash of one too long for an index; nil for "".
func OrderKey(key string) []byte {
	if key == "" {
		return nil
	}
	if len(key) > MaxIDBytes {
		sum := sha256.Sum256([]byte(key))
		return append([]byte("sha256:"), sum[:]...)
	}
	return []byte(key)
}

// keyLock is the advisory lock under which the head of a key changes.
func keyLock(consumer int16, orderKey []byte) int64 {
	h := fnv.New64a()
	h.Write([]byte("twiceproof/held/"))
	h.Write([]byte{byte(consumer >> 8), byte(consumer)})
	h.Write(orderKey)
	return int64(h.Sum64())
}

// text makes s storable: valid UTF-8, no NUL, at most 8 KiB.
func text(s string) string {
	const limit = 8 << 10
	s = strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "")
	if len(s) > limit {
		s = strings.ToValidUTF8(s[:limit], "")
	}
	return s
}

func sameBytes(a, b []byte) bool { return a == nil || b == nil || bytes.Equal(a, b) }
