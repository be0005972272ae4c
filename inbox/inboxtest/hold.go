package inboxtest

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/inbox"
)

func holdCases[Tx any]() []testCase[Tx] {
	return []testCase[Tx]{
		{"hold/a held message is held, not a duplicate", nil, func(e *env[Tx]) {
			e.hold(e.item("1", ""))
			require.Equal(e, inbox.Held, e.verdict(e.item("1", "")))
			require.Equal(e, 1, e.count(`SELECT count(*) FROM processed_messages WHERE state = 1`))
			e.record(retryOf[Tx](e.item("1", "")), inbox.Held)
			require.Equal(e, 1, e.heldRows())
		}},
		{"hold/the message comes back byte for byte", nil, func(e *env[Tx]) {
			m := &brokers.Message{ID: "1", Topic: "t\x00\xff", Key: "k\x00\xff", Type: "type\xfe", ContentType: "c\x00", Payload: []byte{0, 255, '\''},
				Time:    time.Date(2026, 1, 2, 3, 4, 5, 678, time.UTC),
				Headers: brokers.Headers{{Key: "a", Value: []byte{0}}, {Key: "a", Value: nil}, {Key: "", Value: []byte("x")}}}
			tomb := &brokers.Message{ID: "2", Topic: "t"}
			empty := &brokers.Message{ID: "3", Topic: "t", Payload: []byte{}}
			for _, m := range []*brokers.Message{m, tomb, empty} {
				it, err := inbox.NewItem(m, "orders/3@7", inbox.OrderKey(m.Key))
				require.NoError(e, err)
				e.hold(it)
				h := e.head()
				require.Equal(e, m, h.Item.Message)
				require.Equal(e, "orders/3@7", h.Item.Coordinates)
				require.Equal(e, inbox.Fingerprint(m), h.Item.Fingerprint)
				require.Equal(e, it.OrderKey, h.Item.OrderKey)
			}
		}},
		{"hold/later messages of the key are held behind, others go on", nil, func(e *env[Tx]) {
			e.hold(e.item("1", "k"))
			require.Equal(e, inbox.Behind, e.verdict(e.item("2", "k")))
			require.Equal(e, inbox.Held, e.verdict(e.item("2", "k")))
			require.Equal(e, inbox.Claimed, e.verdict(e.item("3", "other")))
			require.Equal(e, inbox.Claimed, e.verdict(e.item("4", "")), "without a key nothing waits")
			require.Equal(e, 1, e.count(`SELECT count(*) FROM held_messages WHERE message_id = '2' AND reason = 'behind' AND due_at IS NULL AND NOT dead`))
		}},
		{"hold/a held message is not run when its claim is gone", nil, func(e *env[Tx]) {
			e.hold(e.item("1", "k"))
			require.NoError(e, e.Do(`DELETE FROM processed_messages`))
			require.Equal(e, inbox.Held, e.verdict(e.item("1", "k")))
			require.Equal(e, 1, e.count(`SELECT count(*) FROM processed_messages WHERE state = 1`))
		}},
		{"hold/what is kept outlives the server's crash", needsServer[Tx], func(e *env[Tx]) {
			require.NoError(e, e.Do(`CREATE FUNCTION durable() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
				ASSERT current_setting('synchronous_commit') = 'on', 'synchronous_commit';
				RETURN NULL;
			END $$`))
			require.NoError(e, e.Do(`CREATE TRIGGER durable AFTER INSERT OR UPDATE OR DELETE ON held_messages FOR EACH ROW EXECUTE FUNCTION durable()`))
			e.hold(e.item("1", "k"))
			require.Equal(e, inbox.Behind, e.verdict(e.item("2", "k")))
			a := e.retry(e.head())
			require.NoError(e, a.Kill(e.Context()))
			require.NoError(e, a.Fail(e.Context(), retryOf[Tx](e.item("1", "k"))))
			e.commit(e.retry(e.head()))
		}},
		{"hold/a message without a key holds up nobody", nil, func(e *env[Tx]) {
			e.hold(e.item("1", ""))
			require.Equal(e, inbox.Claimed, e.verdict(e.item("2", "")))
		}},
		{"hold/a dead message blocks its key", nil, func(e *env[Tx]) {
			e.record(deadOf[Tx](e.item("1", "k")), inbox.Recorded)
			require.Equal(e, inbox.Behind, e.verdict(e.item("2", "k")))
			require.Empty(e, e.heads(e.Store, 10, time.Minute), "nothing is due behind it")
		}},
		{"hold/with Continue a dead message blocks nobody", nil, func(e *env[Tx]) {
			e.record(deadOf[Tx](e.item("1", "k")), inbox.Recorded)
			u := e.unit(e.item("2", "k"))
			u.ContinueAfterDead = true
			a, vs := e.begin(e.Store, u)
			require.Equal(e, inbox.Claimed, vs[0])
			e.commit(a)
		}},
		// Altinn/altinn-storage#788.
		{"hold/a conflict is kept once for each content and blocks nobody", nil, func(e *env[Tx]) {
			e.process(e.item("1", "k"))
			for _, want := range []inbox.Verdict{inbox.Recorded, inbox.Held} {
				for _, body := range []string{"b", "c"} {
					o := deadOf[Tx](e.item("1", "k", body))
					o.Reason = inbox.ReasonConflict
					e.record(o, want)
				}
			}
			require.Equal(e, 2, e.count(`SELECT count(*) FROM held_messages WHERE reason = 'conflict' AND message_id = '1' AND dead`))
			require.Equal(e, inbox.Duplicate, e.verdict(e.item("1", "k")))
			require.Equal(e, inbox.Claimed, e.verdict(e.item("2", "k")))
		}},
		// iterate and others: all messages without an id were duplicates of the first one,
		// or got a random id.
		{"hold/messages without an id are kept once for each place and content", nil, func(e *env[Tx]) {
			for _, want := range []inbox.Verdict{inbox.Recorded, inbox.Held} {
				for _, at := range []string{"orders/0@1", "orders/0@2"} {
					m := &brokers.Message{Topic: "t", Key: "k", Payload: []byte("x")}
					it, err := inbox.NewItem(m, at, inbox.OrderKey("k"))
					require.ErrorIs(e, err, inbox.ErrNoID)
					o := deadOf[Tx](it)
					o.Reason = inbox.ReasonNoID
					e.record(o, want)
				}
			}
			require.Equal(e, 2, e.count(`SELECT count(*) FROM held_messages WHERE reason = 'no-id' AND message_id IS NULL AND dead`))
			require.Equal(e, inbox.Claimed, e.verdict(e.item("2", "k")), "they do not block their key")
			require.Zero(e, e.count(`SELECT count(*) FROM processed_messages`))
		}},
		{"hold/an id that no text can hold is kept as bytes", nil, func(e *env[Tx]) {
			for _, id := range []string{"a\x00b", "\xff\xfe"} {
				it, err := inbox.NewItem(&brokers.Message{ID: id, Topic: "t"}, "at/"+id, nil)
				require.ErrorIs(e, err, inbox.ErrBadID)
				o := deadOf[Tx](it)
				o.Reason = inbox.ReasonBadID
				e.record(o, inbox.Recorded)
			}
			require.Equal(e, 2, e.count(`SELECT count(*) FROM held_messages WHERE reason = 'bad-id' AND raw_id IS NOT NULL`))
		}},
		// zendesk/ruby-kafka#821, sipcapture/heplify-server#180: the error text made the
		// failure path itself fail.
		{"hold/error texts of any kind can be kept", nil, func(e *env[Tx]) {
			o := retryOf[Tx](e.item("1", ""))
			o.Failure = inbox.Failure{Class: "a\x00b", Text: "\xff\x00" + strings.Repeat("é", 20<<10), Stack: strings.Repeat("s", 64<<10)}
			e.record(o, inbox.Recorded)
			require.Equal(e, 1, e.count(`SELECT count(*) FROM held_messages WHERE first_error = last_error AND length(last_error) > 4000
				AND length(last_error) <= 8192 AND length(last_stack) = 8192 AND last_error_class = 'ab'`))
		}},
		{"hold/a message that is done is not held any more", nil, func(e *env[Tx]) {
			e.process(e.item("1", ""))
			e.record(retryOf[Tx](e.item("1", "")), inbox.Duplicate)
			e.record(retryOf[Tx](e.item("1", "", "other")), inbox.Conflict)
			require.Zero(e, e.heldRows())
		}},
		{"hold/a failed message behind another one waits for it", nil, func(e *env[Tx]) {
			e.hold(e.item("1", "k"))
			e.hold(e.item("2", "k"))
			require.Equal(e, "1", e.head().Item.ID)
		}},
		{"hold/a discard keeps the claim with its reason", nil, func(e *env[Tx]) {
			e.record(inbox.Outcome[Tx]{Item: e.item("1", ""), Discard: true, Failure: inbox.Failure{Text: "not ours\x00"}}, inbox.Recorded)
			require.Equal(e, 1, e.count(`SELECT count(*) FROM processed_messages WHERE state = 2 AND reason = 'not ours'`))
			require.Equal(e, inbox.Duplicate, e.verdict(e.item("1", "")))
			require.Zero(e, e.heldRows())
		}},
		// PostHog/posthog#95200: the dead letter and the record of it must be one.
		{"hold/what goes with an outcome is in its transaction", nil, func(e *env[Tx]) {
			no := errors.New("no")
			o := deadOf[Tx](e.item("1", ""))
			o.With = func(ctx context.Context, tx Tx, _ int) error {
				return errors.Join(e.Exec(ctx, tx, `INSERT INTO effects (id) VALUES ('dead/1')`), no)
			}
			_, err := e.Store.Record(context.Background(), e.unit(), o)
			require.ErrorIs(e, err, no)
			require.Zero(e, e.effects()+e.heldRows())
			o.With = func(ctx context.Context, tx Tx, _ int) error {
				return e.Exec(ctx, tx, `INSERT INTO effects (id) VALUES ('dead/1')`)
			}
			e.record(o, inbox.Recorded)
			e.record(o, inbox.Held)
			require.Equal(e, 1, e.effects(), "and not for one that was held before")
		}},
		{"hold/they are counted", nil, func(e *env[Tx]) {
			e.hold(e.item("1", "k"))
			e.hold(e.item("2", "k"))
			e.record(deadOf[Tx](e.item("3", "")), inbox.Recorded)
			s, err := e.Store.Held(context.Background(), e.consumer)
			require.NoError(e, err)
			require.Equal(e, 3, s.Total)
			require.Equal(e, 1, s.Dead)
			require.Equal(e, 1, s.Due)
			require.Less(e, s.OldestDue, time.Minute)
			require.Positive(e, s.OldestDue)
		}},
	}
}
