package sqs

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"sync"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/sqs"
	"github.com/aws/aws-sdk-go-v2/service/sqs/types"

	"github.com/twiceproof/twiceproof/brokers"
)

// maxBytes is the most that SQS takes in one call: 1 MiB of bodies and attributes.
const maxBytes = 1 << 20

// PublisherConfig configures a [Publisher]. One of AWS and Client is required.
type PublisherConfig struct {
	// AWS is what config.LoadDefaultConfig returns: the Publisher makes a client of it,
	// with an HTTP transport of its own unless AWS.HTTPClient is set.
	AWS aws.Config
	// Client is used instead of AWS if set. It stays yours: Close does not touch it.
	Client *sqs.Client
	// MaxBytes is the most that one message, and one call, may have, body and attributes
	// counted. 0 means SQS's limit of 1 MiB; set less where a queue's MaximumMessageSize is.
	MaxBytes int64
	// TextOnly refuses payloads that SQS takes as base64 only, for good: where consumers
	// know nothing of content-encoding. Default: false.
	TextOnly bool
	// DedupID returns the deduplication ID of a message to a FIFO queue, which drops what
	// it has seen within five minutes, also if that was consumed since. Nil means the
	// message's ID; change it for a message that is replayed on purpose.
	DedupID func(m *brokers.Message) string
	// Concurrency is how many calls a Publish has in flight. 0 means 4.
	Concurrency int
	// Logger is where the Publisher logs. Nil means nowhere.
	Logger *slog.Logger
}

// Publisher sends messages in batches. Message.Topic is the queue's name or URL. Make
// one by [NewPublisher].
type Publisher struct {
	cfg    PublisherConfig
	client *sqs.Client
	free   func()

	mu     sync.Mutex
	urls   map[string]string
	closed bool
	calls  sync.WaitGroup // Add under mu while not closed
	life   context.Context
	die    context.CancelCauseFunc
}

// NewPublisher returns a Publisher for the configuration, or everything that is wrong
// with it. It does no I/O.
func NewPublisher(cfg PublisherConfig) (*Publisher, error) {
	var errs []error
	if cfg.Client == nil && cfg.AWS.Region == "" && cfg.AWS.Credentials == nil && cfg.AWS.BaseEndpoint == nil {
		errs = append(errs, errors.New("no client: set AWS to what config.LoadDefaultConfig returns, or Client"))
	}
	if cfg.MaxBytes < 0 || cfg.MaxBytes > maxBytes {
		errs = append(errs, fmt.Errorf("MaxBytes is %d: SQS takes up to %d", cfg.MaxBytes, maxBytes))
	}
	if cfg.Concurrency < 0 {
		errs = append(errs, fmt.Errorf("negative Concurrency: %d", cfg.Concurrency))
	}
	if len(errs) > 0 {
		return nil, brokers.NewFatal("sqs.PublisherConfig", errors.Join(errs...), "")
	}
	cfg.MaxBytes, cfg.Concurrency = cmp.Or(cfg.MaxBytes, maxBytes), cmp.Or(cfg.Concurrency, 4)
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	p := &Publisher{cfg: cfg, urls: map[string]string{}}
	p.client, p.free = newClient(cfg.Client, cfg.AWS, 4*cfg.Concurrency)
	p.life, p.die = context.WithCancelCause(context.Background())
	return p, nil
}

// Limits implements [brokers.Publisher].
func (p *Publisher) Limits() brokers.PublishLimits {
	return brokers.PublishLimits{Messages: maxBatch, Bytes: p.cfg.MaxBytes, MessageBytes: p.cfg.MaxBytes}
}

// Close implements [brokers.Publisher]. It waits for Publish calls within ctx, and then
// ends them: what they have in flight is Unknown.
func (p *Publisher) Close(ctx context.Context) error {
	p.mu.Lock()
	was := p.closed
	p.closed = true
	p.mu.Unlock()
	if was {
		return nil
	}
	_ = wait(ctx, &p.calls) // what does not end by then is ended
	p.die(brokers.ErrClosed)
	p.calls.Wait()
	p.free()
	return nil
}

// outgoing is one message of a Publish call.
type outgoing struct {
	at    int
	m     *brokers.Message
	url   string
	entry types.SendMessageBatchRequestEntry
	size  int64
}

