package outboxtest

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/outbox"
)

func parkCases[Tx any]() []testCase[Tx] {
	return []testCase[Tx]{
		{name: "park/refused-for-good-blocks-its-key-alone", run: forGoodParks[Tx]},
		{name: "park/after-max-attempts", run: attemptsPark[Tx](transient)},
		{name: "park/unknown-again-and-again-while-others-pass", run: attemptsPark[Tx](unknown)},
		{name: "park/message-that-hangs", run: hangs[Tx]},
		{name: "park/batches-full-of-poison-stop-nobody", run: poison[Tx]},
		{name: "park/batches-full-of-refusals-stop-nobody", run: refusals[Tx]},
		{name: "park/skip-parked", run: skipParked[Tx]},
		{name: "park/unparked-by-sql-goes-before-its-key", run: unpark[Tx]},
		{name: "park/deleted-by-sql-frees-its-key", run: deleteParked[Tx]},
		{name: "park/throttled-is-no-attempt", run: throttled[Tx]},
		{name: "outage/no-attempt-and-nothing-parked", run: outage[Tx](8)},
		{name: "outage/waiting-ends-when-something-passes", run: waitingEnds[Tx]},
		{name: "outage/of-200-tries", run: outage[Tx](200), bubble: true, not: needsBubble[Tx]},
	}
}

// forGoodParks: a message that can never be sent blocks its key alone and is not
// tried again (boto/boto3#1953, Particular/NServiceBus.AmazonSQS#2520).
func forGoodParks[Tx any](e *env[Tx]) {
	s := sink{answer: answers(map[string]brokers.Result{"bad": forGood})}
	e.enqueue(message("bad", "k"), message("behind", "k"), message("free", "j"), message("unkeyed", ""))
	r, _ := e.start(&s, outbox.RelayConfig{})
	e.eventually("others pass", func() bool { return len(s.ids()) == 2 && e.count(allRows) == 2 })
	require.ElementsMatch(e, []string{"free", "unkeyed"}, s.ids())
	require.Equal(e, 1, e.count(parked))
	require.Equal(e, 1, e.count(`SELECT count(*) FROM outbox_messages WHERE parked AND attempts = 1 AND last_error LIKE '%too large%'`), "the error can be read, whatever bytes it had")
	require.EqualValues(e, 1, r.Stats().Parked)
	require.Equal(e, 1, s.triesOf("bad"), "once is enough")
}

// attemptsPark: one message fails while others pass.
func attemptsPark[Tx any](res brokers.Result) func(e *env[Tx]) {
	return func(e *env[Tx]) {
		s := sink{answer: answers(map[string]brokers.Result{"bad": res})}
		e.enqueue(message("bad", "k"), message("behind", "k"))
		r, _ := e.start(&s, outbox.RelayConfig{MaxAttempts: 3})
		n := 0
		e.eventually("it is parked", func() bool {
			n++
			e.enqueue(message(numbered("free", n)[n-1], "")) // traffic
			return r.Stats().Parked == 1
		})
		e.eventually("others are done", func() bool { return e.count(allRows) == 2 })
		require.Equal(e, 1, e.count(`SELECT count(*) FROM outbox_messages WHERE parked AND attempts = 3`))
		require.Zero(e, s.triesOf("behind"))
		require.Len(e, s.ids(), n)
	}
}

// hangs (gruelbox/transaction-outbox#788): one message takes Publish's whole time, and the publisher sends one after
// the other. The others must get their turn, and it must be parked in the end.
func hangs[Tx any](e *env[Tx]) {
	s := sink{answer: func(ctx context.Context, m *brokers.Message) brokers.Result {
		switch {
		case m.ID == "hangs":
			<-ctx.Done()
			return unknown
		case ctx.Err() != nil:
			return notSent
		}
		return accepted
	}}
	e.enqueue(message("hangs", "k"), message("behind", "k"))
	e.enqueue(messages("", numbered("free", 5)...)...)
	r, _ := e.start(&s, outbox.RelayConfig{MaxAttempts: 2, Lease: shortLease, Backoff: 100 * time.Millisecond, MaxBackoff: time.Second})
	n := 5
	e.eventually("it is parked", func() bool {
		if r.Stats().Unknown > int64(n-5) {
			n++
			e.enqueue(message(numbered("free", n)[n-1], ""))
		}
		return r.Stats().Parked == 1
	})
	e.eventually("others pass", func() bool { return e.count(allRows) == 2 })
	require.Zero(e, s.triesOf("behind"))
}

// poison: more bad messages at the head than a batch holds (watt-mind/factory#1479,
// Pulsefy/Lumenpulse#1200).
func poison[Tx any](e *env[Tx]) {
	s := sink{answer: func(_ context.Context, m *brokers.Message) brokers.Result {
		if m.ID[0] == 'b' {
			return forGood
		}
		return accepted
	}}
	e.enqueue(messages("", numbered("bad", 30)...)...)
	e.enqueue(messages("", numbered("good", 10)...)...)
	e.start(&s, outbox.RelayConfig{Batch: 10})
	e.eventually("the good ones pass", func() bool { return len(s.ids()) == 10 && e.count(allRows) == 30 })
	require.Equal(e, 30, e.count(parked), "what is parked stays")
}

