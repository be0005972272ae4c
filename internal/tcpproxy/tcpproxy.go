// Package tcpproxy is a TCP proxy for tests, between a client and its server: it
// drops what one side sends while the connection stays, which is what a lost answer
// looks like, and cuts connections. It knows no protocol.
package tcpproxy

import (
	"net"
	"sync"
)

// Proxy forwards connections to one server.
type Proxy struct {
	l        net.Listener
	upstream string
	wg       sync.WaitGroup

	mu           sync.Mutex
	conns        []net.Conn
	closed       bool
	dropToServer bool
	dropToClient bool
}

// New listens on a local port. Close it.
func New(upstream string) (*Proxy, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &Proxy{l: l, upstream: upstream}
	p.wg.Go(p.accept)
	return p, nil
}

// Addr is where clients connect.
func (p *Proxy) Addr() string { return p.l.Addr().String() }

// Pass says what is forwarded from now on; what is not is dropped silently.
func (p *Proxy) Pass(toServer, toClient bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.dropToServer, p.dropToClient = !toServer, !toClient
}

// Cut ends all connections; new ones are taken.
func (p *Proxy) Cut() {
	p.mu.Lock()
	conns := p.conns
	p.conns = nil
	p.mu.Unlock()
	for _, c := range conns {
		_ = c.Close()
	}
}

// Close ends everything and waits for it.
func (p *Proxy) Close() {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	_ = p.l.Close()
	p.Cut()
	p.wg.Wait()
}

func (p *Proxy) accept() {
	for {
		c, err := p.l.Accept()
		if err != nil {
			return
		}
		s, err := net.Dial("tcp", p.upstream)
		if err != nil {
			_ = c.Close()
			continue
		}
		p.mu.Lock()
		p.conns = append(p.conns, c, s)
		closed := p.closed
		p.mu.Unlock()
		p.wg.Go(func() { p.copy(s, c, &p.dropToServer) })
		p.wg.Go(func() { p.copy(c, s, &p.dropToClient) })
		if closed {
			p.Cut()
		}
	}
}

func (p *Proxy) copy(dst, src net.Conn, drop *bool) {
	defer dst.Close() //nolint:errcheck // the end of either side ends both
	buf := make([]byte, 64<<10)
	for {
		n, err := src.Read(buf)
		if err != nil {
			return
		}
		p.mu.Lock()
		dropped := *drop
		p.mu.Unlock()
		if dropped {
			continue
		}
		if _, err := dst.Write(buf[:n]); err != nil {
			return
		}
	}
}
