package inbox_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/inbox"
)

// bench is one store with what a test of its operator needs.
type bench struct {
	*testing.T
	op       *inbox.Operator
	hold     func(m *brokers.Message, reason string, dead bool, delay time.Duration)
	tryClaim func(m *brokers.Message) (inbox.Verdict, error)
	take     func() []*inbox.Head // what is due, leased for a minute
	run      func(h *inbox.Head) error
	// begin starts a run of a head and returns the function that ends it.
	begin  func(h *inbox.Head) (end func())
	fail   func(h *inbox.Head, attempts int, dead, continueAfterDead bool)
	repair func(continueAfterDead bool)
	count  func(q string) int
	single bool
}

const opConsumer = "billing"

var me = inbox.By{Actor: "test", Reason: "because"}

func onAllStores(t *testing.T, f func(b *bench)) {
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		db := sqliteDB(t)
		db.SetMaxOpenConns(1) // as SQLite asks for: many connections are not fair to each other
		b := benchOf[*sql.Tx](t, inbox.SQLite(db), inbox.SQLite(db).Operator())
		b.single = true
		b.count = func(q string) (n int) { require.NoError(t, db.QueryRow(q).Scan(&n)); return n }
		f(b)
	})
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		pool := pgPool(t)
		b := benchOf[pgx.Tx](t, inbox.Postgres(pool), inbox.Postgres(pool).Operator())
		b.count = func(q string) (n int) { require.NoError(t, pool.QueryRow(t.Context(), q).Scan(&n)); return n }
		f(b)
	})
	t.Run("postgresdb", func(t *testing.T) {
		t.Parallel()
		pool := pgPool(t)
		db := stdlib.OpenDBFromPool(pool)
		t.Cleanup(func() { db.Close() })
		b := benchOf[*sql.Tx](t, inbox.PostgresDB(db), inbox.PostgresDB(db).Operator())
		b.count = func(q string) (n int) { require.NoError(t, db.QueryRow(q).Scan(&n)); return n }
		f(b)
	})
}

func (b *bench) claim(m *brokers.Message) inbox.Verdict {
	b.Helper()
	v, err := b.tryClaim(m)
	require.NoError(b, err)
	return v
}

func benchOf[Tx any](t *testing.T, s inbox.Store[Tx], op *inbox.Operator) *bench {
	unit := func(it *inbox.Item) inbox.Unit {
		return inbox.Unit{Consumer: opConsumer, Items: []*inbox.Item{it}, ClaimTimeout: time.Second, HoldBehind: true}
	}
	item := func(m *brokers.Message) *inbox.Item {
		it, _ := inbox.NewItem(m, "orders/0@"+m.ID, inbox.OrderKey(m.Key))
		return it
	}
	return &bench{T: t, op: op,
		hold: func(m *brokers.Message, reason string, dead bool, delay time.Duration) {
			t.Helper()
			it := item(m)
			vs, err := s.Record(t.Context(), unit(it), inbox.Outcome[Tx]{Item: it, Reason: reason, Dead: dead, Delay: delay, Attempts: 3,
				Failure: inbox.Failure{Class: "handler", Text: "no: " + reason, Stack: "here"}})
			require.NoError(t, err)
			require.Equal(t, []inbox.Verdict{inbox.Recorded}, vs)
		},
		tryClaim: func(m *brokers.Message) (inbox.Verdict, error) {
			a, vs, err := s.Begin(t.Context(), unit(item(m)))
			if err != nil {
				return 0, err
			}
			if a != nil {
				if r, err := a.Commit(t.Context()); r != inbox.CommitYes {
					return 0, fmt.Errorf("commit: %v %w", r, err)
				}
			}
			return vs[0], nil
		},
		take: func() []*inbox.Head {
			t.Helper()
			hs, err := s.TakeHeads(t.Context(), inbox.HeadQuery{Consumer: opConsumer, Max: 100, Lease: time.Minute})
			require.NoError(t, err)
			return hs
		},
		run: func(h *inbox.Head) error {
			a, err := s.BeginRetry(t.Context(), h, unit(h.Item))
			if err != nil {
				return err
			}
			r, err := a.Commit(t.Context())
			if err == nil && r != inbox.CommitYes {
				err = fmt.Errorf("commit: %d", r)
			}
			return err
		},
		begin: func(h *inbox.Head) func() {
			t.Helper()
			a, err := s.BeginRetry(t.Context(), h, unit(h.Item))
			require.NoError(t, err)
			return func() {
				r, err := a.Commit(context.WithoutCancel(t.Context()))
				assert.NoError(t, err)
				assert.Equal(t, inbox.CommitYes, r)
			}
		},
		fail: func(h *inbox.Head, attempts int, dead, cont bool) {
			t.Helper()
			u := unit(h.Item)
			u.ContinueAfterDead = cont
			a, err := s.BeginRetry(t.Context(), h, u)
			require.NoError(t, err)
			o := inbox.Outcome[Tx]{Item: h.Item, Reason: inbox.ReasonRetry, Attempts: attempts, Failure: inbox.Failure{Class: "handler", Text: "again"}}
			if dead {
				o.Reason, o.Dead = inbox.ReasonDead, true
			}
			require.NoError(t, a.Fail(t.Context(), o))
		},
		repair: func(cont bool) {
			t.Helper()
			_, err := s.RepairHeads(t.Context(), opConsumer, cont)
			require.NoError(t, err)
		},
	}
}