// refusals: the same with refusals that may pass: nothing is accepted in the first
// batches, and still the relay goes on behind them.
func refusals[Tx any](e *env[Tx]) {
	s := sink{answer: func(_ context.Context, m *brokers.Message) brokers.Result {
		if m.ID[0] == 'b' {
			return transient
		}
		return accepted
	}}
	e.enqueue(messages("", numbered("bad", 30)...)...)
	e.enqueue(messages("", numbered("good", 10)...)...)
	e.start(&s, outbox.RelayConfig{Batch: 10, MaxAttempts: -1, Backoff: 200 * time.Millisecond})
	e.eventually("the good ones pass", func() bool { return len(s.ids()) == 10 })
	require.Zero(e, e.count(parked))
}

func skipParked[Tx any](e *env[Tx]) {
	s := sink{answer: answers(map[string]brokers.Result{"bad": forGood})}
	e.enqueue(messages("k", "bad", "behind", "last")...)
	e.start(&s, outbox.RelayConfig{SkipParked: true})
	e.eventually("the key goes on", func() bool { return e.count(allRows) == 1 })
	require.Equal(e, []string{"behind", "last"}, s.ids())
	require.Equal(e, 1, e.count(parked))
}

// unpark: whatever columns somebody resets by hand, the key's order stays.
func unpark[Tx any](e *env[Tx]) {
	var healed atomic.Bool
	s := sink{answer: func(_ context.Context, m *brokers.Message) brokers.Result {
		if m.ID == "bad" && !healed.Load() {
			return forGood
		}
		return accepted
	}}
	e.enqueue(messages("k", "bad", "behind", "last")...)
	e.start(&s, outbox.RelayConfig{})
	e.eventually("it is parked", func() bool { return e.count(parked) == 1 })
	healed.Store(true)
	e.exec(`UPDATE outbox_messages SET parked = false, attempts = 0, next_at = NULL WHERE parked`)
	e.drained()
	require.Equal(e, []string{"bad", "behind", "last"}, s.ids())
}

func deleteParked[Tx any](e *env[Tx]) {
	s := sink{answer: answers(map[string]brokers.Result{"bad": forGood})}
	e.enqueue(messages("k", "bad", "behind", "last")...)
	e.start(&s, outbox.RelayConfig{})
	e.eventually("it is parked", func() bool { return e.count(parked) == 1 })
	e.exec(`DELETE FROM outbox_messages WHERE parked`)
	e.drained()
	require.Equal(e, []string{"behind", "last"}, s.ids())
}

func throttled[Tx any](e *env[Tx]) {
	var calm atomic.Bool
	s := sink{answer: func(_ context.Context, m *brokers.Message) brokers.Result {
		if m.ID == "slow" && !calm.Load() {
			return refused(&brokers.Error{Class: brokers.Throttled, After: 5 * time.Millisecond, Err: errTest})
		}
		return accepted
	}}
	e.enqueue(message("slow", "k"))
	e.start(&s, outbox.RelayConfig{MaxAttempts: 2})
	n := 0
	e.eventually("it is tried often", func() bool {
		n++
		e.enqueue(message(numbered("free", n)[n-1], ""))
		return s.triesOf("slow") > 4
	})
	require.Zero(e, e.count(attempts))
	calm.Store(true)
	e.drained()
}

// outage: nothing gets through for long, in every way that a publisher can say so;
// no message may have used up its attempts when it is over
// (MarcosRabadan/Agendia#322).
func outage[Tx any](tries int) func(e *env[Tx]) {
	return func(e *env[Tx]) {
		var up atomic.Bool
		s := sink{answer: func(_ context.Context, m *brokers.Message) brokers.Result {
			if up.Load() {
				return accepted
			}
			switch m.Key {
			case "refused":
				return transient
			case "unknown":
				return unknown
			}
			return notSent
		}}
		for _, key := range []string{"refused", "unknown", "not sent"} {
			e.enqueue(messages(key, numbered(key, 20)...)...)
		}
		r, _ := e.start(&s, outbox.RelayConfig{MaxAttempts: 2, Batch: 30})
		e.eventuallyIn(time.Hour, "many tries", func() bool { return s.publishes() >= tries })
		require.Zero(e, e.count(attempts))
		require.Zero(e, e.count(parked))
		require.Zero(e, r.Stats().Parked)
		up.Store(true)
		e.o.Nudge()
		e.drained()
		for _, key := range []string{"refused", "unknown", "not sent"} {
			require.Equal(e, numbered(key, 20), s.firsts(key))
		}
	}
}

// waitingEnds: what an outage has put off for an hour comes at once when it is over.
func waitingEnds[Tx any](e *env[Tx]) {
	var up atomic.Bool
	s := sink{answer: func(context.Context, *brokers.Message) brokers.Result {
		if up.Load() {
			return accepted
		}
		return transient
	}}
	e.enqueue(messages("k", "k0", "k1")...)
	e.enqueue(message("j0", "j"))
	r, _ := e.start(&s, outbox.RelayConfig{Backoff: time.Hour, MaxBackoff: time.Hour})
	e.eventually("they are put off", func() bool { return e.count(`SELECT count(*) FROM outbox_messages WHERE next_at IS NOT NULL`) == 2 })
	up.Store(true)
	e.enqueue(message("new", ""))
	e.drained()
	require.Equal(e, []string{"k0", "k1"}, s.firsts("k"))
	require.EqualValues(e, 2, r.Stats().Refused)
}