// Publish implements [brokers.Publisher]. Of one Key one message is in flight at a
// time; different ones go together in batches of ten.
func (p *Publisher) Publish(ctx context.Context, ms ...*brokers.Message) []brokers.Result {
	rs := make([]brokers.Result, len(ms))
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return fill(rs, brokers.Result{Outcome: brokers.NotSent, Err: brokers.ErrClosed})
	}
	p.calls.Add(1)
	p.mu.Unlock()
	defer p.calls.Done()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(p.life, func() { cancel(context.Cause(p.life)) })()

	pending := make([]int, len(ms))
	for i := range pending {
		pending[i] = i
	}
	stopped := map[string]bool{}
	for len(pending) > 0 {
		var round []*outgoing
		if round, pending = p.round(ctx, ms, pending, stopped, rs); len(round) > 0 {
			p.send(ctx, round, rs)
		}
		for _, o := range round {
			if o.m.Key != "" && rs[o.at].Outcome != brokers.Accepted {
				stopped[o.m.Key] = true
			}
		}
	}
	return rs
}

func fill(rs []brokers.Result, r brokers.Result) []brokers.Result {
	for i := range rs {
		rs[i] = r
	}
	return rs
}

// round takes the first pending message of each key, and all without one. What cannot
// be sent gets its result here.
func (p *Publisher) round(ctx context.Context, ms []*brokers.Message, pending []int, stopped map[string]bool, rs []brokers.Result) (round []*outgoing, rest []int) {
	taken := map[string]bool{}
	for _, i := range pending {
		m := ms[i]
		switch err := context.Cause(ctx); {
		case err != nil:
			rs[i] = brokers.Result{Outcome: brokers.NotSent, Err: err}
			continue
		case m.Key != "" && stopped[m.Key]:
			rs[i] = brokers.Result{Outcome: brokers.NotSent, Err: brokers.ErrKeyStopped}
			continue
		case m.Key != "" && taken[m.Key]:
			rest = append(rest, i)
			continue
		}
		o, r := p.prepare(ctx, m)
		if o == nil {
			rs[i] = r
			if m.Key != "" {
				stopped[m.Key] = true
			}
			continue
		}
		if m.Key != "" {
			taken[m.Key] = true
		}
		o.at = i
		round = append(round, o)
	}
	return round, rest
}

// prepare finds the queue and encodes the message; nil with the result if it cannot be sent.
func (p *Publisher) prepare(ctx context.Context, m *brokers.Message) (*outgoing, brokers.Result) {
	op := fmt.Sprintf("publish to %q", m.Topic)
	url, err := p.url(ctx, m.Topic)
	if err != nil {
		err = classify(op, causeOf(ctx, err))
		if code(err) != "" || errors.Is(err, brokers.ErrNoRoute) {
			return nil, brokers.Result{Outcome: brokers.Refused, Err: err}
		}
		return nil, brokers.Result{Outcome: brokers.NotSent, Err: err}
	}
	refused := func(err error, hint string) (*outgoing, brokers.Result) {
		return nil, brokers.Result{Outcome: brokers.Refused, Err: &brokers.Error{Class: brokers.Permanent, Op: op, Err: err, Hint: hint}}
	}
	o := &outgoing{m: m, url: url}
	if o.entry, err = p.cfg.encode(m, isFIFO(url)); err != nil {
		return refused(err, "")
	}
	if o.size = sizeOf(&o.entry); o.size > p.cfg.MaxBytes {
		return refused(fmt.Errorf("the message has %d bytes as SQS counts them; the limit is %d", o.size, p.cfg.MaxBytes),
			"keep large payloads elsewhere and send a reference")
	}
	return o, brokers.Result{}
}

// url returns the URL of a queue, asked for once.
func (p *Publisher) url(ctx context.Context, queue string) (string, error) {
	if queue == "" {
		return "", &brokers.Error{Class: brokers.Permanent, Op: "publish", Err: brokers.ErrNoRoute, Hint: "Topic is empty: set the queue's name or URL"}
	}
	p.mu.Lock()
	url, ok := p.urls[queue]
	p.mu.Unlock()
	if ok {
		return url, nil
	}
	url, err := queueURL(ctx, p.client, queue)
	if err != nil {
		return "", err
	}
	p.mu.Lock()
	p.urls[queue] = url
	p.mu.Unlock()
	return url, nil
}

// forget makes the next message ask for the URL again: the queue may come back.
func (p *Publisher) forget(queue string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.urls, queue)
}

