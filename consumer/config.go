package consumer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/twiceproof/twiceproof/inbox"
)

// Order says which messages wait for each other.
type Order uint8

const (
	// ByKey: messages of one Key, one at a time and in order.
	ByKey Order = iota
	// ByLane: messages of one broker lane.
	ByLane
	// Unordered: none.
	Unordered
)

// AfterDead says what a dead message does to its key.
type AfterDead uint8

const (
	// Block: later messages of the key are held behind it.
	Block AfterDead = iota
	// Continue: they go on.
	Continue
)

// Config configures a runner. Only Name is required; zero values are defaults.
type Config struct {
	// Name is the consumer's name in the inbox: two names process each message once
	// each. Never change it, and never derive it from code.
	Name string
	// Concurrency is the number of messages in work at once. 0: the store's pool size
	// less 2, at most 16, at least 1; 1 on SQLite. On PostgreSQL the pool must have two
	// connections more; one without a limit counts as 18.
	Concurrency int
	// Order: ByKey unless said otherwise.
	Order Order
	// RequireOrder makes Run fail where the source keeps no order.
	RequireOrder bool
	// AfterDead: Block unless said otherwise.
	AfterDead AfterDead
	// HandlerTimeout bounds one run of the handler. 0: 30 s; negative: no bound.
	HandlerTimeout time.Duration
	// ClaimTimeout bounds the wait for a concurrent duplicate. 0: 5 s.
	ClaimTimeout time.Duration
	// DrainTimeout is how long Run waits for running handlers at its end. 0: 25 s.
	DrainTimeout time.Duration
	// Grace is how long a handler may go on after its context has ended, before its
	// connection is cut. 0: 5 s.
	Grace time.Duration
	// Room and RoomBytes bound what is taken from the broker and not settled. 0: 4
	// times Concurrency, at least 64; 64 MiB.
	Room      int
	RoomBytes int64
	// Tries is how often a message is run at its first delivery, within TryFor. 0: 3
	// times, within 1 s.
	Tries  int
	TryFor time.Duration
	// MaxAttempts is the failed run after which a message is dead. 0: 10.
	MaxAttempts int
	// Backoff and MaxBackoff bound the delay of a held message: it doubles from the
	// first to the second, with full jitter. 0: 1 s and 5 min.
	Backoff, MaxBackoff time.Duration
	// Class names the class of a handler's error, "" leaves it as it is: "handler",
	// "panic", "timeout", "permanent", "unknown-type". It is kept with a held message,
	// and chooses a policy.
	Class func(err error) string
	// Policies are retry policies of error classes, instead of Tries, MaxAttempts,
	// Backoff and MaxBackoff.
	Policies map[string]RetryPolicy
	// RetryBudget bounds retries that fail: so many for each first run that succeeds,
	// besides 10 a second. What it does not allow stays held and waits. 0: 0.2;
	// negative: no bound.
	RetryBudget float64
	// Breaker stops consuming while nearly every run fails.
	Breaker Breaker
	// CrashLimit is how many runs of a message may end with the process before it is
	// dead. 0: 3.
	CrashLimit int
	// MaxHeld is how many held messages stop the intake. 0: 100,000.
	MaxHeld int
	// UnknownTypeFor is how long a message of unknown type is tried. 0: 24 h.
	UnknownTypeFor time.Duration
	// Window is how long the inbox remembers a message after it was processed. It must not
	// be shorter than the broker can redeliver; Run checks it. 0: 15 days; negative: for
	// ever.
	Window time.Duration
	// TooOld: HoldTooOld unless said otherwise.
	TooOld TooOld
	// OnConflict decides about a message whose ID was used before for other content.
	// nil: it is held as dead. [IgnoreConflicts] is for producers that serialize anew
	// on a retry.
	OnConflict func(m *Message) Conflict
	// Interceptors wrap every run outside its transaction, the first one outermost.
	Interceptors []Interceptor
	// Hooks are called on the way.
	Hooks Hooks
	// Logger: nil logs nowhere.
	Logger *slog.Logger
}

