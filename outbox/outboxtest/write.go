package outboxtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/outbox"
)

func writeCases[Tx any]() []testCase[Tx] {
	return []testCase[Tx]{
		{name: "write/rollback-leaves-nothing", run: rollback[Tx]},
		{name: "write/panic-leaves-nothing", run: panics[Tx]},
		{name: "write/bytes-are-exact", run: exact[Tx]},
		{name: "write/payload-of-5-MiB", run: huge[Tx]},
		{name: "write/id-and-time-are-set-once", run: idOnce[Tx]},
		{name: "write/unusable-messages-are-refused", run: unusable[Tx]},
		{name: "write/same-id-twice-is-published-twice", run: sameID[Tx]},
		{name: "write/many-in-one-call", run: many[Tx]},
		{name: "write/commit-outcome-unknown", run: commitUnknown[Tx], not: needsProxy[Tx]},
	}
}

// rollback: a message sent from inside a transaction that is rolled back is a phantom
// (DFE-Digital/apply-for-teacher-training#1810).
func rollback[Tx any](e *env[Tx]) {
	var s sink
	e.start(&s, outbox.RelayConfig{})
	err := outbox.InTx(e.Context(), e.o, func(ctx context.Context, tx Tx) error {
		require.NoError(e, e.o.Enqueue(ctx, tx, message("ghost", "k")))
		return errTest
	})
	require.ErrorIs(e, err, errTest)
	e.enqueue(message("real", "k"))
	e.drained()
	require.Equal(e, []string{"real"}, s.ids())
}

func panics[Tx any](e *env[Tx]) {
	require.PanicsWithValue(e, "handler", func() {
		_ = outbox.InTx(e.Context(), e.o, func(ctx context.Context, tx Tx) error {
			require.NoError(e, e.o.Enqueue(ctx, tx, message("ghost", "k")))
			panic("handler")
		})
	})
	require.Zero(e, e.count(allRows))
	e.enqueue(message("real", "k")) // and no connection was kept
}

// exact: every byte comes out as it went in.
func exact[Tx any](e *env[Tx]) {
	all := make([]byte, 256)
	for i := range all {
		all[i] = byte(i)
	}
	at := time.Date(2026, 3, 4, 5, 6, 7, 123456789, time.FixedZone("", 2*3600))
	want := []*brokers.Message{
		{ID: "binary", Topic: "t", Key: string(all), Type: "ty\x00pe\xff", ContentType: "c", Time: at, Payload: all},
		{ID: "nil payload", Topic: "t", Payload: nil},
		{ID: "empty payload", Topic: "t\x00\xfe", Key: "\x00", Payload: []byte{}},
		{ID: "headers", Topic: "t", Payload: []byte("p"), Headers: brokers.Headers{
			{Key: "b", Value: []byte("1")}, {Key: "a", Value: nil}, {Key: "b", Value: []byte{}}, {Key: "", Value: all}, {Key: "b", Value: []byte("1")},
		}},
		{ID: "ключ 🔑 {\"'$1,}\\", Topic: "τ", Key: "κ", Type: "ü", Payload: []byte("{}")},
		{ID: strings.Repeat("x", 255), Topic: "t", Payload: []byte("null")},
	}
	sent := make([]*brokers.Message, len(want))
	for i, m := range want {
		sent[i] = m.Clone()
	}
	e.enqueue(sent...)
	var s sink
	e.start(&s, outbox.RelayConfig{})
	e.drained()
	require.Len(e, s.got, len(want))
	for i, m := range want {
		if m.Time.IsZero() {
			m.Time = sent[i].Time // set by Enqueue
		}
		e.same(m, s.got[i])
	}
}

// huge: one call of the broker is bounded by bytes as well as by messages
// (MassTransit/MassTransit#5645).
func huge[Tx any](e *env[Tx]) {
	big := func(id string) *brokers.Message {
		m := message(id, "k")
		m.Payload = bytes.Repeat([]byte{0, 1, 254, 255, 'x'}, 1<<20)
		return m
	}
	a, b, c := big("a"), big("b"), big("c")
	e.enqueue(a, b, c, message("small", "k"))
	var s sink
	r := e.relay(&s, outbox.RelayConfig{BatchBytes: 6 << 20})
	require.NoError(e, r.Flush(e.Context()))
	require.Equal(e, []string{"a", "b", "c", "small"}, s.ids())
	e.same(b, s.got[1])
	require.GreaterOrEqual(e, s.publishes(), 2, "BatchBytes bounds a Publish")
}

