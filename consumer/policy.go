package consumer

import (
	"math/rand/v2"
	"sync"
	"time"
)

// RetryPolicy says how failed messages of one error class are tried again. A zero field
// is the Config's own.
type RetryPolicy struct {
	// Tries is how often a message is run at its first delivery; 1 holds it at once.
	Tries int
	// MaxAttempts is the failed run after which it is dead.
	MaxAttempts int
	// Backoff and MaxBackoff bound the delay while it is held.
	Backoff, MaxBackoff time.Duration
}

// policy returns the policy of a class.
func (c *Config) policy(class string) RetryPolicy {
	p := c.Policies[class]
	def(&p.Tries, c.Tries)
	def(&p.MaxAttempts, c.MaxAttempts)
	def(&p.Backoff, c.Backoff)
	def(&p.MaxBackoff, c.MaxBackoff)
	return p
}

// budget keeps an outage of what handlers depend on from becoming a storm of retries: a
// retry takes a token, one that succeeds gives it back, and tokens come with the
// successes of first runs and slowly by themselves. So nothing limits a healthy replay.
type budget struct {
	ratio float64 // tokens for each success; negative: no limit
	rate  float64 // tokens a second
	limit float64

	mu     sync.Mutex
	tokens float64
	at     time.Time
}

const (
	defaultBudget  = 0.2
	budgetRate     = 10
	budgetCapacity = 100
)

func newBudget(ratio float64, concurrency int) *budget {
	limit := float64(max(budgetCapacity, 10*concurrency))
	return &budget{ratio: ratio, rate: budgetRate, limit: limit, tokens: limit, at: time.Now()}
}

func (b *budget) refill() {
	now := time.Now()
	b.tokens = min(b.limit, b.tokens+now.Sub(b.at).Seconds()*b.rate)
	b.at = now
}

// take takes up to n tokens and returns how many.
func (b *budget) take(n int) int {
	if b.ratio < 0 {
		return n
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.refill()
	n = min(n, int(b.tokens))
	b.tokens -= float64(n)
	return n
}

// give puts back what was not used, or was a retry that succeeded.
func (b *budget) give(n int) { b.add(float64(n)) }

// earned notes a first run that succeeded.
func (b *budget) earned() { b.add(b.ratio) }

func (b *budget) add(n float64) {
	if b.ratio < 0 || n <= 0 {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.tokens = min(b.limit, b.tokens+n)
}

// backoff doubles from first to limit, with full jitter.
func backoff(first, limit time.Duration, n int) time.Duration {
	d := first
	for i := 1; i < n && d < limit; i++ {
		d *= 2
	}
	d = min(d, limit)
	return d/10 + rand.N(d)
}