func held(id, key string) *brokers.Message {
	return &brokers.Message{ID: id, Key: key, Topic: "orders", Type: "order.placed", ContentType: "application/json", Time: time.Date(2026, 5, 6, 7, 8, 9, 10, time.UTC),
		Headers: brokers.Headers{{Key: "a", Value: []byte{0, 255}}, {Key: "a", Value: []byte{}}}, Payload: []byte("payload of " + id)}
}

func (b *bench) choose(f inbox.HeldFilter) []inbox.Choice {
	b.Helper()
	cs, err := b.op.Choose(b.Context(), f)
	require.NoError(b, err)
	return cs
}

func (b *bench) list(f inbox.HeldFilter) (ids []string) {
	b.Helper()
	hs, err := b.op.List(b.Context(), f)
	require.NoError(b, err)
	for _, h := range hs {
		ids = append(ids, h.Message.ID)
	}
	return ids
}

func (b *bench) only(f inbox.HeldFilter) inbox.Choice {
	b.Helper()
	cs := b.choose(f)
	require.Len(b, cs, 1)
	return cs[0]
}

func takenIDs(hs []*inbox.Head) (ids []string) {
	for _, h := range hs {
		ids = append(ids, h.Item.Message.ID)
	}
	slices.Sort(ids)
	return ids
}