func idOnce[Tx any](e *env[Tx]) {
	m := &brokers.Message{Topic: "t"}
	e.enqueue(m)
	id, at := m.ID, m.Time
	require.NotEmpty(e, id)
	require.WithinDuration(e, time.Now(), at, time.Minute)
	e.enqueue(m)
	require.Equal(e, id, m.ID, "the second call keeps the ID")
	require.Equal(e, at, m.Time)
	var s sink
	require.NoError(e, e.relay(&s, outbox.RelayConfig{}).Flush(e.Context()))
	require.Equal(e, []string{id, id}, s.ids())
	require.True(e, s.got[0].Time.Equal(at))
}

func unusable[Tx any](e *env[Tx]) {
	for _, m := range []*brokers.Message{
		nil, {ID: "no topic"}, {ID: "a\x00b", Topic: "t"}, {ID: "\xff", Topic: "t"}, {ID: strings.Repeat("x", 256), Topic: "t"},
	} {
		err := outbox.InTx(e.Context(), e.o, func(ctx context.Context, tx Tx) error {
			err := e.o.Enqueue(ctx, tx, message("before", ""), m)
			require.Error(e, err)
			// It is said before the database is asked, so the transaction still lives.
			return e.o.Enqueue(ctx, tx, message("after", ""))
		})
		require.NoError(e, err)
	}
	require.Equal(e, 5, e.count(allRows), "nothing of a call with an unusable message is stored")
}

func sameID[Tx any](e *env[Tx]) {
	e.enqueue(message("m", "k"))
	e.enqueue(message("m", "k"), message("m", "k"))
	var s sink
	e.start(&s, outbox.RelayConfig{})
	e.drained()
	require.Equal(e, []string{"m", "m", "m"}, s.ids())
}

func many[Tx any](e *env[Tx]) {
	const n = 1201 // more than one INSERT, and more than one batch
	e.enqueue(messages("k", numbered("", n)...)...)
	var s sink
	e.start(&s, outbox.RelayConfig{})
	e.drained()
	require.Equal(e, numbered("", n), s.ids())
}

// commitUnknown: the answer to COMMIT gets lost, once after the server has done it,
// once before it has heard of it.
func commitUnknown[Tx any](e *env[Tx]) {
	for _, reached := range []bool{true, false} {
		e.exec(`DELETE FROM outbox_messages`)
		o, proxy := e.f.Proxied()
		m := &brokers.Message{Topic: "t", Payload: []byte("x")}
		done, written := make(chan error, 1), make(chan struct{})
		go func() {
			done <- outbox.InTx(e.Context(), o, func(ctx context.Context, tx Tx) error {
				if err := o.Enqueue(ctx, tx, m); err != nil {
					return err
				}
				proxy.Pass(reached, false)
				close(written)
				return nil
			})
		}()
		<-written
		if reached {
			e.eventually("the server has committed", func() bool { return e.count(allRows) == 1 })
		}
		proxy.Cut()
		err := <-done
		require.ErrorIs(e, err, outbox.ErrCommitUnknown)
		proxy.Pass(true, true)
		id := m.ID
		e.enqueueBy(o, m)
		require.Equal(e, id, m.ID, "what may be stored twice has one ID")
		var s sink
		require.NoError(e, e.relay(&s, outbox.RelayConfig{}).Flush(e.Context()))
		want := []string{id}
		if reached {
			want = []string{id, id}
		}
		require.Equal(e, want, s.ids())
	}
	// A commit that the server refuses is no: nothing is unknown about it.
	err := outbox.InTx(e.Context(), e.o, func(ctx context.Context, tx Tx) error {
		_, err := e.f.IntTx(ctx, tx, `SELECT 1/0`)
		require.Error(e, err)
		return nil // swallowed: COMMIT becomes ROLLBACK
	})
	require.Error(e, err)
	require.NotErrorIs(e, err, outbox.ErrCommitUnknown)
	require.False(e, errors.Is(err, context.Canceled), fmt.Sprint(err))
}
