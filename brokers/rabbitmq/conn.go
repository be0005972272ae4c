package rabbitmq

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

const (
	// handshakeTimeout bounds TCP, TLS and AMQP handshakes of one connection.
	handshakeTimeout = 15 * time.Second
	// closeTimeout bounds an orderly close: under an alarm the broker does not answer.
	closeTimeout = 5 * time.Second
	// stuckAfter is how long a write may stand still once its caller has given up.
	stuckAfter = time.Second
)

// DialFunc opens a network connection.
type DialFunc func(ctx context.Context, network, addr string) (net.Conn, error)

// connConfig is what Source and Publisher have in common, checked.
type connConfig struct {
	urls      []amqp.URI
	raw       []string
	tls       *tls.Config
	dial      DialFunc
	sasl      []amqp.Authentication
	heartbeat time.Duration
	name      string
}

// newConnConfig checks the fields. No error holds any part of a URL: a malformed
// one may have its password anywhere.
func newConnConfig(url string, more []string, tlsConfig *tls.Config, dial DialFunc, sasl []amqp.Authentication, heartbeat time.Duration) (connConfig, []error) {
	c := connConfig{tls: tlsConfig, dial: dial, sasl: sasl, heartbeat: heartbeat}
	var errs []error
	if url == "" {
		errs = append(errs, errors.New(`URL is empty: set it, for example to "amqp://user:password@host:5672/"`))
	} else {
		more = append([]string{url}, more...)
	}
	for i, raw := range more {
		uri, err := amqp.ParseURI(raw)
		if err != nil {
			errs = append(errs, fmt.Errorf("URL number %d cannot be parsed: it must be amqp:// or amqps://, with special characters in user and password percent-encoded", i+1))
			continue
		}
		if tlsConfig != nil && uri.Scheme != "amqps" {
			errs = append(errs, fmt.Errorf("TLS is set, but the URL of %s says amqp://: say amqps://", uri.Host))
		}
		for _, m := range uri.AuthMechanism {
			if !slices.Contains([]string{"plain", "amqplain", "external"}, strings.ToLower(m)) {
				errs = append(errs, fmt.Errorf("auth_mechanism %q in the URL of %s is unknown: use plain, amqplain or external", m, uri.Host))
			}
		}
		c.urls, c.raw = append(c.urls, uri), append(c.raw, raw)
	}
	if c.heartbeat < 0 {
		errs = append(errs, fmt.Errorf("field Heartbeat is negative: %s", heartbeat))
	}
	if c.heartbeat == 0 {
		c.heartbeat = 10 * time.Second
	} else if c.heartbeat < time.Second {
		errs = append(errs, fmt.Errorf("field Heartbeat, %s, is too short: AMQP counts in seconds", heartbeat))
	}
	if c.dial == nil {
		c.dial = (&net.Dialer{KeepAlive: 15 * time.Second}).DialContext
	}
	return c, errs
}

// label names a node without its password.
func label(u amqp.URI) string {
	return fmt.Sprintf("%s:%d, vhost %q, as user %q", u.Host, u.Port, u.Vhost, u.Username)
}

// conn is one AMQP connection with a handle on its socket: the library holds locks
// while it writes, so that a write that stands still can be ended from below only.
type conn struct {
	*amqp.Connection
	sock *socket
	dead chan struct{} // closed when the connection is
	err  error         // why; set before dead is closed
}

// connect opens a connection to the n-th node (modulo their number).
func (c connConfig) connect(ctx context.Context, n int) (*conn, error) {
	uri, raw := c.urls[n%len(c.urls)], c.raw[n%len(c.urls)]
	ctx, cancel := context.WithTimeoutCause(ctx, handshakeTimeout, fmt.Errorf("no answer within %s", handshakeTimeout))
	defer cancel()
	var sock *socket
	var stop func() bool
	properties := amqp.NewConnectionProperties()
	if c.name != "" {
		properties.SetClientConnectionName(c.name)
	}
	cfg := amqp.Config{
		Heartbeat: c.heartbeat, Properties: properties, SASL: c.mechanisms(uri, properties),
		Dial: func(network, addr string) (net.Conn, error) {
			nc, err := c.dial(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			sock = &socket{Conn: nc, timeout: 3 * c.heartbeat}
			stop = context.AfterFunc(ctx, sock.kill)
			return sock, nil
		},
	}
	if c.tls != nil {
		cfg.TLSClientConfig = c.tls.Clone() // the library writes to it
	}
	ac, err := amqp.DialConfig(raw, cfg)
	if stop != nil && !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		if sock != nil {
			sock.kill()
			err = sock.explain(err)
		}
		if cause := context.Cause(ctx); cause != nil {
			err = errors.Join(cause, err)
		}
		return nil, classifyConnect("connect to RabbitMQ at "+label(uri), err)
	}
	cn := &conn{Connection: ac, sock: sock, dead: make(chan struct{})}
	closed := ac.NotifyClose(make(chan *amqp.Error, 1)) // unbuffered, the reason would be lost
	go func() {                                         // ends with the connection, which close waits for
		if e, ok := <-closed; ok && e != nil {
			cn.err = e
		} else {
			cn.err = amqp.ErrClosed
		}
		close(cn.dead)
	}()
	return cn, nil
}

