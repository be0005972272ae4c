package msgcodec

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/twiceproof/twiceproof/brokers"
)

func TestHeadersSurviveEveryByte(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		var hs brokers.Headers
		for range rapid.IntRange(0, 6).Draw(t, "n") {
			h := brokers.Header{Key: rapid.String().Draw(t, "key")}
			if rapid.Bool().Draw(t, "set") {
				h.Value = append([]byte{}, rapid.SliceOf(rapid.Byte()).Draw(t, "value")...)
			}
			hs = append(hs, h)
		}
		got, err := ParseHeaders(Headers(hs))
		require.NoError(t, err)
		require.Equal(t, hs, got)
	})
}

func TestCorruptHeadersAreAnErrorNotAPanic(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		_, _ = ParseHeaders(rapid.SliceOf(rapid.Byte()).Draw(t, "bytes"))
	})
	_, err := ParseHeaders([]byte{200})
	require.ErrorIs(t, err, ErrCorrupt)
	_, err = ParseHeaders([]byte{1, 'a', 9, 'x'})
	require.ErrorIs(t, err, ErrCorrupt)
}

func TestTimeKeepsNanosecondsAndOffset(t *testing.T) {
	t.Parallel()
	want := time.Date(2026, 12, 1, 2, 3, 4, 123456789, time.FixedZone("", 3600))
	got := ParseTime(Time(want))
	require.True(t, want.Equal(got))
	require.Equal(t, want.Format(time.RFC3339Nano), got.Format(time.RFC3339Nano))
	require.Nil(t, Time(time.Time{}))
	require.True(t, ParseTime(nil).IsZero())
}