func TestHeldMessagesAreShownByteForByteAndFound(t *testing.T) {
	t.Parallel()
	onAllStores(t, func(b *bench) {
		m := held("a", "k")
		b.hold(m, inbox.ReasonDead, true, 0)
		b.hold(held("b", ""), inbox.ReasonRetry, false, time.Hour)
		require.Equal(b, inbox.Behind, b.claim(held("c", "k")))
		b.hold(&brokers.Message{ID: "\xff\x00", Topic: "orders", Payload: nil}, inbox.ReasonBadID, true, 0)

		hs, err := b.op.List(b.Context(), inbox.HeldFilter{ID: "a"})
		require.NoError(b, err)
		require.Len(b, hs, 1)
		h := hs[0]
		require.True(b, m.Time.Equal(h.Message.Time))
		h.Message.Time = m.Time
		require.Equal(b, m, h.Message)
		require.Equal(b, opConsumer, h.Consumer)
		require.Equal(b, inbox.Failure{Class: "handler", Text: "no: dead", Stack: "here"}, h.Last)
		require.Equal(b, "no: dead", h.First.Text)
		require.Equal(b, 3, h.Attempts)
		require.Equal(b, "orders/0@a", h.Coordinates)
		require.Equal(b, inbox.Fingerprint(m), h.Fingerprint)
		require.True(b, h.Dead)
		require.False(b, h.Waiting)

		yes, no, k, none := true, false, "k", ""
		for _, c := range []struct {
			f    inbox.HeldFilter
			want []string
		}{
			{inbox.HeldFilter{}, []string{"a", "b", "c", "\xff\x00"}},
			{inbox.HeldFilter{Consumer: opConsumer, Max: 2}, []string{"a", "b"}},
			{inbox.HeldFilter{After: h.Seq}, []string{"b", "c", "\xff\x00"}},
			{inbox.HeldFilter{Consumer: "other"}, nil},
			{inbox.HeldFilter{Reason: inbox.ReasonBehind}, []string{"c"}},
			{inbox.HeldFilter{Class: "handler", Dead: &yes}, []string{"a", "\xff\x00"}},
			{inbox.HeldFilter{Dead: &no}, []string{"b", "c"}},
			{inbox.HeldFilter{Key: &k}, []string{"a", "c"}},
			{inbox.HeldFilter{Key: &none}, []string{"b", "\xff\x00"}},
			{inbox.HeldFilter{ID: "\xff\x00"}, []string{"\xff\x00"}},
			{inbox.HeldFilter{OlderThan: time.Hour}, nil},
			{inbox.HeldFilter{NewerThan: time.Hour, Seqs: []int64{h.Seq}}, []string{"a"}},
			{inbox.HeldFilter{Seqs: []int64{}}, nil},
		} {
			require.Equal(b, c.want, b.list(c.f), "%+v", c.f)
		}
		hs, err = b.op.List(b.Context(), inbox.HeldFilter{ID: "b"})
		require.NoError(b, err)
		require.InDelta(b, time.Hour.Seconds(), hs[0].DueIn.Seconds(), 60)
		hs, err = b.op.List(b.Context(), inbox.HeldFilter{ID: "c"})
		require.NoError(b, err)
		require.True(b, hs[0].Waiting)

		gs, err := b.op.Groups(b.Context(), inbox.HeldFilter{})
		require.NoError(b, err)
		require.Len(b, gs, 4)
		_, err = b.op.Get(b.Context(), 12345)
		require.ErrorIs(b, err, inbox.ErrNotHeld)
	})
}

func TestReplayRunsInOrderAndOnce(t *testing.T) {
	t.Parallel()
	onAllStores(t, func(b *bench) {
		for _, id := range []string{"1", "2", "3"} {
			b.hold(held(id, "k"), inbox.ReasonDead, true, 0)
		}
		b.hold(held("x", ""), inbox.ReasonDead, true, 0)
		require.Empty(b, b.take())
		chosen := b.choose(inbox.HeldFilter{})
		b.hold(held("later", ""), inbox.ReasonDead, true, 0)
		for _, c := range chosen {
			require.NoError(b, b.op.Replay(b.Context(), c, me))
			require.ErrorIs(b, b.op.Replay(b.Context(), c, me), inbox.ErrChanged, "a second time")
		}
		require.Equal(b, []string{"later"}, b.list(inbox.HeldFilter{Dead: new(true)}), "the list was frozen")
		due, waiting, err := b.op.Unfinished(b.Context(), []int64{chosen[0].Seq, chosen[1].Seq, chosen[2].Seq, chosen[3].Seq})
		require.NoError(b, err)
		require.ElementsMatch(b, []int64{chosen[0].Seq, chosen[3].Seq}, due, "the first of the key, and the one without a key")
		require.ElementsMatch(b, []int64{chosen[1].Seq, chosen[2].Seq}, waiting)
		var order []string
		for range 3 {
			heads := b.take()
			for _, h := range heads {
				require.Zero(b, h.Attempts, "it begins anew")
				if h.Item.Message.Key == "k" {
					order = append(order, h.Item.Message.ID)
				}
				require.NoError(b, b.run(h))
			}
		}
		require.Equal(b, []string{"1", "2", "3"}, order)
		require.Equal(b, inbox.Duplicate, b.claim(held("2", "k")), "its id guards it still")
		require.ErrorIs(b, b.op.Replay(b.Context(), chosen[0], me), inbox.ErrNotHeld)
		require.Equal(b, 4, b.count(`SELECT count(*) FROM twiceproof_audit WHERE action = 'replay' AND actor = 'test' AND consumer = 'billing'`))
	})
}

