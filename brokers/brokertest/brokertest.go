package brokertest

import (
	"context"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/internal/caselist"
)

// Config says what to test and how.
type Config struct {
	// New makes the parts for one case, with a destination that is fresh and empty.
	// What it creates is removed by t.Cleanup. Required.
	New func(t *testing.T) Fixture
	// Bubble, if set, runs each case and its New: pass synctest.Test for an adapter
	// that does no real I/O.
	Bubble func(t *testing.T, f func(t *testing.T))
	// Expected is the file with the list of cases that run and that do not apply. A
	// difference fails the test. Empty means no comparison: for a first try only.
	Expected string
	// Exempt names cases that the broker cannot pass, with the reason. It appears in
	// the list, so that every exemption is seen in review.
	Exempt map[string]string
	// Wait bounds each wait for something that must happen. 0 means 20 s.
	Wait time.Duration
	// Quiet is how long the suite watches that something does not happen. 0 means
	// 300 ms.
	Quiet time.Duration
	// Lease is the length of the broker's leases (visibility timeout), as the
	// Fixture's Sources use it: a delivery is held three times as long. 0 means that
	// there are none, or that they are too long to wait for.
	Lease time.Duration
	// BigPayload is the size of the largest payload to try, in bytes. 0 means
	// 200,000.
	BigPayload int
	// Parallel runs the cases in parallel.
	Parallel bool
}

// Fixture is what a case works with.
type Fixture struct {
	// Destination is the Message.Topic that the Publisher publishes to and that the
	// Sources receive from.
	Destination string
	// Source returns a new Source of the destination, not yet open. All of one
	// Fixture are consumers of one subscription: they share its messages.
	Source func() brokers.Source
	// Publisher returns a new Publisher.
	Publisher func() brokers.Publisher
	// Missing is a Message.Topic that does not exist. Optional.
	Missing string
	// MissingSource returns a Source of something that does not exist: its Open must
	// fail. Optional.
	MissingSource func() brokers.Source
	// Disconnect ends the ownership of everything the Source has in hand, from the
	// broker's side or the network's: a cut connection, an expired lease, an
	// eviction. Optional.
	Disconnect func(brokers.Source)
	// PublishIDs publishes a message that carries several message IDs, by other
	// means than the Publisher. Optional: nil where the transport cannot carry it.
	PublishIDs func(ids ...string)
}

// suite is one Run.
type suite struct {
	Config
	caps   brokers.Capabilities
	hooks  Fixture // of the probe: only whether hooks are there
	pauses bool
}

// testCase is one statement about the adapter.
type testCase struct {
	name string
	// not says why the case does not apply, "" if it does. nil means it always does.
	not func(s *suite) string
	run func(e *env)
}

// Run runs the suite.
func Run(t *testing.T, cfg Config) {
	t.Helper()
	if cfg.New == nil {
		t.Fatal("brokertest: Config.New is required")
	}
	if cfg.Wait <= 0 {
		cfg.Wait = 20 * time.Second
	}
	if cfg.Quiet <= 0 {
		cfg.Quiet = 300 * time.Millisecond
	}
	if cfg.BigPayload <= 0 {
		cfg.BigPayload = 200_000
	}
	if cfg.Bubble == nil {
		cfg.Bubble = func(t *testing.T, f func(*testing.T)) { f(t) }
	}
	s := &suite{Config: cfg}
	if !t.Run("capabilities", func(t *testing.T) { s.Bubble(t, s.probe) }) {
		return // without them nobody knows what applies
	}
	cases := slices.Concat(messageCases(), receiveCases(), settleCases(), ownershipCases(), lifecycleCases(), publishCases())
	known := map[string]bool{}
	var list caselist.List
	for _, c := range cases {
		known[c.name] = true
		if why := s.notApplicable(c); why != "" {
			list.NotApplicable(c.name, why)
			continue
		}
		list.Run(c.name)
		t.Run(c.name, func(t *testing.T) {
			if s.Parallel {
				t.Parallel()
			}
			t.Cleanup(func() {
				if t.Skipped() {
					t.Error("brokertest: a case was skipped: exempt it with a reason instead")
				}
			})
			s.Bubble(t, func(t *testing.T) { c.run(newEnv(t, s)) })
		})
	}
	for _, name := range slices.Sorted(maps.Keys(cfg.Exempt)) {
		if !known[name] {
			t.Errorf("brokertest: Exempt names %q, which is no case", name)
		}
	}
	list.Check(t, "brokertest", s.Expected)
}

func (s *suite) notApplicable(c testCase) string {
	if c.not != nil {
		if why := c.not(s); why != "" {
			return why
		}
	}
	return s.Exempt[c.name]
}

// probe opens a Source to learn its capabilities, and checks that they agree with
// each other.
func (s *suite) probe(t *testing.T) {
	s.hooks = s.New(t)
	if s.hooks.Destination == "" || s.hooks.Source == nil || s.hooks.Publisher == nil {
		t.Fatal("brokertest: a Fixture needs Destination, Source and Publisher")
	}
	src := s.hooks.Source()
	_, s.pauses = src.(brokers.LanePauser)
	ctx, cancel := context.WithTimeout(context.Background(), s.Wait)
	defer cancel()
	caps, err := src.Open(ctx, brokers.OpenOptions{Consumer: "brokertest"})
	if err != nil {
		t.Fatalf("Open: %v", err)
	}
	defer func() {
		if err := src.Close(ctx); err != nil {
			t.Errorf("Close: %v", err)
		}
	}()
	s.caps = caps
	t.Logf("%+v", caps)
	for what, wrong := range map[string]bool{
		"a lane can be given back, but lanes are not ordered":  caps.GiveBack == brokers.GiveBackLane && !caps.LaneOrdered,
		"messages can be given back behind a committed prefix": caps.PrefixSettle && caps.GiveBack != brokers.GiveBackNone,
		"it retries with a delay, but gives nothing back":      caps.MaxRetryDelay > 0 && caps.GiveBack == brokers.GiveBackNone,
		"a negative limit":    caps.MaxRetryDelay < 0 || caps.MaxHold < 0 || caps.SettleBatch < 0 || caps.SettleLinger < 0,
		"an unknown horizon":  caps.RedeliveryHorizon < brokers.Unlimited,
		"an unknown GiveBack": caps.GiveBack > brokers.GiveBackLane,
		"an unknown Counting": caps.Counting > brokers.CountsDeliveries,
	} {
		if wrong {
			t.Errorf("capabilities contradict each other or themselves: %s", what)
		}
	}
}
