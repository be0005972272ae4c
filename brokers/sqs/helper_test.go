package sqs

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/sqs"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
	"github.com/twiceproof/twiceproof/internal/sqsfake"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// wire is an HTTP transport whose calls can be made to fail, before or after the
// server has had them.
type wire struct {
	base  http.RoundTripper
	calls atomic.Int64
	mu    sync.Mutex
	rules []*rule
	count map[string]int
}

// rule fails calls of one operation.
type rule struct {
	op     string
	times  int  // how often; -1 always
	before bool // the server never gets it
	gate   func() bool
}

var errCut = errors.New("connection cut by the test")

func (w *wire) RoundTrip(r *http.Request) (*http.Response, error) {
	w.calls.Add(1)
	_, op, _ := strings.Cut(r.Header.Get("X-Amz-Target"), ".")
	w.mu.Lock()
	if w.count == nil {
		w.count = map[string]int{}
	}
	w.count[op]++
	var hit *rule
	for _, ru := range w.rules {
		if ru.op == op && ru.times != 0 && (ru.gate == nil || ru.gate()) {
			hit = ru
			ru.times--
			break
		}
	}
	w.mu.Unlock()
	if hit != nil && hit.before {
		if r.Body != nil {
			_ = r.Body.Close()
		}
		return nil, errCut
	}
	resp, err := w.base.RoundTrip(r)
	if hit != nil && err == nil {
		_ = resp.Body.Close()
		return nil, errCut
	}
	return resp, err
}

func (w *wire) fail(r rule) (stop func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	ru := &r
	w.rules = append(w.rules, ru)
	return func() { w.mu.Lock(); ru.times = 0; w.mu.Unlock() }
}

func (w *wire) counted(op string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.count[op]
}

