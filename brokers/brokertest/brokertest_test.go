package brokertest_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/brokers/brokertest"
	"github.com/twiceproof/twiceproof/brokers/memory"
)

// broken is an adapter with one mistake, and the cases that must find it.
type broken struct {
	profile string // "" is a queue
	source  func(brokers.Source) brokers.Source
	pub     func(brokers.Publisher) brokers.Publisher
	found   []string
}

// faulty changes what a Source answers.
type faulty struct {
	brokers.Source
	open    func(o *brokers.OpenOptions)
	caps    func(c *brokers.Capabilities)
	deliver func(d *brokers.Delivery) bool // false: loses it
	settle  func(ss []brokers.Settlement)
	errs    func(err error) error
	closed  func(err error) error
}

func (f *faulty) Open(ctx context.Context, o brokers.OpenOptions) (brokers.Capabilities, error) {
	if f.open != nil {
		f.open(&o)
	}
	c, err := f.Source.Open(ctx, o)
	if f.caps != nil {
		f.caps(&c)
	}
	return c, err
}

func (f *faulty) Receive(ctx context.Context, max int) ([]*brokers.Delivery, error) {
	ds, err := f.Source.Receive(ctx, max)
	if f.deliver == nil || err != nil {
		return ds, err
	}
	var kept []*brokers.Delivery
	for _, d := range ds {
		if f.deliver(d) {
			kept = append(kept, d)
		}
	}
	if len(kept) == 0 {
		return f.Receive(ctx, max)
	}
	return kept, nil
}

func (f *faulty) Settle(ctx context.Context, ss ...brokers.Settlement) []error {
	if f.settle != nil {
		f.settle(ss)
	}
	errs := f.Source.Settle(ctx, ss...)
	for i := range errs {
		if f.errs != nil {
			errs[i] = f.errs(errs[i])
		}
	}
	return errs
}

func (f *faulty) Close(ctx context.Context) error {
	err := f.Source.Close(ctx)
	if f.closed != nil {
		return f.closed(err)
	}
	return err
}

// faultyPub changes what a Publisher takes and answers.
type faultyPub struct {
	brokers.Publisher
	message func(m *brokers.Message)
	result  func(r *brokers.Result)
}

func (f *faultyPub) Publish(ctx context.Context, ms ...*brokers.Message) []brokers.Result {
	sent := make([]*brokers.Message, len(ms))
	for i, m := range ms {
		sent[i] = m.Clone()
		if f.message != nil {
			f.message(sent[i])
		}
	}
	rs := f.Publisher.Publish(ctx, sent...)
	for i := range rs {
		if f.result != nil {
			f.result(&rs[i])
		}
	}
	return rs
}

type withDeadline struct{ context.Context }

func (withDeadline) Deadline() (time.Time, bool) { return time.Now(), true }

func src(f faulty) func(brokers.Source) brokers.Source {
	return func(s brokers.Source) brokers.Source {
		c := f
		c.Source = s
		return &c
	}
}

func pub(f faultyPub) func(brokers.Publisher) brokers.Publisher {
	return func(p brokers.Publisher) brokers.Publisher {
		c := f
		c.Publisher = p
		return &c
	}
}

func hides(hidden error) faulty {
	return faulty{errs: func(err error) error {
		if errors.Is(err, hidden) {
			return nil
		}
		return err
	}}
}

