package memory

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
)

// Entry is one thing that happened on the broker.
type Entry struct {
	// At is the time since the broker was made.
	At time.Duration
	// Op is what happened: publish, deliver, done, retry, release, reject, extend,
	// expire, commit, disconnect, and so on.
	Op string
	// Name is the queue, channel or topic.
	Name string
	// ID is the message's; empty where it is about no single one.
	ID string
	// Lane is where the delivery came from, with its epoch.
	Lane brokers.Lane
	// Attempt is the number of hand-overs the broker has counted.
	Attempt int
	// Outcome is "ok" or says what came of it.
	Outcome string
}

// String returns the entry as one line.
func (e Entry) String() string {
	return fmt.Sprintf("%s %s %s %q %s attempt=%d %s",
		stamp(e.At), e.Op, e.Name, e.ID, e.Lane, e.Attempt, e.Outcome)
}

// stamp prints nanoseconds in full, so that lines align and compare.
func stamp(d time.Duration) string { return fmt.Sprintf("%d.%09d", d/time.Second, d%time.Second) }

// History is what happened, in order.
type History []Entry

// String returns one line for each entry.
func (h History) String() string {
	var s strings.Builder
	for _, e := range h {
		s.WriteString(e.String())
		s.WriteByte('\n')
	}
	return s.String()
}

// History returns what happened so far; nil without [Config.Seed]. Under
// testing/synctest it is the same, byte for byte, for the same seed and the same
// program, provided that Sources and Publishers are made in the same order and
// that concurrent operations differ in message, Source or call.
func (b *Broker) History() History {
	b.mu.Lock()
	h := slices.Clone(b.history)
	b.mu.Unlock()
	// Leases that run out are noted when somebody looks. Two destinations may be
	// looked at in any order within one instant; a single one may not.
	slices.SortStableFunc(h, func(x, y Entry) int {
		return cmp.Or(cmp.Compare(x.At, y.At), cmp.Compare(x.Name, y.Name))
	})
	return h
}

func (b *Broker) record(at time.Time, e Entry) {
	if b.cfg.Seed == 0 {
		return
	}
	e.At = at.Sub(b.start)
	b.history = append(b.history, e)
}
