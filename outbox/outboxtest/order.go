package outboxtest

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/outbox"
)

func orderCases[Tx any]() []testCase[Tx] {
	return []testCase[Tx]{
		{name: "order/per-key-over-several-relays", run: orderOverRelays[Tx]},
		{name: "order/of-one-transaction", run: orderInTx[Tx]},
		{name: "order/key-stops-at-a-refused-message", run: keyStops[Tx](transient)},
		{name: "order/key-stops-at-an-unknown-message", run: keyStops[Tx](unknown)},
		{name: "order/key-stops-at-a-message-not-sent", run: keyStops[Tx](notSent)},
		{name: "order/late-commit-is-not-skipped", run: lateCommit[Tx], not: needsConcurrency[Tx]},
		{name: "order/serialize-keys", run: serializeKeys[Tx], not: needsConcurrency[Tx]},
	}
}

// orderOverRelays: several relays divide the keys, never the rows: SKIP LOCKED lets
// a later message of a key overtake (kgrzybek/sample-dotnet-core-cqrs-api#15,
// namastack/namastack-outbox#195).
func orderOverRelays[Tx any](e *env[Tx]) {
	const n, keys, writers = 400, 20, 4
	var s sink
	for range 4 {
		e.start(&s, outbox.RelayConfig{Batch: 7, Lease: time.Second})
	}
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() { // each has its own keys
			for i := range n / writers {
				err := outbox.InTx(e.Context(), e.o, func(ctx context.Context, tx Tx) error {
					return e.o.Enqueue(ctx, tx, message(strconv.Itoa(w*n+i), fmt.Sprintf("%d/%d", w, i%(keys/writers))))
				})
				if err != nil {
					e.Error(err)
				}
			}
		})
	}
	wg.Wait()
	e.drained()
	total := 0
	for w := range writers {
		for k := range keys / writers {
			last := -1
			for _, id := range s.firsts(fmt.Sprintf("%d/%d", w, k)) {
				i, err := strconv.Atoi(id)
				require.NoError(e, err)
				require.Greater(e, i, last, "order of key %d/%d", w, k)
				last = i
				total++
			}
		}
	}
	require.Equal(e, n, total)
}

// orderInTx: messages of one transaction share a timestamp, and clocks differ; the
// order is that of Enqueue.
func orderInTx[Tx any](e *env[Tx]) {
	at := time.Now()
	err := outbox.InTx(e.Context(), e.o, func(ctx context.Context, tx Tx) error {
		for i, id := range numbered("", 10) {
			m := message(id, "k")
			m.Time = at.Add(-time.Duration(i) * time.Hour) // clocks decide nothing
			if err := e.o.Enqueue(ctx, tx, m); err != nil {
				return err
			}
		}
		return nil
	})
	require.NoError(e, err)
	var s sink
	e.start(&s, outbox.RelayConfig{Batch: 3})
	e.drained()
	require.Equal(e, numbered("", 10), s.ids())
}

// keyStops: the first message of a key does not get through; nothing of its key may
// pass, everything else must. After an unknown outcome the message may still arrive
// late, so that the next one must wait for a sure one, and every copy has the same ID
// (segmentio/kafka-go#1427, rabbitmq/amqp091-go#182).
func keyStops[Tx any](res brokers.Result) func(e *env[Tx]) {
	return func(e *env[Tx]) {
		var mu sync.Mutex
		down := true
		s := sink{answer: func(_ context.Context, m *brokers.Message) brokers.Result {
			mu.Lock()
			defer mu.Unlock()
			if down && m.ID == "k0" {
				return res
			}
			return accepted
		}}
		e.enqueue(messages("k", "k0", "k1", "k2")...)
		e.enqueue(message("j0", "j"), message("unkeyed", ""))
		e.start(&s, outbox.RelayConfig{MaxAttempts: -1})
		e.eventually("other keys pass", func() bool { return s.has("j0") && s.has("unkeyed") })
		tried := s.triesOf("k0")
		e.enqueue(message("j1", "j"))
		e.enqueue(message("k3", "k"))
		e.eventually("it is tried again", func() bool { return s.triesOf("k0") >= tried+3 && s.has("j1") })
		require.Zero(e, s.triesOf("k1")+s.triesOf("k2")+s.triesOf("k3"), "nothing of the key overtakes")
		mu.Lock()
		down = false
		mu.Unlock()
		e.drained()
		require.Equal(e, []string{"k0", "k1", "k2", "k3"}, s.firsts("k"))
	}
}

