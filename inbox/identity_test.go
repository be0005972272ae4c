package inbox

import (
	"encoding/hex"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
)

func TestFingerprintTellsTypePayloadAndTombstoneApart(t *testing.T) {
	t.Parallel()
	fp := func(typ string, payload []byte) string {
		return hex.EncodeToString(Fingerprint(&brokers.Message{Type: typ, Payload: payload}))
	}
	all := []string{fp("", nil), fp("", []byte{}), fp("a", []byte("b")), fp("ab", []byte{}), fp("", []byte("ab")), fp("a", nil)}
	seen := map[string]bool{}
	for _, f := range all {
		require.Len(t, f, 32)
		require.False(t, seen[f])
		seen[f] = true
	}
	a := &brokers.Message{ID: "1", Type: "t", Payload: []byte("x")}
	b := &brokers.Message{ID: "2", Type: "t", Payload: []byte("x"), Key: "k", Headers: brokers.Headers{{Key: "trace"}}}
	require.Equal(t, Fingerprint(a), Fingerprint(b), "headers, key and id do not count")
}

func TestStoredID(t *testing.T) {
	t.Parallel()
	for _, id := range []string{"a", " a ", "é", "e\u0301", "😀", strings.Repeat("x", 255)} {
		got, err := StoredID(id)
		require.NoError(t, err)
		require.Equal(t, id, got)
	}
	for _, id := range []string{"", "   ", "\t\n"} {
		_, err := StoredID(id)
		require.ErrorIs(t, err, ErrNoID)
	}
	for _, id := range []string{"a\x00b", "\xff\xfe"} {
		_, err := StoredID(id)
		require.ErrorIs(t, err, ErrBadID)
	}
	long1, err := StoredID(strings.Repeat("x", 2999) + "1")
	require.NoError(t, err)
	long2, err := StoredID(strings.Repeat("x", 2999) + "2")
	require.NoError(t, err)
	require.NotEqual(t, long1, long2, "never truncated")
	again, err := StoredID(long1)
	require.NoError(t, err)
	require.NotEqual(t, long1, again, "an id that looks like a hash is hashed too")
}

// The fingerprint is stored and compared for ever: these values never change.
func TestFingerprintIsByteForByteTheSameForEver(t *testing.T) {
	t.Parallel()
	for want, m := range map[string]*brokers.Message{
		"05105fb32db53dbf30335d122f155b17": {Type: "order.placed", Payload: []byte(`{"a":1}`)},
		"2533afe7e33097efd27bd6ca9941d542": {Type: "order.placed"},
		"b413f47d13ee2fe6c845b2ee141af81d": {Payload: []byte{}},
		"cf25a8cf200558a438acb7d4c01a67bd": {Type: strings.Repeat("t", 300), Payload: []byte("x")},
	} {
		require.Equal(t, want, hex.EncodeToString(Fingerprint(m)))
	}
}