var mistakes = map[string]broken{
	"answers nil for a late settlement": {source: src(hides(brokers.ErrOwnershipLost)), found: []string{"ownership/late-settle-touches-nobody"}},
	"hides a double settlement":         {source: src(hides(brokers.ErrAlreadySettled)), found: []string{"settle/twice", "settle/one-error-each"}},
	"hides an unsupported verb":         {source: src(hides(brokers.ErrUnsupported)), found: []string{"settle/reject-unsupported"}},
	"emulates an unsupported nack": {profile: "topic", source: src(faulty{settle: func(ss []brokers.Settlement) {
		for i := range ss {
			if ss[i].Verb == brokers.Retry {
				ss[i].Verb = brokers.Done
			}
		}
	}}), found: []string{"settle/retry-unsupported"}},
	"takes more than its room": {source: src(faulty{open: func(o *brokers.OpenOptions) { o.Room *= 3 }}),
		found: []string{"receive/never-more-than-room"}},
	"loses a message it received": {source: func(s brokers.Source) brokers.Source {
		var n atomic.Int64
		return src(faulty{deliver: func(*brokers.Delivery) bool { return n.Add(1)%4 != 0 }})(s)
	}, found: []string{"receive/at-most-max", "receive/loses-nothing-when-ctx-ends"}},
	"contexts that never end": {source: src(faulty{deliver: func(d *brokers.Delivery) bool {
		d.Context = context.Background()
		return true
	}}), found: []string{"lifecycle/close-ends-contexts", "ownership/lost-and-redelivered"}},
	"contexts with a deadline": {source: src(faulty{deliver: func(d *brokers.Delivery) bool {
		d.Context = withDeadline{d.Context}
		return true
	}}), found: []string{"receive/at-most-max"}},
	"epoch that stands still": {source: src(faulty{deliver: func(d *brokers.Delivery) bool {
		d.Lane.Epoch = 1
		return true
	}}), found: []string{"ownership/epoch-changes"}},
	"claims an order it has not": {source: src(faulty{caps: func(c *brokers.Capabilities) { c.LaneOrdered = true }}),
		found: []string{"receive/order-of-a-key"}},
	"claims to reject": {source: src(faulty{caps: func(c *brokers.Capabilities) { c.Reject = true }}), found: []string{"settle/reject"}},
	"claims to give back": {profile: "topic", source: src(faulty{caps: func(c *brokers.Capabilities) {
		c.GiveBack, c.PrefixSettle = brokers.GiveBackMessage, false
	}}), found: []string{"settle/release", "settle/release-leaves-others"}},
	"claims stable coordinates": {profile: "channel", source: src(faulty{caps: func(c *brokers.Capabilities) { c.StableCoordinates = true }}),
		found: []string{"ownership/coordinates-are-stable"}},
	"contradicts itself": {source: src(faulty{caps: func(c *brokers.Capabilities) { c.PrefixSettle = true }}), found: []string{"capabilities"}},
	"counts nothing but says so": {source: src(faulty{deliver: func(d *brokers.Delivery) bool {
		d.Attempt = 1
		return true
	}}), found: []string{"settle/release", "ownership/takeover-after-close"}},
	"retries at once whatever was asked": {source: src(faulty{settle: func(ss []brokers.Settlement) {
		for i := range ss {
			ss[i].After = 0
		}
	}}), found: []string{"settle/retry-after"}},
	"done means release": {source: src(faulty{settle: func(ss []brokers.Settlement) {
		for i := range ss {
			if ss[i].Verb == brokers.Done {
				ss[i].Verb = brokers.Release
			}
		}
	}}), found: []string{"settle/done-is-final", "settle/done-in-any-order"}},
	"makes up an ID": {source: src(faulty{deliver: func(d *brokers.Delivery) bool {
		if d.ID == "" {
			d.ID = "made-up"
		}
		return true
	}}), found: []string{"message/no-id"}},
	"second Close fails": {source: func(s brokers.Source) brokers.Source {
		n := 0
		return src(faulty{closed: func(error) error {
			if n++; n > 1 {
				return brokers.ErrClosed
			}
			return nil
		}})(s)
	}, found: []string{"lifecycle/close-twice"}},
	"accepts what goes nowhere": {pub: pub(faultyPub{result: func(r *brokers.Result) {
		if errors.Is(r.Err, brokers.ErrNoRoute) {
			*r = brokers.Result{Outcome: brokers.Accepted}
		}
	}}), found: []string{"publish/unroutable", "publish/key-stops-at-the-first-failure"}},
	"goes on with a key": {pub: pub(faultyPub{message: func(m *brokers.Message) { m.Key = "" }}),
		found: []string{"publish/key-stops-at-the-first-failure", "message/round-trip"}},
	"an error without a failure": {pub: pub(faultyPub{result: func(r *brokers.Result) { r.Err = errors.New("?") }}),
		found: []string{"publish/one-result-each"}},
	"empty becomes nil": {pub: pub(faultyPub{message: func(m *brokers.Message) {
		if len(m.Payload) == 0 {
			m.Payload = nil
		}
	}}), found: []string{"message/payload-empty"}},
	"header values as text": {pub: pub(faultyPub{message: func(m *brokers.Message) {
		for i := range m.Headers {
			m.Headers[i].Value = []byte(strings.ToValidUTF8(string(m.Headers[i].Value), "?"))
		}
	}}), found: []string{"message/headers-binary"}},
	"headers as a map": {pub: pub(faultyPub{message: func(m *brokers.Message) {
		for _, h := range m.Headers {
			m.Headers.Set(h.Key, h.Value)
		}
	}}), found: []string{"message/headers-repeated"}},
	"time in whole seconds": {pub: pub(faultyPub{message: func(m *brokers.Message) { m.Time = m.Time.Truncate(time.Second) }}),
		found: []string{"message/round-trip"}},
	"unknown time becomes 1970": {pub: pub(faultyPub{message: func(m *brokers.Message) { m.Time = time.Unix(m.Time.Unix()*0, 0) }}),
		found: []string{"message/time-unknown"}},
}

const brokenEnv = "BROKERTEST_BROKEN"

