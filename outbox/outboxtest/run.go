package outboxtest

import (
	"context"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/outbox"
)

func runCases[Tx any]() []testCase[Tx] {
	return []testCase[Tx]{
		{name: "keep/published-rows-are-marked-then-cleaned", run: keep[Tx]},
		{name: "keep/cleanup-keeps-up", run: keepsUp[Tx]},
		{name: "run/nudge-wakes-at-once", run: nudge[Tx]},
		{name: "run/nudge-wakes-from-a-long-sleep", run: longSleep[Tx], bubble: true, not: needsBubble[Tx]},
		{name: "run/nudges-do-not-drive-the-tries-of-an-outage", run: nudgesInOutage[Tx], bubble: true, not: needsBubble[Tx]},
		{name: "run/polls-without-a-nudge", run: polls[Tx]},
		{name: "run/one-thing-at-a-time", run: oneAtATime[Tx]},
		{name: "run/missing-tables-are-an-error", run: missingTables[Tx]},
		{name: "run/wrong-configuration-of-the-publisher", run: fatal[Tx]},
		{name: "run/too-few-results-lose-nothing", run: tooFew[Tx]},
		{name: "run/slow-publisher-is-not-cut-short-for-ever", run: slow[Tx]},
		{name: "run/stop-marks-what-is-accepted", run: stopMarks[Tx]},
		{name: "flush/publishes-everything", run: flush[Tx]},
		{name: "flush/names-what-is-left", run: flushLeft[Tx]},
		{name: "flush/ends-while-the-broker-is-away", run: flushAway[Tx]},
	}
}

const (
	publishedRows = `SELECT count(*) FROM outbox_messages WHERE published_at IS NOT NULL`
	waitingRows   = `SELECT count(*) FROM outbox_messages WHERE published_at IS NULL`
)

// keep: cleanup takes published rows whose time is over, and nothing else, however
// old it is (denis-tsv/Outbox, MarcosRabadan/Agendia#260).
func keep[Tx any](e *env[Tx]) {
	e.o = e.f.Open(outbox.KeepPublished(time.Hour))
	s := sink{answer: answers(map[string]brokers.Result{"bad": forGood})}
	e.enqueue(message("ok", "k"), message("bad", "j"), message("behind", "j"))
	_, stop := e.start(&s, outbox.RelayConfig{Lease: shortLease})
	e.eventually("it is marked", func() bool { return e.count(publishedRows) == 1 && e.count(parked) == 1 })
	stop()
	require.Equal(e, 3, e.count(allRows))
	e.exec(`UPDATE outbox_messages SET created_at = ` + e.longAgo()) // transactions that were open for long
	require.Equal(e, []string{"ok"}, s.ids(), "what is marked is not published again")

	e.o = e.f.Open(outbox.KeepPublished(time.Millisecond))
	e.start(&s, outbox.RelayConfig{Lease: shortLease})
	e.eventually("it is cleaned up", func() bool { return e.count(publishedRows) == 0 })
	require.Equal(e, 2, e.count(waitingRows), "unpublished rows stay, parked or not")
	require.Equal(e, []string{"ok"}, s.ids())
}

func keepsUp[Tx any](e *env[Tx]) {
	e.o = e.f.Open(outbox.KeepPublished(time.Millisecond))
	const n = 3500 // several rounds of one cleanup
	e.enqueue(messages("", numbered("", n)...)...)
	var s sink
	e.start(&s, outbox.RelayConfig{Lease: shortLease})
	e.drained()
	require.Len(e, s.ids(), n)
}

func nudge[Tx any](e *env[Tx]) {
	var s sink
	e.start(&s, outbox.RelayConfig{IdlePoll: time.Hour})
	for _, id := range numbered("", 5) {
		e.enqueue(message(id, "k"))
		e.eventually("InTx nudges", func() bool { return s.has(id) })
	}
}

