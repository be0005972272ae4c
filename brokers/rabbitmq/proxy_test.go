package rabbitmq

import (
	"bufio"
	"encoding/binary"
	"io"
	"net"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// proxy stands between client and broker. It can cut connections, drop what either
// side sends without closing, refuse new connections, and it logs the AMQP methods
// that clients send.
type proxy struct {
	l        net.Listener
	upstream string
	wg       sync.WaitGroup

	mu      sync.Mutex
	conns   []net.Conn
	sent    []method
	toSrv   bool // false: what clients send is dropped
	toCli   bool // false: what the broker sends is dropped
	refuse  bool
	accepts int
}

// method is one AMQP method frame of a client.
type method struct {
	conn, channel int
	class, id     uint16
	tag           uint64 // of basic.ack, basic.reject and basic.nack
}

const (
	classBasic = 60
	idPublish  = 40
	idAck      = 80
	idReject   = 90
	idNack     = 120
)

func newProxy(t *testing.T, upstream string) *proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p := &proxy{l: l, upstream: upstream, toSrv: true, toCli: true}
	p.wg.Go(p.accept)
	t.Cleanup(func() {
		_ = l.Close()
		p.cut()
		p.wg.Wait()
	})
	return p
}

func (p *proxy) url() string { return "amqp://guest:guest@" + p.l.Addr().String() + "/" }

func (p *proxy) accept() {
	for {
		c, err := p.l.Accept()
		if err != nil {
			return
		}
		p.mu.Lock()
		refuse := p.refuse
		p.accepts++
		n := p.accepts
		p.mu.Unlock()
		if refuse {
			_ = c.Close()
			continue
		}
		s, err := net.Dial("tcp", p.upstream)
		if err != nil {
			_ = c.Close()
			continue
		}
		p.mu.Lock()
		p.conns = append(p.conns, c, s)
		p.mu.Unlock()
		frames, w := io.Pipe()
		p.wg.Go(func() { p.parse(n, frames) })
		p.wg.Go(func() { p.copy(s, c, w, &p.toSrv) })
		p.wg.Go(func() { p.copy(c, s, nil, &p.toCli) })
	}
}

func (p *proxy) copy(dst, src net.Conn, tee *io.PipeWriter, open *bool) {
	defer dst.Close() //nolint:errcheck // either side ends both
	if tee != nil {
		defer tee.Close() //nolint:errcheck // never fails
	}
	buf := make([]byte, 64<<10)
	for {
		n, err := src.Read(buf)
		if err != nil {
			return
		}
		p.mu.Lock()
		pass := *open
		p.mu.Unlock()
		if tee != nil {
			_, _ = tee.Write(buf[:n])
		}
		if !pass {
			continue
		}
		if _, err := dst.Write(buf[:n]); err != nil {
			return
		}
	}
}

// parse logs the method frames of one client connection.
func (p *proxy) parse(conn int, r io.ReadCloser) {
	defer io.Copy(io.Discard, r) //nolint:errcheck // keeps the writer going
	br := bufio.NewReader(r)
	if _, err := io.CopyN(io.Discard, br, 8); err != nil { // protocol header
		return
	}
	for {
		var h [7]byte
		if _, err := io.ReadFull(br, h[:]); err != nil {
			return
		}
		payload := make([]byte, binary.BigEndian.Uint32(h[3:])+1) // and the end octet
		if _, err := io.ReadFull(br, payload); err != nil {
			return
		}
		if h[0] != 1 || len(payload) < 5 {
			continue
		}
		m := method{
			conn: conn, channel: int(binary.BigEndian.Uint16(h[1:])),
			class: binary.BigEndian.Uint16(payload), id: binary.BigEndian.Uint16(payload[2:]),
		}
		if m.class == classBasic && (m.id == idAck || m.id == idReject || m.id == idNack) {
			m.tag = binary.BigEndian.Uint64(payload[4:])
		}
		p.mu.Lock()
		p.sent = append(p.sent, m)
		p.mu.Unlock()
	}
}

// cut ends all connections.
func (p *proxy) cut() {
	p.mu.Lock()
	conns := p.conns
	p.conns = nil
	p.mu.Unlock()
	for _, c := range conns {
		_ = c.Close()
	}
}

// pass says what is forwarded: to the broker, to the clients.
func (p *proxy) pass(toServer, toClient bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.toSrv, p.toCli = toServer, toClient
}

// accepting says whether new connections are taken.
func (p *proxy) accepting(yes bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refuse = !yes
}

// methods returns the basic methods with the id that clients sent so far.
func (p *proxy) methods(ids ...uint16) []method {
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []method
	for _, m := range p.sent {
		if m.class == classBasic && slices.Contains(ids, m.id) {
			out = append(out, m)
		}
	}
	return out
}
