package kafka

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/sasl/plain"
	"github.com/segmentio/kafka-go/sasl/scram"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/internal/devenv"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
)

// The broker dies and is stopped while it is published to and consumed: what was
// accepted is consumed, and the committed offset moves on.
func TestTheBrokerDiesAndComesBack(t *testing.T) {
	t.Parallel()
	k := devtest.OwnKafka(t)
	r := newRigOn(t, []string{k.Addr()}, 2)
	s, _ := r.source(64)
	p := r.publisher(func(c *PublisherConfig) { c.Timeout = 3 * time.Second })
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()

	var mu sync.Mutex
	accepted, seen := map[string]bool{}, map[string]bool{}
	var wg sync.WaitGroup
	publishing, stop := context.WithCancel(ctx)
	wg.Go(func() {
		for i := 0; publishing.Err() == nil; i++ {
			m := r.message(i, id(i%7))
			for publishing.Err() == nil { // as the relay does: the same ID until it is accepted
				res := p.Publish(publishing, m)[0]
				if res.Outcome == brokers.Accepted {
					mu.Lock()
					accepted[m.ID] = true
					mu.Unlock()
					break
				}
				if c := brokers.ClassOf(res.Err); c == brokers.Permanent || c == brokers.Fatal {
					t.Errorf("publish: %v", res.Err)
					return
				}
				sleep(publishing, 50*time.Millisecond)
			}
			sleep(publishing, 2*time.Millisecond)
		}
	})
	consuming, stopConsuming := context.WithCancel(ctx)
	wg.Go(func() {
		for {
			ds, err := s.Receive(consuming, 64)
			if err != nil {
				if consuming.Err() == nil {
					t.Errorf("receive: %v", err)
				}
				return
			}
			for len(ds) > 0 { // as the runner does: until it is settled, or lost
				errs := s.Settle(consuming, settlements(brokers.Done, ds...)...)
				left := ds[:0]
				mu.Lock()
				for i, d := range ds {
					switch {
					case errs[i] == nil:
						seen[d.ID] = true
					case brokers.ClassOf(errs[i]) == brokers.Lost || consuming.Err() != nil:
					default:
						left = append(left, d)
					}
				}
				mu.Unlock()
				ds = left
				sleep(consuming, 20*time.Millisecond)
			}
		}
	})
	settled := func() int { mu.Lock(); defer mu.Unlock(); return len(seen) }
	progress := func() { // a hundred more, whatever it takes
		t.Helper()
		from := settled()
		require.Eventually(t, func() bool { return settled() >= from+100 }, time.Minute, 20*time.Millisecond, "%d settled", from)
	}
	progress()
	for _, end := range []func() error{k.Kill, k.Stop} {
		require.NoError(t, end())
		sleep(ctx, 500*time.Millisecond)
		require.NoError(t, k.Start(ctx))
		progress()
	}
	stop()
	require.Eventually(t, func() bool {
		mu.Lock()
		defer mu.Unlock()
		for id := range accepted {
			if !seen[id] {
				return false
			}
		}
		return true
	}, time.Minute, 50*time.Millisecond, "accepted messages were not delivered")
	stopConsuming()
	wg.Wait()
	t.Logf("%d messages", len(accepted))
}

func TestTLSAndSASLOnBothConnections(t *testing.T) {
	t.Parallel()
	k := devtest.OwnKafka(t)
	r := newRigOn(t, []string{k.Addr()}, 1)
	pem, err := os.ReadFile(k.CAFile())
	require.NoError(t, err)
	pool := x509.NewCertPool()
	require.True(t, pool.AppendCertsFromPEM(pem))
	open := func(t *testing.T, addr string, sec Security, patience time.Duration) error {
		t.Helper()
		cfg := r.config(func(c *SourceConfig) { c.Brokers, c.Group, c.Security = []string{addr}, devtest.Name("g"), sec })
		s, err := NewSource(cfg)
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		if _, err := s.Open(ctx, brokers.OpenOptions{Consumer: "x"}); err != nil {
			return err
		}
		defer closeWithin(t, s.Close)
		p, err := NewPublisher(PublisherConfig{Brokers: []string{addr}, Security: sec})
		require.NoError(t, err)
		defer closeWithin(t, p.Close)
		require.Equal(t, brokers.Accepted, p.Publish(t.Context(), r.message(0, "k"))[0].Outcome)
		done(t, s, receive(t, s, 1)...)
		return nil
	}
	user, pw := devenv.KafkaUser, devenv.KafkaPassword
	good := map[string]struct {
		addr string
		sec  Security
	}{
		"tls":            {k.TLSAddr(), Security{TLS: &tls.Config{RootCAs: pool}}},
		"plain":          {k.SASLAddr(), Security{SASL: plain.Mechanism{Username: user, Password: pw}}},
		"scram 256":      {k.SASLAddr(), Security{SASL: must(scram.Mechanism(scram.SHA256, user, pw))}},
		"scram 512":      {k.SASLAddr(), Security{SASL: must(scram.Mechanism(scram.SHA512, user, pw))}},
		"of a transport": {k.TLSAddr(), Security{Transport: &kafka.Transport{TLS: &tls.Config{RootCAs: pool}}}},
	}
	for name, c := range good {
		t.Run(name, func(t *testing.T) {
			require.NoError(t, open(t, c.addr, c.sec, patience))
			if c.sec.Transport != nil {
				c.sec.Transport.CloseIdleConnections()
			}
		})
	}
	bad := map[string]struct {
		addr string
		sec  Security
		want string
	}{
		"unknown authority":    {k.TLSAddr(), Security{TLS: &tls.Config{}}, "Security.TLS.RootCAs"},
		"other name":           {k.TLSAddr(), Security{TLS: &tls.Config{RootCAs: pool, ServerName: "elsewhere"}}, "ServerName"},
		"tls on a plain port":  {k.Addr(), Security{TLS: &tls.Config{RootCAs: pool}}, ""},
		"plain on a tls port":  {k.TLSAddr(), Security{}, "expect TLS or SASL"},
		"plain on a sasl port": {k.SASLAddr(), Security{}, ""},
		"wrong password":       {k.SASLAddr(), Security{SASL: plain.Mechanism{Username: user, Password: "x"}}, "the password"},
		"unknown user":         {k.SASLAddr(), Security{SASL: must(scram.Mechanism(scram.SHA256, "bob", pw))}, "the user"},
	}
	for name, c := range bad {
		t.Run(name, func(t *testing.T) {
			began := time.Now()
			err := open(t, c.addr, c.sec, 5*time.Second)
			require.Error(t, err)
			t.Logf("%s: class %s: %v", time.Since(began).Round(time.Millisecond), brokers.ClassOf(err), err)
			assert.ErrorContains(t, err, c.want)
			if c.want != "" && name != "plain on a tls port" {
				assert.Equal(t, brokers.Fatal, brokers.ClassOf(err))
			}
		})
	}
}