// Where dead ones do not block, a replayed message takes the turn from those behind it.
func TestReplayUnderContinueTakesItsPlace(t *testing.T) {
	t.Parallel()
	onAllStores(t, func(b *bench) {
		b.hold(held("1", "k"), inbox.ReasonDead, true, 0)
		dead := b.only(inbox.HeldFilter{ID: "1"})
		b.hold(held("2", "k"), inbox.ReasonRetry, false, 0)
		b.repair(true) // as a runner with AfterDead: Continue
		require.NoError(b, b.op.Replay(b.Context(), dead, me))
		first := b.take()
		require.Equal(b, []string{"1"}, takenIDs(first))
		require.NoError(b, b.run(first[0]))
		require.Equal(b, []string{"2"}, takenIDs(b.take()))
	})
}

func TestDiscardLetsTheKeyGoOn(t *testing.T) {
	t.Parallel()
	onAllStores(t, func(b *bench) {
		b.hold(held("1", "k"), inbox.ReasonDead, true, 0)
		require.Equal(b, inbox.Behind, b.claim(held("2", "k")))
		require.Empty(b, b.take())
		c := b.only(inbox.HeldFilter{ID: "1"})
		require.ErrorContains(b, b.op.Discard(b.Context(), c, inbox.By{Actor: "me"}), "Reason is empty")
		require.ErrorContains(b, b.op.Discard(b.Context(), c, inbox.By{Reason: "x"}), "Actor is empty")
		require.NoError(b, b.op.Discard(b.Context(), c, me))
		require.ErrorIs(b, b.op.Discard(b.Context(), c, me), inbox.ErrNotHeld)
		require.Equal(b, []string{"2"}, takenIDs(b.take()))
		require.Equal(b, inbox.Duplicate, b.claim(held("1", "k")), "a redelivery changes nothing")
		require.Equal(b, 1, b.count(`SELECT count(*) FROM processed_messages WHERE message_id = '1' AND state = 2 AND reason = 'discarded: because'`))
		require.Equal(b, 1, b.count(`SELECT count(*) FROM twiceproof_audit WHERE action = 'discard' AND message_id = '1' AND reason = 'because'`))
	})
}

func TestEditKeepsThePlaceAndLinksTheNewID(t *testing.T) {
	t.Parallel()
	onAllStores(t, func(b *bench) {
		b.hold(held("1", "k"), inbox.ReasonDead, true, 0)
		b.hold(held("2", "k"), inbox.ReasonRetry, false, 0)
		require.Equal(b, inbox.Claimed, b.claim(held("taken", "")))
		c := b.only(inbox.HeldFilter{ID: "1"})
		for id, want := range map[string]error{"": inbox.ErrNoID, "a\x00": inbox.ErrBadID, "1": inbox.ErrIDTaken, "2": inbox.ErrIDTaken, "taken": inbox.ErrIDTaken} {
			_, err := b.op.Edit(b.Context(), c, &brokers.Message{ID: id}, me)
			require.ErrorIs(b, err, want, "%q", id)
		}
		_, err := b.op.Edit(b.Context(), c, &brokers.Message{ID: "1-mended", Key: "other"}, me)
		require.ErrorContains(b, err, "cannot be changed")
		require.Equal(b, []string{"1", "2"}, b.list(inbox.HeldFilter{}), "nothing was done by halves")

		seq, err := b.op.Edit(b.Context(), c, &brokers.Message{ID: "1-mended", Payload: []byte("better")}, me)
		require.NoError(b, err)
		h, err := b.op.Get(b.Context(), seq)
		require.NoError(b, err)
		require.Equal(b, "1", h.EditedFrom)
		require.Equal(b, "order.placed", h.Message.Type)
		require.Equal(b, "k", h.Message.Key)
		require.Len(b, h.Message.Headers, 2)
		require.Equal(b, "better", string(h.Message.Payload))
		heads := b.take()
		require.Equal(b, []string{"1-mended"}, takenIDs(heads), "it keeps the old one's place")
		require.NoError(b, b.run(heads[0]))
		require.Equal(b, []string{"2"}, takenIDs(b.take()))
		require.Equal(b, inbox.Duplicate, b.claim(held("1", "k")), "the broken one is done for")
		require.Equal(b, 1, b.count(`SELECT count(*) FROM processed_messages WHERE message_id = '1' AND state = 2 AND reason = 'replaced by 1-mended'`))
		require.Equal(b, 1, b.count(`SELECT count(*) FROM twiceproof_audit WHERE action = 'edit' AND message_id = '1' AND new_message_id = '1-mended'`))
	})
}

