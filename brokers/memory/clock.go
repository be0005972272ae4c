package memory

import (
	"cmp"
	"slices"
	"time"
)

// Goroutines that wake at one instant run in an order that nobody controls. With a
// seed every operation therefore happens at an instant of its own: it sleeps until
// a grid point chosen by a hash, waits one nanosecond so that everybody who chose
// the same one is known, and then as many nanoseconds as there are others before
// it in the order of their keys. Under synctest, where time moves only when
// everybody waits, that makes the order of operations a function of the seed.
const (
	grid     = time.Microsecond
	maxSteps = 1000 // grid points to choose from: delays are at most about 1 ms
)

// stepKey says what is about to happen. Two operations with equal keys do the same
// thing, so that their order does not matter.
type stepKey struct {
	op, name, id string
	who          int    // number of the source or publisher
	n            uint64 // attempt, or number of the call
}

func (a stepKey) compare(b stepKey) int {
	return cmp.Or(cmp.Compare(a.op, b.op), cmp.Compare(a.name, b.name), cmp.Compare(a.id, b.id),
		cmp.Compare(a.who, b.who), cmp.Compare(a.n, b.n))
}

func (a stepKey) hash(seed uint64) uint64 {
	h := newHash(seed)
	h.str(a.op)
	h.str(a.name)
	h.str(a.id)
	h.num(uint64(a.who))
	h.num(a.n)
	return h.sum()
}

// slot collects the operations that chose one grid point.
type slot struct {
	keys    []rankedKey // in order
	leaving int
}

type rankedKey struct {
	stepKey
	left bool
}

// step waits for the operation's own instant. It does nothing without a seed. mu
// must not be held.
func (b *Broker) step(k stepKey) {
	if b.cfg.Seed == 0 {
		return
	}
	now := time.Now()
	delay := grid * time.Duration(1+k.hash(b.cfg.Seed)%maxSteps)
	at := now.Sub(b.start).Truncate(grid) + delay
	time.Sleep(at - now.Sub(b.start))

	b.mu.Lock()
	s := b.slots[int64(at)]
	if s == nil {
		s = &slot{}
		b.slots[int64(at)] = s
	}
	i, _ := slices.BinarySearchFunc(s.keys, k, func(o rankedKey, k stepKey) int { return o.compare(k) })
	s.keys = slices.Insert(s.keys, i, rankedKey{stepKey: k})
	b.mu.Unlock()
	time.Sleep(time.Nanosecond)

	b.mu.Lock()
	// In the order of keys; equal ones leave in any order, at instants of their own.
	rank := slices.IndexFunc(s.keys, func(o rankedKey) bool { return !o.left && o.stepKey == k })
	s.keys[rank].left = true
	if s.leaving++; s.leaving == len(s.keys) {
		delete(b.slots, int64(at))
	}
	b.mu.Unlock()
	if rank > 0 {
		time.Sleep(time.Duration(rank))
	}
}

// hasher is 64-bit FNV-1a with a finalizer; the same in every process.
type hasher uint64

func newHash(seed uint64) *hasher {
	h := hasher(14695981039346656037)
	h.num(seed)
	return &h
}

func (h *hasher) byte(c byte) { *h = (*h ^ hasher(c)) * 1099511628211 }

func (h *hasher) str(s string) {
	h.num(uint64(len(s)))
	for i := range len(s) {
		h.byte(s[i])
	}
}

func (h *hasher) num(n uint64) {
	for range 8 {
		h.byte(byte(n))
		n >>= 8
	}
}

func (h *hasher) sum() uint64 {
	x := uint64(*h)
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// unit is the hash as a number in [0, 1).
func (h *hasher) unit() float64 { return float64(h.sum()>>11) / (1 << 53) }