// lateCommit: a transaction draws the lower number and commits after one with a
// higher number was published; a cursor would have passed it
// (ThreeDotsLabs/watermill#311, kamu-data/kamu-cli#1398,
// event-driven-io/emmett#336). And it delays nobody.
func lateCommit[Tx any](e *env[Tx]) {
	var s sink
	e.start(&s, outbox.RelayConfig{})
	tx, commit, _, err := e.o.Begin(e.Context())
	require.NoError(e, err)
	require.NoError(e, e.o.Enqueue(e.Context(), tx, message("late", "k")))
	e.enqueue(message("early", "k"))
	e.eventually("the later number is published", func() bool { return s.has("early") && e.count(allRows) == 0 })
	// A gap, too: a number that was drawn and rolled back stops nobody.
	_, _, undo, err := e.o.Begin(e.Context())
	require.NoError(e, err)
	require.NoError(e, undo(e.Context()))
	require.NoError(e, commit(e.Context()))
	e.o.Nudge()
	e.drained()
	require.Equal(e, []string{"early", "late"}, s.ids())
}

// serializeKeys: writers that enqueue before they lock the business row. Without the
// option a message may draw its number before a transaction that commits first.
func serializeKeys[Tx any](e *env[Tx]) {
	// Without: nobody waits, and the numbers are in another order than the commits.
	txA, commitA, _, err := e.o.Begin(e.Context())
	require.NoError(e, err)
	require.NoError(e, e.o.Enqueue(e.Context(), txA, message("first number, second commit", "k")))
	e.enqueue(message("first commit", "k"))
	require.NoError(e, commitA(e.Context()))
	e.exec(`DELETE FROM outbox_messages`)

	o := e.f.Open(outbox.SerializeKeys())
	tx, commit, _, err := o.Begin(e.Context())
	require.NoError(e, err)
	require.NoError(e, o.Enqueue(e.Context(), tx, message("holds k", "k")))
	e.enqueueBy(o, message("another key", "j")) // does not wait
	err = func() error {
		ctx, cancel := context.WithTimeout(e.Context(), 300*time.Millisecond)
		defer cancel()
		return outbox.InTx(ctx, o, func(ctx context.Context, tx Tx) error { return o.Enqueue(ctx, tx, message("waits", "k")) })
	}()
	require.Error(e, err, "a second transaction of the key waits for the first")
	require.NoError(e, commit(e.Context()))
	e.exec(`DELETE FROM outbox_messages`)

	// Under load: the business row's counter is the order of the commits.
	e.exec(`CREATE TABLE business (k text PRIMARY KEY, n bigint NOT NULL)`)
	e.exec(`INSERT INTO business VALUES ('a', 0), ('b', 0)`)
	var s sink
	e.start(&s, outbox.RelayConfig{})
	var mu sync.Mutex
	order := map[string]int{}
	var wg sync.WaitGroup
	const writers, each = 4, 40
	for w := range writers {
		wg.Go(func() {
			for i := range each {
				id, key := fmt.Sprintf("%d.%d", w, i), string('a'+byte((w+i)%2))
				n := 0
				err := outbox.InTx(e.Context(), o, func(ctx context.Context, tx Tx) (err error) {
					if err := o.Enqueue(ctx, tx, message(id, key)); err != nil {
						return err
					}
					n, err = e.f.IntTx(ctx, tx, fmt.Sprintf(`UPDATE business SET n = n + 1 WHERE k = '%s' RETURNING n`, key))
					return err
				})
				if err != nil {
					e.Error(err)
				}
				mu.Lock()
				order[id] = n
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	e.drained()
	inversions := 0
	for _, key := range []string{"a", "b"} {
		last := 0
		for _, id := range s.firsts(key) {
			if order[id] < last {
				inversions++
			}
			last = order[id]
		}
	}
	require.Len(e, s.ids(), writers*each)
	require.Zero(e, inversions)
}
