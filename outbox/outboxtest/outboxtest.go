package outboxtest

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/twiceproof/twiceproof/internal/caselist"
	"github.com/twiceproof/twiceproof/outbox"
)

// Outbox is what is tested.
type Outbox[Tx any] interface {
	outbox.Writer[Tx]
	outbox.Queue
}

// Config says what to test and how.
type Config[Tx any] struct {
	// New makes the parts for one case, on tables that are fresh. What it creates is
	// removed by t.Cleanup. Required.
	New func(t *testing.T) Fixture[Tx]
	// Bubble, if set, runs the cases that take long by the clock, and their New: pass
	// synctest.Test for a database without network I/O.
	Bubble func(t *testing.T, f func(t *testing.T))
	// Expected is the file with the list of cases that run and that do not apply. A
	// difference fails the test. Empty means no comparison.
	Expected string
	// Wait bounds each wait for something that must happen. 0 means 20 s.
	Wait time.Duration
}

// Fixture is what a case works with. All its parts see the same tables.
type Fixture[Tx any] struct {
	// Open returns an outbox. Required.
	Open func(opts ...outbox.Option) Outbox[Tx]
	// Exec runs a statement on a connection of its own; Int one that returns one
	// integer; IntTx one in a transaction. Required.
	Exec  func(ctx context.Context, sql string) error
	Int   func(ctx context.Context, sql string) (int, error)
	IntTx func(ctx context.Context, tx Tx, sql string) (int, error)
	// Concurrent: two transactions may write at the same time.
	Concurrent bool
	// Proxied returns an outbox whose connections can be disturbed. Optional.
	Proxied func() (Outbox[Tx], Proxy)
}

// Proxy stands between an outbox and its database.
type Proxy interface {
	// Pass says what is forwarded from now on; the rest is dropped silently.
	Pass(toServer, toClient bool)
	// Cut ends all connections.
	Cut()
}

type suite[Tx any] struct {
	Config[Tx]
	hooks Fixture[Tx]
}

// testCase is one statement about an outbox.
type testCase[Tx any] struct {
	name string
	// not says why the case does not apply, "" if it does; nil means it always does.
	not    func(s *suite[Tx]) string
	bubble bool
	run    func(e *env[Tx])
}

// Run runs the suite.
func Run[Tx any](t *testing.T, cfg Config[Tx]) {
	t.Helper()
	if cfg.New == nil {
		t.Fatal("outboxtest: Config.New is required")
	}
	if cfg.Wait <= 0 {
		cfg.Wait = 20 * time.Second
	}
	s := &suite[Tx]{Config: cfg}
	s.hooks = cfg.New(t) // not in a subtest: -run may select one case
	cases := slices.Concat(writeCases[Tx](), orderCases[Tx](), parkCases[Tx](), leaseCases[Tx](), runCases[Tx]())
	var list caselist.List
	names := map[string]bool{}
	for _, c := range cases {
		if names[c.name] {
			t.Fatalf("outboxtest: two cases are named %q", c.name)
		}
		names[c.name] = true
		if c.not != nil {
			if why := c.not(s); why != "" {
				list.NotApplicable(c.name, why)
				continue
			}
		}
		list.Run(c.name)
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			if c.bubble && s.Bubble != nil {
				s.Bubble(t, func(t *testing.T) { c.run(newEnv(t, s)) })
				return
			}
			c.run(newEnv(t, s))
		})
	}
	list.Check(t, "outboxtest", s.Expected)
}

func needsBubble[Tx any](s *suite[Tx]) string {
	if s.Bubble == nil {
		return "it takes minutes by the clock, and the database cannot live in a bubble"
	}
	return ""
}

func needsConcurrency[Tx any](s *suite[Tx]) string {
	if !s.hooks.Concurrent {
		return "one transaction writes at a time"
	}
	return ""
}

func needsProxy[Tx any](s *suite[Tx]) string {
	if s.hooks.Proxied == nil {
		return "there is no network in between"
	}
	return ""
}
