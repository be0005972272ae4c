// Package pgproxy is a TCP proxy in front of PostgreSQL that loses the answer to a
// COMMIT, or the COMMIT itself, on demand: what no server does when asked.
package pgproxy

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
)

// Fault is what happens to the next COMMIT.
type Fault int32

const (
	// None lets everything pass.
	None Fault = iota
	// LoseAnswer lets the server commit, and cuts the client's connection instead of
	// its answer.
	LoseAnswer
	// LoseCommit cuts the client's connection before the server has seen the COMMIT,
	// and leaves the server waiting for it.
	LoseCommit
)

// Proxy forwards connections to one server.
type Proxy struct {
	// Addr is where it listens, host:port.
	Addr string

	target string
	fault  atomic.Int32
	marked atomic.Bool // only transactions with a Marker are struck
	hits   atomic.Int32
	wg     sync.WaitGroup
	mu     sync.Mutex
	conns  map[net.Conn]struct{}
}

// New starts a proxy to target and stops it with the test.
func New(t testing.TB, target string) *Proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &Proxy{Addr: l.Addr().String(), target: target, conns: map[net.Conn]struct{}{}}
	p.wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			p.wg.Go(func() { p.serve(c) })
		}
	})
	t.Cleanup(func() {
		l.Close()
		p.Cut()
		p.wg.Wait()
	})
	return p
}

// Arm sets what happens to the next COMMIT.
func (p *Proxy) Arm(f Fault) {
	p.marked.Store(false)
	p.fault.Store(int32(f))
}

// Marker is a statement that does nothing.
const Marker = `SELECT 'lose this commit'`

// ArmMarked is Arm for the next COMMIT of a transaction that has run [Marker], where
// others run beside it.
func (p *Proxy) ArmMarked(f Fault) {
	p.marked.Store(true)
	p.fault.Store(int32(f))
}

// Hits is how many COMMITs were lost.
func (p *Proxy) Hits() int { return int(p.hits.Load()) }

// Cut closes all connections.
func (p *Proxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		c.Close()
	}
}

func (p *Proxy) keep(c net.Conn) {
	p.mu.Lock()
	p.conns[c] = struct{}{}
	p.mu.Unlock()
}

func (p *Proxy) serve(client net.Conn) {
	defer client.Close()
	server, err := net.Dial("tcp", p.target)
	if err != nil {
		return
	}
	p.keep(client)
	p.keep(server)
	var mute atomic.Bool // answers are dropped from here on
	p.wg.Go(func() {
		buf := make([]byte, 32<<10)
		for {
			n, err := server.Read(buf)
			if mute.Load() {
				// The server has answered: it has committed.
				client.Close()
				server.Close()
				return
			}
			if n > 0 {
				if _, err := client.Write(buf[:n]); err != nil {
					return
				}
			}
			if err != nil {
				client.Close()
				return
			}
		}
	})
	buf := make([]byte, 32<<10)
	marker := false
	for {
		n, err := client.Read(buf)
		marker = marker || bytes.Contains(buf[:n], []byte(Marker))
		if n > 0 && bytes.Contains(bytes.ToLower(buf[:n]), []byte("commit\x00")) && (marker || !p.marked.Load()) {
			marker = false
			switch Fault(p.fault.Swap(int32(None))) {
			case LoseAnswer:
				p.hits.Add(1)
				mute.Store(true)
			case LoseCommit:
				p.hits.Add(1)
				return // the server's side stays open
			}
		}
		if n > 0 {
			if _, err := server.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			if err != io.EOF || !mute.Load() {
				server.Close()
			}
			return
		}
	}
}

// Between returns a pool like pool whose connections go through a proxy. Both end
// with the test.
func Between(t testing.TB, pool *pgxpool.Pool) (*pgxpool.Pool, *Proxy) {
	t.Helper()
	cfg := pool.Config()
	p := New(t, net.JoinHostPort(cfg.ConnConfig.Host, strconv.Itoa(int(cfg.ConnConfig.Port))))
	addr := netip.MustParseAddrPort(p.Addr)
	cfg.ConnConfig.Host, cfg.ConnConfig.Port = addr.Addr().String(), addr.Port()
	proxied, err := pgxpool.NewWithConfig(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(proxied.Close)
	return proxied, p
}