// longSleep: the relay has had nothing to do for hours, and looks once an hour.
func longSleep[Tx any](e *env[Tx]) {
	var s sink
	e.start(&s, outbox.RelayConfig{IdlePoll: time.Hour})
	<-time.After(10*time.Hour + time.Minute)
	begin := time.Now()
	e.enqueue(message("m", "k"))
	e.eventually("InTx nudges", func() bool { return s.has("m") })
	require.Less(e, time.Since(begin), time.Second)
}

// nudgesInOutage: busy writers, and a broker that is away.
func nudgesInOutage[Tx any](e *env[Tx]) {
	s := sink{answer: func(context.Context, *brokers.Message) brokers.Result { return notSent }}
	e.start(&s, outbox.RelayConfig{IdlePoll: time.Second})
	for i := range 300 {
		e.enqueue(message(numbered("", i+1)[i], ""))
		<-time.After(100 * time.Millisecond)
	}
	require.Less(e, s.publishes(), 60, "about one a second in 30 s")
	require.Greater(e, s.publishes(), 20)
}

// polls: without a nudge, as from another process. Nothing listens, so nothing can go
// deaf behind a pooler or a failover (riverqueue/river#281, commanded/eventstore#205).
func polls[Tx any](e *env[Tx]) {
	var s sink
	e.start(&s, outbox.RelayConfig{IdlePoll: 50 * time.Millisecond})
	e.enqueueBy(e.f.Open(), message("from elsewhere", "k"))
	e.drained()
}

func oneAtATime[Tx any](e *env[Tx]) {
	var s sink
	r, stop := e.start(&s, outbox.RelayConfig{})
	e.enqueue(message("1", "k"))
	e.drained()
	require.ErrorContains(e, r.Run(e.Context()), "NewRelay")
	require.ErrorContains(e, r.Flush(e.Context()), "NewRelay")
	stop()
	e.enqueue(message("2", "k"))
	require.NoError(e, r.Flush(e.Context()), "and afterwards it may be used again")
	require.Equal(e, []string{"1", "2"}, s.ids())
}

func missingTables[Tx any](e *env[Tx]) {
	e.exec(`DROP TABLE outbox_shares`)
	var s sink
	r := e.relay(&s, outbox.RelayConfig{})
	require.ErrorContains(e, r.Run(e.Context()), "migrate up")
	require.ErrorContains(e, r.Flush(e.Context()), "migrate up")
}

func fatal[Tx any](e *env[Tx]) {
	s := sink{answer: func(context.Context, *brokers.Message) brokers.Result {
		return brokers.Result{Outcome: brokers.NotSent, Err: brokers.NewFatal("connect", errTest, "check the password")}
	}}
	e.enqueue(message("1", "k"))
	require.ErrorContains(e, e.relay(&s, outbox.RelayConfig{}).Run(e.Context()), "check the password")
	require.Equal(e, 1, e.count(allRows))
	require.Zero(e, e.count(attempts))
}

func tooFew[Tx any](e *env[Tx]) {
	var s sink
	broken := brokersFunc(func(ctx context.Context, ms ...*brokers.Message) []brokers.Result {
		return s.Publish(ctx, ms[:1]...)
	})
	e.enqueue(messages("", numbered("", 5)...)...)
	e.start(broken, outbox.RelayConfig{MaxAttempts: -1})
	e.drained()
	require.Len(e, s.ids(), 5)
}

// slow: a batch takes longer than the lease (langwatch/langwatch#7037). The relay
// takes fewer messages, so that only the first Publish is cut short.
func slow[Tx any](e *env[Tx]) {
	s := sink{answer: func(ctx context.Context, _ *brokers.Message) brokers.Result {
		if ctx.Err() != nil {
			return notSent
		}
		select {
		case <-time.After(30 * time.Millisecond):
			return accepted
		case <-ctx.Done():
			return unknown
		}
	}}
	e.enqueue(messages("", numbered("", 100)...)...)
	r, _ := e.start(&s, outbox.RelayConfig{Lease: shortLease})
	e.drained()
	require.Len(e, s.firsts(""), 100)
	require.LessOrEqual(e, r.Stats().Unknown, int64(2))
}

