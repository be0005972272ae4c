package memory

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
)

// Always as [Select.Times] keeps a fault for ever.
const Always = -1

// Select says which operations a fault strikes. Empty fields match everything.
type Select struct {
	Name string // queue, channel or topic
	Lane string // deliveries and settlements: the lane's name
	ID   string // the message's ID
	// Nth lets the first Nth-1 matching operations pass. 0 is the next one.
	Nth int
	// Times is how many matching operations it strikes before it is used up. 0
	// means once; see [Always].
	Times int
}

// Fault is something that goes wrong with one operation; give it to [Broker.Inject].
type Fault struct {
	kind   faultKind
	err    error
	d      time.Duration
	n      int
	stored bool
}

type faultKind uint8

const (
	faultDuplicate faultKind = iota + 1
	faultDelay
	faultReorder
	faultDropSettle
	faultFailSettle
	faultFailExtend
	faultPublishUnknown
	faultPublishNack
	faultUnroutable
	faultSlowPublish
	faultThrottle
)

func (k faultKind) String() string {
	return [...]string{"", "DuplicateDelivery", "DelayDelivery", "Reorder", "DropSettle", "FailSettle", "FailExtend",
		"PublishUnknown", "PublishNack", "Unroutable", "SlowPublish", "Throttle"}[k]
}

// ErrInjected is the cause of faults that were given no error of their own.
var ErrInjected = errors.New("memory: injected fault")

func orInjected(err error) error {
	if err == nil {
		return ErrInjected
	}
	return err
}

// DuplicateDelivery puts a second copy of the message behind everything else of
// its queue, channel or partition when it is handed over. Copies are copied again
// only by a fault that strikes them.
func DuplicateDelivery() Fault { return Fault{kind: faultDuplicate} }

// DelayDelivery hands the message over d later than it could have been. Where
// lanes are ordered the whole lane waits.
func DelayDelivery(d time.Duration) Fault { return Fault{kind: faultDelay, d: d} }

// Reorder hands over any of the next window messages instead of the first, chosen
// by the seed. It has no effect on ordered lanes, which do not reorder.
func Reorder(window int) Fault { return Fault{kind: faultReorder, n: window} }

// DropSettle loses a settlement on its way: the broker never sees it, and the
// Source answers err, which may be nil.
func DropSettle(err error) Fault { return Fault{kind: faultDropSettle, err: err} }

// FailSettle makes the Source answer err (nil: ErrInjected) for a settlement that
// the broker applied or not. On a topic this is the whole commit.
func FailSettle(err error, applied bool) Fault {
	return Fault{kind: faultFailSettle, err: orInjected(err), stored: applied}
}

// FailExtend makes one extension of a lease (queue) or one heartbeat (topic) fail.
// The Source tries again a second later.
func FailExtend() Fault { return Fault{kind: faultFailExtend} }

// PublishUnknown makes the Publisher answer Unknown for a message that is stored
// or not.
func PublishUnknown(stored bool) Fault { return Fault{kind: faultPublishUnknown, stored: stored} }

// PublishNack makes the broker refuse a message, retryable unless err (nil:
// ErrInjected) has another class.
func PublishNack(err error) Fault { return Fault{kind: faultPublishNack, err: orInjected(err)} }

// Unroutable makes the broker refuse a message with ErrNoRoute.
func Unroutable() Fault { return Fault{kind: faultUnroutable} }

// SlowPublish makes the answer to a message take d. When ctx ends meanwhile the
// message is stored and Unknown.
func SlowPublish(d time.Duration) Fault { return Fault{kind: faultSlowPublish, d: d} }

// Throttle makes the broker refuse a message with class Throttled and After d.
func Throttle(d time.Duration) Fault { return Fault{kind: faultThrottle, d: d} }

type injected struct {
	Select
	Fault
	seen, used int
}

// Inject arranges for f to strike the operations that sel selects. Faults are
// looked at in the order they were injected; the first of a kind that strikes
// wins. It may be called at any time.
func (b *Broker) Inject(sel Select, f Fault) {
	if f.kind == 0 {
		panic("memory: Inject needs a Fault made by one of this package's functions")
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.faults = append(b.faults, &injected{Select: sel, Fault: f})
}

// Pending describes the faults that have not been used up, [Always] ones that
// struck at least once excepted: a test that injected a fault which never struck
// proves nothing.
func (b *Broker) Pending() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	var s []string
	for _, f := range b.faults {
		if f.Times != Always || f.used == 0 {
			s = append(s, fmt.Sprintf("%s on %+v: struck %d of %d", f.kind, f.Select, f.used, max(f.Times, 1)))
		}
	}
	return s
}

// strike returns the fault of the kind that hits this operation, if there is one.
func (b *Broker) strike(k faultKind, name, lane, id string) (Fault, bool) {
	for i, f := range b.faults {
		if f.kind != k || f.Name != "" && f.Name != name || f.ID != "" && f.ID != id || f.Lane != "" && f.Lane != lane {
			continue
		}
		if f.seen++; f.seen < f.Nth {
			continue
		}
		f.used++
		if f.Times != Always && f.used >= max(f.Times, 1) {
			b.faults = slices.Delete(b.faults, i, i+1)
		}
		b.log.Debug("fault", "kind", f.kind.String(), "name", name, "lane", lane, "message_id", id)
		return f.Fault, true
	}
	return Fault{}, false
}

// onDeliver returns how long the hand-over of it must wait, and whether a copy is
// to follow.
func (b *Broker) onDeliver(name, lane string, it *item) (wait time.Duration, duplicate bool) {
	if len(b.faults) > 0 {
		if f, ok := b.strike(faultDelay, name, lane, it.m.ID); ok {
			return f.d, false
		}
		_, duplicate = b.strike(faultDuplicate, name, lane, it.m.ID)
	}
	if b.chaos.on() {
		if !it.delayed {
			if wait = b.chaos.delay(name, it); wait > 0 {
				it.delayed = true
				return wait, false
			}
		}
		duplicate = duplicate || b.chaos.duplicate(name, it)
	}
	return 0, duplicate
}

// pick returns which of the next messages to hand over: 0 unless reordering.
func (b *Broker) pick(name string, ready *line) int {
	w := 0
	if len(b.faults) > 0 {
		if f, ok := b.strike(faultReorder, name, "", ""); ok {
			w = f.n
		}
	}
	if w == 0 && b.chaos.on() {
		w = b.chaos.Reorder
	}
	if w = min(w, ready.len()); w < 2 {
		return 0
	}
	it := ready.at(0)
	h := newHash(b.cfg.Seed ^ b.chaos.Seed)
	h.str(it.m.ID)
	h.num(uint64(it.coord))
	h.num(uint64(it.passed))
	it.passed++ // so that the first is not passed over for ever by the same draw
	return int(h.sum() % uint64(w))
}

// settleFault is what happens to one settlement.
type settleFault struct {
	struck  bool
	applied bool
	err     error
}

func (b *Broker) onSettle(name string, lane brokers.Lane, it *item, v brokers.Verb) settleFault {
	if len(b.faults) > 0 {
		if f, ok := b.strike(faultDropSettle, name, lane.Name, it.m.ID); ok {
			return settleFault{true, false, f.err}
		}
		if f, ok := b.strike(faultFailSettle, name, lane.Name, it.m.ID); ok {
			return settleFault{true, f.stored, f.err}
		}
	}
	if b.chaos.on() && v == brokers.Done {
		return b.chaos.settle(name, it)
	}
	return settleFault{}
}
