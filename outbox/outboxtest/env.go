package outboxtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/outbox"
)

// env is what a case works with.
type env[Tx any] struct {
	*testing.T
	*suite[Tx]
	f Fixture[Tx]
	o Outbox[Tx] // with no options
}

func newEnv[Tx any](t *testing.T, s *suite[Tx]) *env[Tx] {
	f := s.New(t)
	return &env[Tx]{T: t, suite: s, f: f, o: f.Open()}
}

// Times for relays whose lease must run out while the test looks on.
const shortLease = 600 * time.Millisecond

// message returns a message with an ID.
func message(id, key string) *brokers.Message {
	return &brokers.Message{ID: id, Topic: "orders", Key: key, Payload: []byte(id)}
}

// messages returns a message for each ID, all with one key.
func messages(key string, ids ...string) []*brokers.Message {
	ms := make([]*brokers.Message, len(ids))
	for i, id := range ids {
		ms[i] = message(id, key)
	}
	return ms
}

func numbered(prefix string, n int) []string {
	ids := make([]string, n)
	for i := range ids {
		ids[i] = fmt.Sprintf("%s%d", prefix, i)
	}
	return ids
}

// enqueue commits messages and nudges.
func (e *env[Tx]) enqueue(ms ...*brokers.Message) {
	e.Helper()
	e.enqueueBy(e.o, ms...)
}

func (e *env[Tx]) enqueueBy(w outbox.Writer[Tx], ms ...*brokers.Message) {
	e.Helper()
	require.NoError(e, outbox.InTx(e.Context(), w, func(ctx context.Context, tx Tx) error { return w.Enqueue(ctx, tx, ms...) }))
}

// relay returns a relay whose log ends in the test's.
func (e *env[Tx]) relay(pub brokers.Publisher, cfg outbox.RelayConfig) *outbox.Relay {
	e.Helper()
	if cfg.Backoff == 0 {
		cfg.Backoff, cfg.MaxBackoff = time.Millisecond, 20*time.Millisecond
	}
	if cfg.IdlePoll == 0 {
		cfg.IdlePoll = 20 * time.Millisecond
	}
	cfg.Logger = slog.New(slog.NewTextHandler(e.Output(), nil))
	r, err := outbox.NewRelay(e.o, pub, cfg)
	require.NoError(e, err)
	return r
}

// start runs a relay until the case ends, or until stop is called, and waits for it.
func (e *env[Tx]) start(pub brokers.Publisher, cfg outbox.RelayConfig) (r *outbox.Relay, stop func()) {
	e.Helper()
	r = e.relay(pub, cfg)
	ctx, cancel := context.WithCancel(e.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			e.Errorf("Run: %v", err)
		}
	})
	e.Cleanup(stop)
	return r, stop
}

// eventually waits for something that must happen.
func (e *env[Tx]) eventually(what string, ok func() bool) {
	e.Helper()
	e.eventuallyIn(e.Wait, what, ok)
}

// eventuallyIn is eventually for cases in a bubble, where time is no matter.
func (e *env[Tx]) eventuallyIn(wait time.Duration, what string, ok func() bool) {
	e.Helper()
	if e.Bubble == nil {
		wait = min(wait, 2*e.Wait)
	}
	end := time.Now().Add(wait)
	for !ok() {
		if time.Now().After(end) {
			e.Fatalf("not within %v: %s", wait, what)
		}
		<-time.After(3 * time.Millisecond)
	}
}

func (e *env[Tx]) count(sql string) int {
	e.Helper()
	n, err := e.f.Int(context.WithoutCancel(e.Context()), sql)
	require.NoError(e, err)
	return n
}

func (e *env[Tx]) exec(sql string) {
	e.Helper()
	require.NoError(e, e.f.Exec(e.Context(), sql))
}

const (
	allRows  = `SELECT count(*) FROM outbox_messages`
	parked   = `SELECT count(*) FROM outbox_messages WHERE parked`
	attempts = `SELECT coalesce(max(attempts), 0) FROM outbox_messages`
)