// mechanisms returns the ways to authenticate, each wrapped so that a refusal comes
// as an answer. Without that capability, which the library does not announce, the
// broker waits for 3 s and resets the connection, which any network fault does too.
func (c connConfig) mechanisms(uri amqp.URI, properties amqp.Table) []amqp.Authentication {
	sasl := c.sasl
	if sasl == nil {
		for _, m := range uri.AuthMechanism {
			switch strings.ToLower(m) {
			case "plain":
				sasl = append(sasl, uri.PlainAuth())
			case "amqplain":
				sasl = append(sasl, uri.AMQPlainAuth())
			case "external":
				sasl = append(sasl, &amqp.ExternalAuth{})
			}
		}
	}
	if sasl == nil {
		sasl = []amqp.Authentication{uri.PlainAuth()}
	}
	out := make([]amqp.Authentication, len(sasl))
	for i, a := range sasl {
		out[i] = answered{a, properties}
	}
	return out
}

// answered announces the capability at the only moment when that can be done: the
// library asks for the response after it has set the capabilities and before it
// sends both.
type answered struct {
	amqp.Authentication
	properties amqp.Table
}

func (a answered) Response() string {
	if caps, ok := a.properties["capabilities"].(amqp.Table); ok {
		caps["authentication_failure_close"] = true
	}
	return a.Authentication.Response()
}

// alive tells whether the connection is usable. A nil one is not.
func (c *conn) alive() bool {
	if c == nil {
		return false
	}
	select {
	case <-c.dead:
		return false
	default:
		return !c.IsClosed()
	}
}

// bounded runs fn, which calls the library, and ends the connection when ctx ends
// first: nothing else gets the library out of a call that is not answered.
func (c *conn) bounded(ctx context.Context, fn func() error) error {
	stop := context.AfterFunc(ctx, c.sock.kill)
	err := fn()
	if !stop() && err != nil {
		return errors.Join(context.Cause(ctx), err)
	}
	return err
}

// close closes the connection in order, within ctx and closeTimeout, and waits for
// its goroutine.
func (c *conn) close(ctx context.Context) {
	if c == nil {
		return
	}
	deadline := time.Now().Add(closeTimeout)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	timer := time.AfterFunc(time.Until(deadline), c.sock.kill)
	defer timer.Stop()
	stop := context.AfterFunc(ctx, c.sock.kill)
	defer stop()
	_ = c.CloseDeadline(deadline) // either way it is closed
	c.sock.kill()
	<-c.dead
}

// socket is a network connection whose writes cannot stand still for ever and that
// remembers why reading ended.
type socket struct {
	net.Conn
	timeout time.Duration
	killed  atomic.Bool
	writing atomic.Int64 // start of the write in progress, in Unix nanoseconds; 0: none

	mu      sync.Mutex
	readErr error
}

func (s *socket) Write(b []byte) (int, error) {
	s.writing.Store(time.Now().UnixNano())
	defer s.writing.Store(0)
	if err := s.SetWriteDeadline(time.Now().Add(s.timeout)); err != nil {
		return 0, err
	}
	return s.Conn.Write(b)
}

func (s *socket) Read(b []byte) (int, error) {
	n, err := s.Conn.Read(b)
	if err != nil {
		s.mu.Lock()
		if s.readErr == nil {
			s.readErr = err
		}
		s.mu.Unlock()
	}
	return n, err
}

// kill closes the socket. Whatever the library is doing on it ends with an error.
func (s *socket) kill() {
	s.killed.Store(true)
	_ = s.Close()
}

// killIfStuck closes the socket if one write stands still for stuckAfter, counted
// from now, or until done is closed.
func (s *socket) killIfStuck(done <-chan struct{}) {
	began := s.writing.Load()
	if began == 0 {
		return
	}
	timer := time.NewTimer(stuckAfter)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
		if s.writing.Load() == began {
			s.kill()
		}
	}
}

// explain replaces the library's guess about a failed handshake: it says "bad
// credentials" or "no access to this vhost" whenever the connection ends at that
// step, also when the network did it. The broker says so itself; see mechanisms.
func (s *socket) explain(err error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if (errors.Is(err, amqp.ErrCredentials) || errors.Is(err, amqp.ErrVhost)) && s.readErr != nil {
		return fmt.Errorf("the connection ended in the handshake: %w", s.readErr)
	}
	return err
}