// Hooks are functions that the runner calls; each may be nil. They must be fast and
// safe for concurrent use.
type Hooks struct {
	// AfterCommit runs after a confirmed commit, at most once: a crash may skip it.
	AfterCommit func(ctx context.Context, m *Message)
	// Duplicate runs when a delivery is settled without work: its message is done.
	Duplicate func(m *Message)
	// Failed runs after every failed run that counts.
	Failed func(m *Message, err error)
	// Held runs after a message was held, with the reason.
	Held func(m *Message, reason string, err error)
}

// Conflict is what to do with a message whose ID was used before for other content.
type Conflict uint8

const (
	// Hold keeps it as dead, with both fingerprints, for a person to look at.
	Hold Conflict = iota
	// Ignore settles it as a duplicate.
	Ignore
)

// IgnoreConflicts is a Config.OnConflict that ignores every conflict.
func IgnoreConflicts(*Message) Conflict { return Ignore }

func (c Config) withDefaults(pool int, singleWriter bool) (Config, error) {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if c.Name == "" {
		bad("Name is missing: it is the consumer's name in the inbox, for example \"billing\"")
	}
	if c.Concurrency < 0 || c.Room < 0 || c.Tries < 0 || c.MaxAttempts < 0 || c.MaxHeld < 0 {
		bad("Concurrency, Room, Tries, MaxAttempts and MaxHeld must not be negative")
	}
	unlimited := pool <= 0
	if unlimited {
		pool = unlimitedPool
	}
	if !singleWriter && c.Concurrency > 0 && c.Concurrency+2 > pool {
		if unlimited {
			bad("Concurrency %d needs %d connections, and this pool has no limit: set one that the server can bear (SetMaxOpenConns(%[2]d))", c.Concurrency, c.Concurrency+2)
		} else {
			bad("Concurrency %d needs a pool of %d connections (one each and two to spare), but it has %d: raise MaxConns (pool_max_conns in the URL; SetMaxOpenConns) or lower Concurrency",
				c.Concurrency, c.Concurrency+2, pool)
		}
	}
	if c.Concurrency == 0 {
		c.Concurrency = max(1, min(16, pool-2))
		if singleWriter {
			c.Concurrency = 1
		}
	}
	def(&c.HandlerTimeout, 30*time.Second)
	def(&c.ClaimTimeout, 5*time.Second)
	def(&c.DrainTimeout, 25*time.Second)
	def(&c.Grace, 5*time.Second)
	def(&c.Room, max(64, 4*c.Concurrency))
	def(&c.RoomBytes, 64<<20)
	def(&c.Tries, 3)
	def(&c.TryFor, time.Second)
	def(&c.MaxAttempts, 10)
	def(&c.Backoff, time.Second)
	def(&c.MaxBackoff, 5*time.Minute)
	def(&c.CrashLimit, 3)
	def(&c.RetryBudget, defaultBudget)
	def(&c.Window, inbox.DefaultWindow)
	c.Breaker.defaults()
	for class, p := range c.Policies {
		if p.Tries < 0 || p.MaxAttempts < 0 || p.Backoff < 0 || p.MaxBackoff < 0 {
			bad("Policies[%q] has a negative field: a zero one is the Config's own", class)
		}
	}
	if c.Breaker.Share > 1 || c.Breaker.Runs < 1 || c.Breaker.Window < 0 || c.Breaker.Pause < 0 || c.Breaker.MaxPause < 0 {
		bad("Breaker: Share is at most 1, and the others are positive")
	}
	def(&c.MaxHeld, 100_000)
	def(&c.UnknownTypeFor, 24*time.Hour)
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	c.Logger = c.Logger.With("consumer", c.Name)
	if err := errors.Join(errs...); err != nil {
		return c, fmt.Errorf("consumer config: %w", err)
	}
	return c, nil
}

// unlimitedPool is what a pool without a limit counts as.
const unlimitedPool = 18

func def[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}