// stopMarks: Run's context ends during a Publish that is then accepted.
func stopMarks[Tx any](e *env[Tx]) {
	in, out := make(chan struct{}), make(chan struct{})
	s := sink{answer: func(context.Context, *brokers.Message) brokers.Result {
		close(in)
		<-out
		return accepted
	}}
	r := e.relay(&s, outbox.RelayConfig{})
	e.enqueue(message("1", "k"))
	ctx, cancel := context.WithCancel(e.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	<-in
	cancel()
	close(out)
	require.NoError(e, <-done)
	require.Zero(e, e.count(allRows))
}

func flush[Tx any](e *env[Tx]) {
	var s sink
	r := e.relay(&s, outbox.RelayConfig{Batch: 10})
	require.NoError(e, r.Flush(e.Context()), "nothing to do")
	e.enqueue(messages("k", numbered("k", 35)...)...)
	e.enqueue(messages("", numbered("u", 35)...)...)
	require.NoError(e, r.Flush(e.Context()))
	require.Zero(e, e.count(allRows))
	require.Equal(e, numbered("k", 35), s.firsts("k"))
	require.Len(e, s.ids(), 70)
	require.Zero(e, e.count(`SELECT count(*) FROM outbox_relays`), "it has left")
}

func flushLeft[Tx any](e *env[Tx]) {
	s := sink{answer: answers(map[string]brokers.Result{"bad": forGood, "later": transient})}
	e.enqueue(messages("k", "bad", "b1", "b2")...)
	e.enqueue(message("later", "j"), message("ok", ""))
	r := e.relay(&s, outbox.RelayConfig{Backoff: time.Minute, MaxBackoff: time.Hour})
	err := r.Flush(e.Context())
	var l *outbox.LeftError
	require.ErrorAs(e, err, &l)
	require.Equal(e, [4]int{1, 1, 2, 0}, [4]int{l.Parked, l.Waiting, l.Unsent, l.Elsewhere}, "%v", err)
	require.ErrorContains(e, err, `parked "bad"`)
	require.ErrorContains(e, err, `waiting "later"`)
	require.Equal(e, []string{"ok"}, s.ids())

	// Shares of another relay.
	e.exec(`DELETE FROM outbox_messages`)
	var other sink
	e.exec(`UPDATE outbox_shares SET owner = 'somebody', until = ` + e.forever())
	e.enqueue(message("theirs", "x"))
	require.ErrorAs(e, e.relay(&other, outbox.RelayConfig{}).Flush(e.Context()), &l)
	require.Equal(e, 1, l.Elsewhere)
	require.Empty(e, other.ids())
}

// longAgo is a time long past, in the dialect's terms.
func (e *env[Tx]) longAgo() string {
	if e.forever() == `'infinity'` {
		return `'2001-01-01'`
	}
	return `1`
}

// forever is a time that does not come, in the dialect's terms.
func (e *env[Tx]) forever() string {
	if _, err := e.f.Int(e.Context(), `SELECT count(*) FROM outbox_shares WHERE until < timestamptz 'infinity'`); err == nil {
		return `'infinity'`
	}
	return `9000000000000000000`
}

func flushAway[Tx any](e *env[Tx]) {
	s := sink{answer: func(context.Context, *brokers.Message) brokers.Result { return notSent }}
	e.enqueue(messages("k", "1", "2")...)
	err := e.relay(&s, outbox.RelayConfig{}).Flush(e.Context())
	var l *outbox.LeftError
	require.ErrorAs(e, err, &l)
	require.ErrorIs(e, err, errTest)
	require.Equal(e, 2, l.Unsent)
	require.Zero(e, e.count(attempts))
}
