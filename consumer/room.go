package consumer

import (
	"context"
	"sync"
)

// room counts what is between Receive and settle, in messages and bytes.
type room struct {
	mu       sync.Mutex
	max      int
	maxBytes int64
	n        int
	bytes    int64
	mean     float64 // running mean size of a message
	freed    chan struct{}
}

func newRoom(n int, bytes int64) *room {
	return &room{max: n, maxBytes: bytes, freed: make(chan struct{}, 1)}
}

// free waits for room and returns for how many messages there is.
func (r *room) free(ctx context.Context) (int, bool) {
	for {
		if !sleep(ctx, moment) { // what is freed together counts together
			return 0, false
		}
		r.mu.Lock()
		n := r.max - r.n
		if r.mean > 0 {
			n = min(n, int(float64(r.maxBytes-r.bytes)/r.mean))
		}
		if r.n == 0 {
			n = max(n, 1) // a message larger than the whole room still passes, alone
		}
		r.mu.Unlock()
		if n > 0 {
			return n, ctx.Err() == nil
		}
		select {
		case <-r.freed:
		case <-ctx.Done():
			return 0, false
		}
	}
}

// take counts a message, and reports whether it is the only one.
func (r *room) take(size int64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.n++
	r.bytes += size
	if r.mean == 0 {
		r.mean = float64(size)
	}
	r.mean += (float64(size) - r.mean) / 32
	return r.n == 1
}

func (r *room) inHand() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.n
}

func (r *room) give(size int64) {
	r.mu.Lock()
	r.n--
	r.bytes -= size
	r.mu.Unlock()
	select {
	case r.freed <- struct{}{}:
	default:
	}
}