// A conflict and a message without an ID can only be edited or discarded, and what was
// processed under the ID of a conflict stays as it is.
func TestConflictsAndMessagesWithoutAnID(t *testing.T) {
	t.Parallel()
	onAllStores(t, func(b *bench) {
		require.Equal(b, inbox.Claimed, b.claim(held("1", "k")))
		other := held("1", "k")
		other.Payload = []byte("other content")
		b.hold(other, inbox.ReasonConflict, true, 0)
		b.hold(&brokers.Message{Topic: "orders", Payload: []byte("no id")}, inbox.ReasonNoID, true, 0)
		conflict, nameless := b.only(inbox.HeldFilter{Reason: inbox.ReasonConflict}), b.only(inbox.HeldFilter{Reason: inbox.ReasonNoID})
		h, err := b.op.Get(b.Context(), conflict.Seq)
		require.NoError(b, err)
		require.Equal(b, inbox.Fingerprint(held("1", "k")), h.ProcessedFingerprint)
		require.NotEqual(b, h.Fingerprint, h.ProcessedFingerprint)
		for _, c := range []inbox.Choice{conflict, nameless} {
			require.ErrorIs(b, b.op.Replay(b.Context(), c, me), inbox.ErrNotReplayable)
		}
		_, err = b.op.Edit(b.Context(), conflict, &brokers.Message{ID: "1-b", Payload: []byte("other content")}, me)
		require.NoError(b, err)
		_, err = b.op.Edit(b.Context(), nameless, &brokers.Message{ID: "named", Payload: []byte("no id")}, me)
		require.NoError(b, err)
		require.Equal(b, 1, b.count(`SELECT count(*) FROM processed_messages WHERE message_id = '1' AND state = 0`))
		require.ElementsMatch(b, []string{"1-b", "named"}, takenIDs(b.take()))

		third := held("1", "k")
		third.Payload = []byte("a third content")
		b.hold(third, inbox.ReasonConflict, true, 0)
		require.NoError(b, b.op.Discard(b.Context(), b.only(inbox.HeldFilter{Reason: inbox.ReasonConflict}), me))
		require.Equal(b, 1, b.count(`SELECT count(*) FROM processed_messages WHERE message_id = '1' AND state = 0`))
	})
}

// Two operators act on one list, and consumers run what becomes due meanwhile.
func TestOperatorsAtOnceActOnceOnEach(t *testing.T) {
	t.Parallel()
	onAllStores(t, func(b *bench) {
		const n = 60
		for i := range n {
			b.hold(held(fmt.Sprintf("m%03d", i), fmt.Sprint("k", i%5)), inbox.ReasonDead, true, 0)
		}
		chosen := b.choose(inbox.HeldFilter{})
		var wg sync.WaitGroup
		var mu sync.Mutex
		replayed := 0
		for range 3 {
			wg.Go(func() {
				for _, c := range chosen {
					err := b.op.Replay(b.Context(), c, me)
					switch {
					case err == nil:
						mu.Lock()
						replayed++
						mu.Unlock()
					case !errors.Is(err, inbox.ErrChanged) && !errors.Is(err, inbox.ErrNotHeld):
						assert.NoError(b, err)
					}
				}
			})
		}
		wg.Wait()
		require.Equal(b, n, replayed)
		last := map[string]string{}
		for done := 0; done < n; {
			heads := b.take()
			require.NotEmpty(b, heads)
			for _, h := range heads {
				m := h.Item.Message
				require.Less(b, last[m.Key], m.ID, "order of %s", m.Key)
				last[m.Key] = m.ID
				require.NoError(b, b.run(h))
				done++
			}
		}
	})
}
