package memory

import (
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
)

// Config configures a [Broker]. The zero value is ready to use.
type Config struct {
	// Seed, if not zero, gives every operation a delay of at most about a
	// millisecond that is a hash of the seed and of what is done to which message,
	// and keeps a History. Under testing/synctest the same seed then gives the same
	// history, whatever order goroutines run in. Zero means no delay and no history:
	// full speed.
	Seed uint64
	// Strict makes undeclared names an error that wraps [brokers.ErrNoRoute], as on
	// a real broker. By default both Source and Publisher declare them, as standard
	// queues with the zero QueueConfig.
	Strict bool
	// MaxMessageBytes is the largest Message.Size a Publisher takes; larger ones are
	// Refused for good. Zero means no limit.
	MaxMessageBytes int64
	// Chaos is a mix of faults from the start; the zero value means none. See
	// [Broker.SetChaos].
	Chaos Chaos
	// Logger is where the broker logs what faults do. Nil means nowhere.
	Logger *slog.Logger
}

// Broker is an in-process message broker. It is safe for concurrent use, and has
// nothing to close: its goroutines belong to its Sources.
type Broker struct {
	cfg   Config
	log   *slog.Logger
	start time.Time

	mu         sync.Mutex // never held across a wait
	dests      map[string]destination
	names      []string // of dests, in order of declaration
	sources    int
	publishers int
	slots      map[int64]*slot
	history    []Entry
	faults     []*injected
	chaos      Chaos
	blocked    map[string]bool // by destination; "" is all
	unblocked  chan struct{}
	later      []func() // observers to call once mu is free
	watched    []watched
	violations []string
}

// destination is what a queue, a channel and a topic have in common.
type destination interface {
	profile() string
	append(now time.Time, it *item)
	check() []string
	source(base) brokers.Source
	restart(now time.Time, cause error)
}

// New returns a broker without destinations.
func New(cfg Config) *Broker {
	b := &Broker{
		cfg:       cfg,
		log:       cfg.Logger,
		start:     time.Now(),
		dests:     map[string]destination{},
		slots:     map[int64]*slot{},
		chaos:     cfg.Chaos,
		blocked:   map[string]bool{},
		unblocked: make(chan struct{}),
	}
	if b.log == nil {
		b.log = slog.New(slog.DiscardHandler)
	}
	return b
}

// declare registers a destination. Declaring a name twice is a mistake in the
// program and panics, like registering one HTTP pattern twice.
func (b *Broker) declare(name string, d destination) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.declareLocked(name, d)
}

func (b *Broker) declareLocked(name string, d destination) {
	if old, ok := b.dests[name]; ok {
		panic(fmt.Sprintf("memory: %q is declared twice, as a %s and as a %s", name, old.profile(), d.profile()))
	}
	b.dests[name] = d
	b.names = append(b.names, name)
}

// find returns the destination, declaring a default queue unless cfg.Strict.
func (b *Broker) find(name string) (destination, error) {
	d, ok := b.dests[name]
	if ok {
		return d, nil
	}
	if b.cfg.Strict || name == "" {
		return nil, fmt.Errorf("%w: %q; declare it with Queue, Channel or Topic", brokers.ErrNoRoute, name)
	}
	d = newQueue(b, name, QueueConfig{})
	b.declareLocked(name, d)
	return d, nil
}

// deadLetter puts the message of it to the dead letter queue called name, which is a standard
// queue unless it was declared as something else.
func (b *Broker) deadLetter(now time.Time, name string, it *item) {
	d, ok := b.dests[name]
	if !ok {
		d = newQueue(b, name, QueueConfig{})
		b.declareLocked(name, d)
	}
	d.append(now, it.fresh())
}

// unlock releases mu and then tells the observers what happened meanwhile.
func (b *Broker) unlock() {
	calls := b.later
	b.later = nil
	b.mu.Unlock()
	for _, f := range calls {
		f()
	}
}

// violated notes a broken invariant for Check.
func (b *Broker) violated(format string, args ...any) {
	if len(b.violations) < 100 {
		b.violations = append(b.violations, fmt.Sprintf(format, args...))
	}
}
