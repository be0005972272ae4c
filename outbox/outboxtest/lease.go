package outboxtest

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/outbox"
)

func leaseCases[Tx any]() []testCase[Tx] {
	return []testCase[Tx]{
		{name: "lease/lost-while-publish-hangs", run: leaseLost[Tx](accepted)},
		{name: "lease/failure-of-a-lost-lease-is-not-kept", run: leaseLost[Tx](transient)},
		{name: "lease/shares-divide-evenly", run: sharesDivide[Tx]},
		{name: "lease/relay-killed-before-it-marks", run: killed[Tx]},
		{name: "lease/hanging-publish-holds-no-lock", run: noLock[Tx]},
		{name: "lease/one-that-left-is-followed-at-once", run: left[Tx]},
	}
}

// leaseLost (langwatch/langwatch#7037): the first relay's Publish hangs past its lease and ignores its
// context; a second relay takes over. What the first one reports afterwards must not
// count.
func leaseLost[Tx any](late brokers.Result) func(e *env[Tx]) {
	return func(e *env[Tx]) {
		release, hanging := make(chan struct{}), make(chan struct{})
		var once, free sync.Once
		first := sink{answer: func(_ context.Context, m *brokers.Message) brokers.Result {
			once.Do(func() { close(hanging) })
			<-release
			return late
		}}
		e.enqueue(messages("k", "k0", "k1")...)
		r1, _ := e.start(&first, outbox.RelayConfig{Lease: shortLease, MaxAttempts: 1})
		e.Cleanup(func() { free.Do(func() { close(release) }) }) // before the relay is waited for
		<-hanging
		// The second one refuses k0 for good, so that its row is still there: the late
		// report finds a row, and a share that is somebody else's.
		second := sink{answer: answers(map[string]brokers.Result{"k0": forGood})}
		e.start(&second, outbox.RelayConfig{Lease: 20 * time.Second})
		e.eventually("the second relay has taken over", func() bool { return e.count(parked) == 1 })
		free.Do(func() { close(release) })
		e.eventually("the loss is said", func() bool { return r1.Stats().LeaseLost > 0 })
		require.Equal(e, 1, e.count(`SELECT count(*) FROM outbox_messages WHERE message_id = 'k0' AND parked AND attempts = 1 AND last_error LIKE '%too large%'`),
			"the second relay's record stays")
		require.Equal(e, 2, e.count(allRows))
	}
}

func (e *env[Tx]) divided(most, relays int) func() bool {
	return func() bool {
		full := fmt.Sprintf(`SELECT count(*) FROM (SELECT owner FROM outbox_shares WHERE owner IS NOT NULL GROUP BY owner HAVING count(*) <= %d) AS o`, most)
		return e.count(full) == relays && e.count(`SELECT count(*) FROM outbox_shares WHERE owner IS NOT NULL`) == outbox.Shares
	}
}

// sharesDivide: relays join and leave; each gets its part, one more at most.
func sharesDivide[Tx any](e *env[Tx]) {
	var s sink
	cfg := outbox.RelayConfig{Lease: time.Second}
	e.start(&s, cfg)
	e.eventually("one has all", e.divided(256, 1))
	_, stop2 := e.start(&s, cfg)
	e.eventually("two have half each", e.divided(128, 2))
	_, stop3 := e.start(&s, cfg)
	e.eventually("three have a third each", e.divided(86, 3))
	stop3()
	e.eventually("two have half each again", e.divided(128, 2))
	stop2()
	e.eventually("one has all again", e.divided(256, 1))
	e.enqueue(messages("", numbered("", 50)...)...)
	e.drained()
}

// killed: the broker has the messages, and the relay dies before it marks them.
func killed[Tx any](e *env[Tx]) {
	dead := make(chan struct{})
	published := make(chan struct{})
	var once sync.Once
	first := sink{}
	dying := brokersFunc(func(ctx context.Context, ms ...*brokers.Message) []brokers.Result {
		rs := first.Publish(ctx, ms...)
		once.Do(func() { close(published) })
		<-dead // never returns while the test looks on, and does not leave
		return rs
	})
	e.enqueue(messages("k", "k0", "k1")...)
	e.start(dying, outbox.RelayConfig{Lease: shortLease})
	e.Cleanup(func() { close(dead) })
	<-published
	require.Equal(e, 2, e.count(allRows), "nothing is marked before the broker has answered")
	var second sink
	begin := time.Now()
	e.start(&second, outbox.RelayConfig{Lease: shortLease})
	e.drained()
	require.Equal(e, []string{"k0", "k1"}, second.ids(), "published again, with the same IDs, in order")
	require.Less(e, time.Since(begin), e.Wait)
}

type brokersFunc func(ctx context.Context, ms ...*brokers.Message) []brokers.Result

func (f brokersFunc) Publish(ctx context.Context, ms ...*brokers.Message) []brokers.Result {
	return f(ctx, ms...)
}
func (f brokersFunc) Limits() brokers.PublishLimits { return brokers.PublishLimits{} }
func (f brokersFunc) Close(context.Context) error   { return nil }

// noLock (gruelbox/transaction-outbox#788): while one relay's Publish hangs, writers write and another relay publishes
// the keys of its own shares.
func noLock[Tx any](e *env[Tx]) {
	var s sink
	cfg := outbox.RelayConfig{Lease: 10 * time.Second}
	release, hanging := make(chan struct{}), make(chan struct{})
	var once sync.Once
	hang := brokersFunc(func(ctx context.Context, ms ...*brokers.Message) []brokers.Result {
		once.Do(func() { close(hanging) })
		select {
		case <-release:
		case <-ctx.Done():
		}
		rs := make([]brokers.Result, len(ms))
		for i := range rs {
			rs[i] = unknown
		}
		return rs
	})
	e.start(hang, outbox.RelayConfig{Lease: shortLease})
	e.Cleanup(func() { close(release) })
	e.start(&s, cfg)
	e.eventually("two have half each", e.divided(128, 2))
	e.enqueue(messages("", numbered("a", 40)...)...)
	<-hanging
	e.enqueue(messages("", numbered("b", 40)...)...) // does not wait
	e.eventually("the other relay publishes its share", func() bool { return len(s.ids()) >= 10 })
}

// left: a relay that stops gives up its keys at once; nobody waits for its lease.
func left[Tx any](e *env[Tx]) {
	var s sink
	cfg := outbox.RelayConfig{Lease: time.Hour}
	_, stop := e.start(&s, cfg)
	e.enqueue(message("1", "k"))
	e.drained()
	stop()
	require.Zero(e, e.count(`SELECT count(*) FROM outbox_shares WHERE owner IS NOT NULL`))
	require.Zero(e, e.count(`SELECT count(*) FROM outbox_relays`))
	e.start(&s, cfg)
	e.enqueue(message("2", "k"))
	e.drained()
	require.Equal(e, []string{"1", "2"}, s.ids())
}