// send packs a round into batches by count and bytes, and sends some at a time.
func (p *Publisher) send(ctx context.Context, round []*outgoing, rs []brokers.Result) {
	var batches [][]*outgoing
	open := map[string]int{} // by queue: index into batches
	sizes := map[string]int64{}
	for _, o := range round {
		i, ok := open[o.url]
		if !ok || len(batches[i]) == maxBatch || sizes[o.url]+o.size > p.cfg.MaxBytes {
			i = len(batches)
			batches = append(batches, nil)
			open[o.url], sizes[o.url] = i, 0
		}
		batches[i] = append(batches[i], o)
		sizes[o.url] += o.size
	}
	var wg sync.WaitGroup
	slots := make(chan struct{}, p.cfg.Concurrency)
	for _, b := range batches {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			p.sendBatch(ctx, b, rs)
		})
	}
	wg.Wait()
}

// sendBatch is one call. Batches write different places of rs.
func (p *Publisher) sendBatch(ctx context.Context, b []*outgoing, rs []brokers.Result) {
	if err := context.Cause(ctx); err != nil {
		for _, o := range b {
			rs[o.at] = brokers.Result{Outcome: brokers.NotSent, Err: err}
		}
		return
	}
	in := &sqs.SendMessageBatchInput{QueueUrl: &b[0].url, Entries: make([]types.SendMessageBatchRequestEntry, len(b))}
	for i, o := range b {
		in.Entries[i] = o.entry
		in.Entries[i].Id = aws.String(strconv.Itoa(i))
	}
	// Not repeated by the client: the first try may have stored what the second is told
	// was refused.
	out, err := p.client.SendMessageBatch(ctx, in, once, unchecked)
	if err != nil {
		p.failed(ctx, b, err, rs)
		return
	}
	for i, r := range p.results(b, out) {
		rs[b[i].at] = r
	}
}

// failed judges a call without answers to its entries.
func (p *Publisher) failed(ctx context.Context, b []*outgoing, err error, rs []brokers.Result) {
	op := fmt.Sprintf("publish to %q", b[0].m.Topic)
	c, st := code(err), status(err)
	if c == "BatchRequestTooLong" && len(b) > 1 { // it counts otherwise than we do
		for half := range slices.Chunk(b, (len(b)+1)/2) {
			p.sendBatch(ctx, half, rs)
		}
		return
	}
	r := brokers.Result{Outcome: brokers.Unknown}
	cerr := classify(op, causeOf(ctx, err))
	switch {
	case neverSent(err):
		r.Outcome, r.Err = brokers.NotSent, cerr
	case st >= 400 && st < 500 && c != "":
		r.Outcome = brokers.Refused
		if c == "BatchRequestTooLong" {
			cerr = &brokers.Error{Class: brokers.Permanent, Op: op, Err: err, Hint: "lower MaxBytes to the queue's MaximumMessageSize"}
		}
		r.Err = cerr
		if c == "QueueDoesNotExist" {
			p.forget(b[0].m.Topic)
		}
	default:
		class := brokers.ClassOf(cerr)
		if class == brokers.Permanent {
			class = brokers.Retryable
		}
		r.Err = &brokers.Error{Class: class, Op: op, Err: errors.Join(brokers.ErrUnknownOutcome, causeOf(ctx, err)), After: retryPause}
	}
	for _, o := range b {
		rs[o.at] = r
	}
}

// results puts the answers in the order of the batch.
func (p *Publisher) results(b []*outgoing, out *sqs.SendMessageBatchOutput) []brokers.Result {
	op := fmt.Sprintf("publish to %q", b[0].m.Topic)
	rs := fill(make([]brokers.Result, len(b)), brokers.Result{Outcome: brokers.Unknown,
		Err: &brokers.Error{Op: op, Err: fmt.Errorf("%w: the answer does not mention it", brokers.ErrUnknownOutcome), After: retryPause}})
	put := func(id *string, r brokers.Result) {
		if i, err := strconv.Atoi(aws.ToString(id)); err == nil && i >= 0 && i < len(rs) {
			rs[i] = r
		}
	}
	for _, e := range out.Successful {
		put(e.Id, brokers.Result{Outcome: brokers.Accepted})
	}
	for _, f := range out.Failed {
		c := bare(aws.ToString(f.Code))
		class, hint := classOf(c, 0)
		if f.SenderFault && class == brokers.Retryable {
			class = brokers.Permanent
		}
		err := error(fmt.Errorf("%s: %s", cmp.Or(c, "failed"), aws.ToString(f.Message)))
		put(f.Id, brokers.Result{Outcome: brokers.Refused, Err: &brokers.Error{Class: class, Op: op, Err: err, After: retryPause, Hint: hint}})
	}
	return rs
}
