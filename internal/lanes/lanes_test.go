package lanes

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestOneKeyRunsOneAtATimeAndInOrder(t *testing.T) {
	t.Parallel()
	l := New[int]()
	const keys, each = 7, 200
	var mu sync.Mutex
	last, running := map[int]int{}, map[int]bool{}
	var wg sync.WaitGroup
	var jobs sync.WaitGroup
	jobs.Add(keys * each)
	for range 8 {
		wg.Go(func() {
			for {
				tk, ok := l.Next()
				if !ok {
					return
				}
				k, n := tk.Job%keys, tk.Job/keys
				mu.Lock()
				require.False(t, running[k], "two jobs of one key at once")
				require.Equal(t, last[k], n, "out of order")
				running[k], last[k] = true, n+1
				mu.Unlock()
				mu.Lock()
				running[k] = false
				mu.Unlock()
				l.End(tk)
				jobs.Done()
			}
		})
	}
	for i := range keys * each {
		require.True(t, l.Push(string(rune('a'+i%keys)), i))
	}
	jobs.Wait()
	require.Empty(t, l.Close())
	wg.Wait()
	require.Empty(t, l.keys)
	require.Empty(t, l.all)
	require.False(t, l.Push("a", 1))
}

func TestAJobThatRestsKeepsItsKeyAndNoOther(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := New[string]()
		l.Push("k", "k1")
		l.Push("k", "k2")
		l.Push("", "x")
		t1, _ := l.Next()
		require.Equal(t, "k1", t1.Job)
		start := time.Now()
		require.True(t, l.Again(t1, time.Second))
		t2, _ := l.Next()
		require.Equal(t, "x", t2.Job)
		require.True(t, l.Again(t2, 0))
		t2, _ = l.Next()
		require.Equal(t, "x", t2.Job)
		l.End(t2)
		t3, _ := l.Next()
		require.Equal(t, "k1", t3.Job)
		require.Equal(t, time.Second, time.Since(start))
		require.Equal(t, []string{"k2"}, l.Close())
		require.False(t, l.Again(t3, 0))
	})
}