func httpClient(rt http.RoundTripper) *http.Client {
	return &http.Client{Transport: rt, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// clientOn returns a client on an endpoint, through rt if it is not nil.
func clientOn(endpoint string, rt http.RoundTripper) *sqs.Client {
	return sqs.New(sqs.Options{BaseEndpoint: aws.String(endpoint), Region: "eu-central-1", HTTPClient: httpClient(rt),
		Credentials: aws.CredentialsProviderFunc(func(context.Context) (aws.Credentials, error) {
			return aws.Credentials{AccessKeyID: "test", SecretAccessKey: "test"}, nil
		})})
}

// rig is a fresh queue on some server.
type rig struct {
	t      *testing.T
	queue  string
	url    string
	client *sqs.Client // of the test's own
	wire   *wire       // of the parts under test
	viaSUT *sqs.Client
}

// newRig makes a queue on the endpoint. rt is the way to it.
func newRig(t *testing.T, endpoint string, rt http.RoundTripper, fifo bool, attrs map[string]string) *rig {
	t.Helper()
	r := &rig{t: t, queue: devtest.Name("t"), wire: &wire{base: rt}}
	all := map[string]string{}
	if fifo {
		r.queue += ".fifo"
		all["FifoQueue"] = "true"
	}
	for k, v := range attrs {
		all[k] = v
	}
	r.client, r.viaSUT = clientOn(endpoint, rt), clientOn(endpoint, r.wire)
	out, err := r.client.CreateQueue(context.Background(), &sqs.CreateQueueInput{QueueName: &r.queue, Attributes: all})
	require.NoError(t, err)
	r.url = *out.QueueUrl
	return r
}

// elastic is a rig on the real server.
func elastic(t *testing.T, fifo bool, attrs map[string]string) *rig {
	t.Helper()
	endpoint := devtest.SQSEndpoint(t)
	tr := http.DefaultTransport.(*http.Transport).Clone()
	tr.MaxIdleConnsPerHost = 64
	t.Cleanup(tr.CloseIdleConnections)
	return newRig(t, endpoint, tr, fifo, attrs)
}

func (r *rig) source(edit func(*SourceConfig)) *Source {
	r.t.Helper()
	cfg := SourceConfig{Client: r.viaSUT, Queue: r.queue, Visibility: 3 * time.Second, Wait: time.Second}
	if edit != nil {
		edit(&cfg)
	}
	s, err := NewSource(cfg)
	require.NoError(r.t, err)
	return s
}

func (r *rig) publisher(edit func(*PublisherConfig)) *Publisher {
	r.t.Helper()
	cfg := PublisherConfig{Client: r.viaSUT}
	if edit != nil {
		edit(&cfg)
	}
	p, err := NewPublisher(cfg)
	require.NoError(r.t, err)
	return p
}

// disconnect fails every extension until nothing in hand is the Source's any more: the
// messages become visible on the server by its own clock.
func (r *rig) disconnect(s *Source) {
	stop := r.wire.fail(rule{op: "ChangeMessageVisibilityBatch", times: -1, before: true})
	defer stop()
	s.mu.Lock()
	held := s.inHand()
	s.mu.Unlock()
	for _, l := range held {
		<-l.d.Context.Done()
	}
}

func (r *rig) fixture() (src func() brokers.Source, pub func() brokers.Publisher) {
	return func() brokers.Source { return r.source(nil) }, func() brokers.Publisher { return r.publisher(nil) }
}

// strict is a rig on the server in the process; use it in a synctest bubble.
func strict(t *testing.T, fifo bool, attrs map[string]string) (*rig, *sqsfake.Server) {
	t.Helper()
	srv := sqsfake.New()
	return newRig(t, "http://sqsfake", srv, fifo, attrs), srv
}

// events collects what a Source tells.
type events struct {
	mu  sync.Mutex
	all []brokers.Event
}

func (e *events) note(ev brokers.Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.all = append(e.all, ev)
}

func (e *events) of(kind brokers.EventKind) (n int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, ev := range e.all {
		if ev.Kind == kind {
			n++
		}
	}
	return n
}

// open opens a Source that is closed at the end of the test.
func (r *rig) open(room int, edit func(*SourceConfig)) (*Source, *events) {
	r.t.Helper()
	s, ev := r.source(edit), &events{}
	_, err := s.Open(r.t.Context(), brokers.OpenOptions{Consumer: "test", Room: room, Observer: ev.note})
	require.NoError(r.t, err)
	r.t.Cleanup(func() { r.close(s) })
	return s, ev
}

func (r *rig) close(c interface{ Close(context.Context) error }) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	require.NoError(r.t, c.Close(ctx))
}

// send publishes messages with ids, all of one key.
func (r *rig) send(key string, ids ...string) {
	r.t.Helper()
	p := r.publisher(nil)
	defer r.close(p)
	ms := make([]*brokers.Message, len(ids))
	for i, id := range ids {
		ms[i] = &brokers.Message{ID: id, Key: key, Topic: r.queue, Payload: []byte("payload of " + id)}
	}
	for _, res := range p.Publish(r.t.Context(), ms...) {
		require.Equal(r.t, brokers.Accepted, res.Outcome, "%v", res.Err)
	}
}

// receive receives n deliveries within a while.
func (r *rig) receive(s *Source, n int) []*brokers.Delivery {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 90*time.Second)
	defer cancel()
	var ds []*brokers.Delivery
	for len(ds) < n {
		more, err := s.Receive(ctx, n-len(ds))
		require.NoError(r.t, err, "received %d of %d", len(ds), n)
		ds = append(ds, more...)
	}
	return ds
}

// nothing checks that nothing is handed over for a while.
func (r *rig) nothing(s *Source, d time.Duration) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	ds, err := s.Receive(ctx, 10)
	require.ErrorIs(r.t, err, context.DeadlineExceeded, "received %v", idsOf(ds))
}

func (r *rig) settle(s *Source, v brokers.Verb, ds ...*brokers.Delivery) []error {
	ss := make([]brokers.Settlement, len(ds))
	for i, d := range ds {
		ss[i] = brokers.Settlement{Delivery: d, Verb: v}
	}
	return s.Settle(context.Background(), ss...)
}

func (r *rig) done(s *Source, ds ...*brokers.Delivery) {
	r.t.Helper()
	for _, err := range r.settle(s, brokers.Done, ds...) {
		require.NoError(r.t, err)
	}
}

func idsOf(ds []*brokers.Delivery) []string {
	ids := make([]string, len(ds))
	for i, d := range ds {
		ids[i] = d.ID
	}
	return ids
}

// numbered returns ids "<prefix>0000" and so on.
func numbered(prefix string, n int) []string {
	ids := make([]string, n)
	for i := range ids {
		ids[i] = fmt.Sprintf("%s%04d", prefix, i)
	}
	return ids
}