// TestBrokenAdapter runs the suite on the adapter that the environment names, in a
// process of its own: it must fail.
func TestBrokenAdapter(t *testing.T) {
	m, ok := mistakes[os.Getenv(brokenEnv)]
	if !ok {
		return // TestSuiteFindsMistakes starts it
	}
	brokertest.Run(t, brokertest.Config{
		Bubble: synctest.Test,
		Wait:   time.Minute,
		Quiet:  10 * time.Second,
		New: func(t *testing.T) brokertest.Fixture {
			b := memory.New(memory.Config{Strict: true})
			switch m.profile {
			case "topic":
				b.Topic("q", memory.TopicConfig{})
			case "channel":
				b.Channel("q", memory.ChannelConfig{})
			default:
				b.Queue("q", memory.QueueConfig{})
			}
			// Unordered hand-over for those who claim an order.
			b.Inject(memory.Select{Name: "q", Times: memory.Always}, memory.Reorder(3))
			inner := map[brokers.Source]brokers.Source{}
			return brokertest.Fixture{
				Destination: "q",
				Missing:     "nowhere",
				Source: func() brokers.Source {
					s := b.Source("q")
					if m.source == nil {
						return s
					}
					w := m.source(s)
					inner[w] = s
					return w
				},
				Publisher: func() brokers.Publisher {
					if m.pub == nil {
						return b.Publisher()
					}
					return m.pub(b.Publisher())
				},
				Disconnect: func(s brokers.Source) {
					if in := inner[s]; in != nil {
						s = in
					}
					b.Disconnect(s, nil, 0)
				},
			}
		},
	})
}

func TestSuiteFindsMistakes(t *testing.T) {
	t.Parallel()
	exe, err := os.Executable()
	require.NoError(t, err)
	for name, m := range mistakes {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, c := range m.found { // alone: a panic in one case must not hide another
				run := "^TestBrokenAdapter$/^capabilities$"
				if area, leaf, ok := strings.Cut(c, "/"); ok {
					run = fmt.Sprintf("^TestBrokenAdapter$/^(capabilities|%s)$/^%s$", area, leaf)
				}
				cmd := exec.Command(exe, "-test.run", run, "-test.v")
				cmd.Env = append(os.Environ(), brokenEnv+"="+name)
				out, err := cmd.CombinedOutput()
				assert.Error(t, err, "the suite passed it")
				assert.True(t, strings.Contains(string(out), "--- FAIL: TestBrokenAdapter/"+c), "%s", out)
			}
		})
	}
}

func TestExpectedListIsCompared(t *testing.T) {
	t.Parallel()
	exe, err := os.Executable()
	require.NoError(t, err)
	file := filepath.Join(t.TempDir(), "sub", "list.txt")
	run := func(update string) (string, error) {
		cmd := exec.Command(exe, "-test.run", "^TestSoundAdapter$", "-test.v")
		cmd.Env = append(os.Environ(), "BROKERTEST_EXPECTED="+file, "TWICEPROOF_UPDATE="+update)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	out, err := run("")
	require.Error(t, err, "a missing list")
	assert.Contains(t, out, "TWICEPROOF_UPDATE")
	out, err = run("1")
	require.NoError(t, err, out)
	out, err = run("")
	require.NoError(t, err, out)
	list, err := os.ReadFile(file)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(file, []byte(strings.Replace(string(list), "run  settle/twice\n", "", 1)), 0o644))
	out, err = run("")
	require.Error(t, err)
	assert.Contains(t, out, "+ run  settle/twice")
	assert.Contains(t, string(list), "n/a  message/payload-nil-is-no-empty-payload: for a reason")
}

func TestSoundAdapter(t *testing.T) {
	file := os.Getenv("BROKERTEST_EXPECTED")
	if file == "" {
		return // TestExpectedListIsCompared starts it
	}
	brokertest.Run(t, brokertest.Config{
		Bubble:   synctest.Test,
		Expected: file,
		Exempt:   map[string]string{"message/payload-nil-is-no-empty-payload": "for a reason"},
		New: func(t *testing.T) brokertest.Fixture {
			b := memory.New(memory.Config{})
			return brokertest.Fixture{
				Destination: "q",
				Source:      func() brokers.Source { return b.Source("q") },
				Publisher:   b.Publisher,
			}
		},
	})
}

// The suite outside a bubble, as adapters of real brokers run it.
func TestOnRealTime(t *testing.T) {
	t.Parallel()
	brokertest.Run(t, brokertest.Config{
		Quiet:    50 * time.Millisecond,
		Parallel: true,
		Lease:    200 * time.Millisecond,
		New: func(t *testing.T) brokertest.Fixture {
			b := memory.New(memory.Config{})
			b.Queue("q", memory.QueueConfig{Visibility: 200 * time.Millisecond})
			return brokertest.Fixture{
				Destination: "q",
				Source:      func() brokers.Source { return b.Source("q") },
				Publisher:   b.Publisher,
				Disconnect:  func(s brokers.Source) { b.Disconnect(s, nil, 10*time.Millisecond) },
			}
		},
	})
}
