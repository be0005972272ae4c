package sqs

import (
	"cmp"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/sqs"

	"github.com/twiceproof/twiceproof/brokers"
)

const (
	defaultVisibility = 60 * time.Second
	defaultWait       = 5 * time.Second
	defaultPollers    = 32
	defaultMissingFor = 30 * time.Second
	defaultRoom       = 64
	defaultRoomBytes  = 64 << 20
	maxVisibility     = 12 * time.Hour // also the most that SQS lets a message be held
	maxWait           = 20 * time.Second
	maxBatch          = 10
)

// SourceConfig configures a [Source]. Queue and one of AWS and Client are required;
// every other zero value is ready.
type SourceConfig struct {
	// AWS is what config.LoadDefaultConfig returns: the Source makes a client of it,
	// with an HTTP transport of its own unless AWS.HTTPClient is set. BaseEndpoint
	// leads to another server than Amazon's.
	AWS aws.Config
	// Client is used instead of AWS if set. It stays yours: Close does not touch it.
	Client *sqs.Client

	// Queue is the queue's name or URL.
	Queue string
	// Visibility is how long a message that is received stays hidden unless it is
	// extended, which the Source does every third of it. A consumer that dies holds its
	// messages back for so long. In whole seconds, 2 s to 12 h; 0 means 60 s.
	Visibility time.Duration
	// Wait is how long an empty receive waits for a message, in whole seconds from 1 to
	// 20; 0 means 5 s. Close may take as long: a receive that is cut off can hide a
	// message for Visibility.
	Wait time.Duration
	// MaxPollers bounds how many receives wait at once. There is one while the queue is
	// empty, and more as they come back full. 0 means 32.
	MaxPollers int

	// Envelope says what is wrapped around the producer's message. The zero value is
	// NoEnvelope.
	Envelope Envelope
	// ID tells a message's ID, after its envelope was taken off. Nil means the attribute
	// "message-id", which the function finds in m.ID. SQS's own identifiers are in the
	// headers "sqs-message-id" and "sqs-deduplication-id" while it runs, and are not
	// stable: see the package comment. An error marks the delivery as defective: it is
	// kept as dead and never processed. It is called once for each delivery and must be fast.
	ID func(m *brokers.Message) (string, error)

	// MissingFor is how long the queue may be missing, or access to it denied, after
	// Open before Receive returns an error of class Fatal. 0 means 30 s.
	MissingFor time.Duration
}

// withDefaults checks the configuration and fills it in; all mistakes come at once.
func (c SourceConfig) withDefaults() (SourceConfig, error) {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if c.Queue == "" {
		bad("Queue is empty: set the name or the URL of the queue to consume")
	}
	if c.Client == nil && c.AWS.Region == "" && c.AWS.Credentials == nil && c.AWS.BaseEndpoint == nil {
		bad("neither AWS nor Client is set: use what config.LoadDefaultConfig returns")
	}
	seconds := func(name string, d *time.Duration, zero, low, high time.Duration) {
		*d = cmp.Or(*d, zero)
		if *d < low || *d > high || *d%time.Second != 0 {
			bad("%s is %s: use whole seconds from %s to %s", name, *d, low, high)
		}
	}
	seconds("Visibility", &c.Visibility, defaultVisibility, 2*time.Second, maxVisibility)
	seconds("Wait", &c.Wait, defaultWait, time.Second, maxWait)
	c.MaxPollers, c.MissingFor = cmp.Or(c.MaxPollers, defaultPollers), cmp.Or(c.MissingFor, defaultMissingFor)
	if c.MaxPollers < 0 {
		bad("MaxPollers is negative: %d", c.MaxPollers)
	}
	if c.MissingFor < 0 {
		bad("MissingFor is negative: %s", c.MissingFor)
	}
	if c.Envelope > AutoEnvelope {
		bad("Envelope %d is unknown: use NoEnvelope, SNS, EventBridge or AutoEnvelope", c.Envelope)
	}
	if len(errs) > 0 {
		return c, brokers.NewFatal("sqs.SourceConfig", errors.Join(errs...), "")
	}
	return c, nil
}

// newClient returns the client to use and, if it has a transport of ours, the function
// that closes its idle connections.
func newClient(given *sqs.Client, cfg aws.Config, conns int) (*sqs.Client, func()) {
	if given != nil {
		return given, func() {}
	}
	free := func() {}
	if cfg.HTTPClient == nil {
		tr := http.DefaultTransport.(*http.Transport).Clone()
		// The default keeps few: every further poller would make a connection for each call.
		tr.MaxIdleConnsPerHost, tr.MaxIdleConns = conns, conns
		cfg.HTTPClient = &http.Client{Transport: tr, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
		free = tr.CloseIdleConnections
	}
	return sqs.NewFromConfig(cfg, func(o *sqs.Options) { o.Region = cmp.Or(o.Region, "us-east-1") }), free
}

// nameOf returns the name of a queue that is given by name or URL.
func nameOf(queue string) string { return queue[strings.LastIndexByte(queue, '/')+1:] }

func isURL(queue string) bool { return strings.Contains(queue, "://") }

func isFIFO(queue string) bool { return strings.HasSuffix(queue, ".fifo") }

// once keeps the client from repeating a call by itself: what an unanswered one did is
// ours to judge.
func once(o *sqs.Options) { o.RetryMaxAttempts = 1 }

// unchecked keeps a wrong checksum of one message from failing the whole receive, and
// hiding all others that came with it.
func unchecked(o *sqs.Options) { o.DisableMessageChecksumValidation = true }