// drained waits until the outbox is empty.
func (e *env[Tx]) drained() {
	e.Helper()
	e.eventually("the outbox is empty", func() bool { return e.count(allRows) == 0 })
}

// sink is a broker: it keeps what it has accepted, in order.
type sink struct {
	// answer decides; nil accepts everything. It runs without the lock.
	answer func(ctx context.Context, m *brokers.Message) brokers.Result

	mu    sync.Mutex
	got   []*brokers.Message
	calls int
	tried map[string]int
}

var accepted = brokers.Result{Outcome: brokers.Accepted}

func refused(err error) brokers.Result {
	return brokers.Result{Outcome: brokers.Refused, Err: err}
}

var (
	errTest   = errors.New("test")
	unknown   = brokers.Result{Outcome: brokers.Unknown, Err: brokers.ErrUnknownOutcome}
	notSent   = brokers.Result{Outcome: brokers.NotSent, Err: errTest}
	forGood   = refused(&brokers.Error{Class: brokers.Permanent, Err: errors.New("too large \x00 \xff")})
	transient = refused(errTest)
)

// answers gives IDs their results.
func answers(rs map[string]brokers.Result) func(context.Context, *brokers.Message) brokers.Result {
	return func(_ context.Context, m *brokers.Message) brokers.Result {
		if r, ok := rs[m.ID]; ok {
			return r
		}
		return accepted
	}
}

// Publish implements brokers.Publisher.
func (s *sink) Publish(ctx context.Context, ms ...*brokers.Message) []brokers.Result {
	s.mu.Lock()
	s.calls++
	s.mu.Unlock()
	rs := make([]brokers.Result, len(ms))
	stopped := map[string]bool{}
	for i, m := range ms {
		if m.Key != "" && stopped[m.Key] {
			rs[i] = brokers.Result{Outcome: brokers.NotSent, Err: brokers.ErrKeyStopped}
			continue
		}
		rs[i] = s.one(ctx, m)
		stopped[m.Key] = rs[i].Outcome != brokers.Accepted
	}
	return rs
}

func (s *sink) one(ctx context.Context, m *brokers.Message) brokers.Result {
	r := accepted
	if s.answer != nil {
		r = s.answer(ctx, m)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.tried == nil {
		s.tried = map[string]int{}
	}
	s.tried[m.ID]++
	if r.Outcome == brokers.Accepted {
		s.got = append(s.got, m.Clone())
	}
	return r
}

// Limits implements brokers.Publisher.
func (s *sink) Limits() brokers.PublishLimits { return brokers.PublishLimits{} }

// Close implements brokers.Publisher.
func (s *sink) Close(context.Context) error { return nil }

// ids returns the IDs accepted so far, in order.
func (s *sink) ids() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	ids := make([]string, len(s.got))
	for i, m := range s.got {
		ids[i] = m.ID
	}
	return ids
}

func (s *sink) has(id string) bool { return slices.Contains(s.ids(), id) }

func (s *sink) publishes() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.calls
}

func (s *sink) triesOf(id string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.tried[id]
}

// firsts returns the first occurrence of each ID with the key.
func (s *sink) firsts(key string) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var ids []string
	for _, m := range s.got {
		if m.Key == key && !slices.Contains(ids, m.ID) {
			ids = append(ids, m.ID)
		}
	}
	return ids
}

// same compares messages byte for byte; times as instants.
func (e *env[Tx]) same(want, got *brokers.Message) {
	e.Helper()
	require.Equal(e, want.ID, got.ID)
	require.Equal(e, want.Topic, got.Topic)
	require.Equal(e, want.Key, got.Key)
	require.Equal(e, want.Type, got.Type)
	require.Equal(e, want.ContentType, got.ContentType)
	require.True(e, want.Time.Equal(got.Time), "time %v, want %v", got.Time, want.Time)
	require.Equal(e, want.Headers, got.Headers)
	require.Equal(e, want.Payload == nil, got.Payload == nil, "nil payload")
	require.True(e, bytes.Equal(want.Payload, got.Payload), "payload of %d bytes, want %d", len(got.Payload), len(want.Payload))
}
