package prefix_test

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/twiceproof/twiceproof/internal/prefix"
)

// model is the tracker written the slow and obvious way.
type model struct {
	pos  int64
	open []int64
	all  []int64 // delivered, in order
}

func (m *model) safe() int64 {
	if len(m.open) == 0 {
		return m.pos
	}
	return slices.Min(m.open)
}

func (m *model) span() int {
	if len(m.open) == 0 {
		return 0
	}
	return len(m.all) - slices.Index(m.all, slices.Min(m.open))
}

func TestTrackerAgreesWithTheModel(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		start := rapid.Int64Range(0, 1000).Draw(t, "start")
		tr, m, last := prefix.New(start), &model{pos: start}, start
		steps := rapid.IntRange(1, 400).Draw(t, "steps")
		for range steps {
			switch rapid.SampledFrom([]string{"deliver", "deliver", "done", "done", "again", "skip", "stale"}).Draw(t, "op") {
			case "deliver":
				off := m.pos + rapid.SampledFrom([]int64{0, 0, 0, 1, 7}).Draw(t, "gap")
				require.True(t, tr.Delivered(off))
				m.pos, m.open, m.all = off+1, append(m.open, off), append(m.all, off)
			case "done":
				if len(m.open) == 0 {
					continue
				}
				i := rapid.IntRange(0, len(m.open)-1).Draw(t, "i")
				require.True(t, tr.Done(m.open[i]))
				m.open = slices.Delete(m.open, i, i+1)
			case "again": // done twice, or never delivered
				off := rapid.Int64Range(start, m.pos+5).Draw(t, "off")
				if !slices.Contains(m.open, off) {
					require.False(t, tr.Done(off))
				}
			case "skip":
				next := m.pos + rapid.Int64Range(-3, 9).Draw(t, "skip")
				tr.Skipped(next)
				m.pos = max(m.pos, next)
			case "stale":
				if m.pos > start {
					require.False(t, tr.Delivered(m.pos-1))
				}
			}
			require.Equal(t, m.safe(), tr.Safe(), "safe")
			require.Equal(t, m.pos, tr.Pos(), "pos")
			require.Equal(t, len(m.open), tr.Unfinished(), "unfinished")
			require.Equal(t, m.span(), tr.Span(), "span")
			require.GreaterOrEqual(t, tr.Safe(), last, "a commit went back")
			last = tr.Safe()
		}
	})
}

func TestMemoryIsBoundedByTheSpan(t *testing.T) { // not parallel: it counts allocations
	tr := prefix.New(0)
	for off := range int64(200_000) {
		tr.Delivered(off)
		if off >= 100 {
			tr.Done(off - 100)
		}
	}
	assert.Equal(t, 100, tr.Span())
	assert.EqualValues(t, 199_900, tr.Safe())
	allocs := testing.AllocsPerRun(1000, func() {
		tr.Delivered(tr.Pos())
		tr.Done(tr.Safe())
	})
	assert.Zero(t, allocs)
}

func BenchmarkInOrder(b *testing.B) {
	tr := prefix.New(0)
	for b.Loop() {
		tr.Delivered(tr.Pos())
		tr.Done(tr.Safe())
	}
}
