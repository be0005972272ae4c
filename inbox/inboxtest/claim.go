package inboxtest

import (
	"context"
	"fmt"
	"strings"

	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/inbox"
)

func claimCases[Tx any]() []testCase[Tx] {
	return []testCase[Tx]{
		{"claim/work and claim are committed together", nil, func(e *env[Tx]) {
			e.process(e.item("1", ""))
			require.Equal(e, 1, e.effects())
			require.Equal(e, 1, e.count(`SELECT count(*) FROM processed_messages WHERE message_id = '1' AND state = 0`))
			require.Equal(e, inbox.Duplicate, e.verdict(e.item("1", "")))
		}},
		// sksmith/go-micro-example#58: a claim that is committed before the work loses it.
		{"claim/a rollback leaves neither work nor claim", nil, func(e *env[Tx]) {
			a := e.open(e.item("1", ""))
			e.effect(a, "1")
			require.NoError(e, a.Rollback(context.Background()))
			require.Zero(e, e.effects())
			require.Zero(e, e.count(`SELECT count(*) FROM processed_messages`))
			require.Equal(e, inbox.Claimed, e.verdict(e.item("1", "")))
		}},
		// BrighterCommand/Brighter#375: a key without the handler's name makes the second
		// handler's event a duplicate.
		{"claim/two consumers process a message once each", nil, func(e *env[Tx]) {
			e.process(e.item("1", ""))
			e.consumer = "other"
			a := e.open(e.item("1", ""))
			e.effect(a, "other/1")
			e.commit(a)
			require.Equal(e, 2, e.effects())
			require.Equal(e, 2, e.count(`SELECT count(*) FROM inbox_consumers`))
		}},
		// nats.rs and Altinn/altinn-storage#788: the second message of an ID vanished.
		{"claim/the same id with other content is a conflict", nil, func(e *env[Tx]) {
			e.process(e.item("1", "", `{"amount":10}`))
			require.Equal(e, inbox.Conflict, e.verdict(e.item("1", "", `{"amount":99}`)))
			other := e.item("1", "", `{"amount":10}`)
			other.Message.Headers = brokers.Headers{{Key: "trace", Value: []byte("2")}}
			other.Fingerprint = inbox.Fingerprint(other.Message)
			require.Equal(e, inbox.Duplicate, e.verdict(other), "headers are not content")
		}},
		{"claim/a row without a fingerprint never conflicts", nil, func(e *env[Tx]) {
			it := e.item("1", "")
			it.Fingerprint = nil
			e.process(it)
			require.Equal(e, inbox.Duplicate, e.verdict(e.item("1", "", "other")))
		}},
		// apache/incubator-devlake#3564, PostHog/posthog#23896: odd ids were folded, cut or
		// retried for ever.
		{"claim/ids are compared byte for byte", nil, func(e *env[Tx]) {
			ids := []string{"a", "A", "a ", " a", "é", "e\u0301", "😀", "\u200fa", "a\n", "a'b", `a"b`, "a\\b", "sha256:short"}
			for _, id := range ids {
				e.process(e.item(id, ""))
			}
			for _, id := range ids {
				require.Equal(e, inbox.Duplicate, e.verdict(e.item(id, "")), "%q", id)
			}
			require.Equal(e, len(ids), e.effects())
		}},
		// rails/solid_queue#151, dotnetcore/CAP#1619: long ids failed in the index or were cut.
		{"claim/long ids are hashed and never cut", nil, func(e *env[Tx]) {
			long := strings.Repeat("x", 2999)
			ids := []string{strings.Repeat("a", 255), strings.Repeat("a", 256), strings.Repeat("b", 2700), long + "1", long + "2", strings.Repeat("c", 100_000)}
			for _, id := range ids {
				e.process(e.item(id, ""))
			}
			for _, id := range ids {
				require.Equal(e, inbox.Duplicate, e.verdict(e.item(id, "")), len(id))
			}
			stored, err := inbox.StoredID(long + "1")
			require.NoError(e, err)
			require.Equal(e, inbox.Claimed, e.verdict(e.item(stored, "")), "a raw id that looks like a hash is another one")
		}},
		// cloudevents/spec#391: two producers count 1, 2, 3 each.
		{"claim/joined producer and id do not meet", nil, func(e *env[Tx]) {
			e.process(e.item(brokers.JoinID("a:b", "c"), ""))
			require.Equal(e, inbox.Claimed, e.verdict(e.item(brokers.JoinID("a", "b:c"), "")))
		}},
		{"claim/each message of a unit gets its own verdict", nil, unitVerdicts[Tx]},
		// hookdeck/outpost#946: the same id twice in one statement aborted the batch for ever.
		{"claim/copies in one unit are folded", nil, func(e *env[Tx]) {
			a, vs := e.begin(e.Store, e.unit(e.item("1", ""), e.item("2", ""), e.item("1", ""), e.item("1", "", "other")))
			require.Equal(e, []inbox.Verdict{inbox.Claimed, inbox.Claimed, inbox.Copy, inbox.Conflict}, vs)
			e.commit(a)
			require.Equal(e, 2, e.count(`SELECT count(*) FROM processed_messages`))
		}},
		{"claim/a unit of a thousand", nil, func(e *env[Tx]) {
			var items []*inbox.Item
			for i := range 1000 {
				items = append(items, e.item(fmt.Sprint(i), fmt.Sprint(i%7)))
			}
			a, vs := e.begin(e.Store, e.unit(items...))
			for _, v := range vs {
				require.Equal(e, inbox.Claimed, v)
			}
			e.commit(a)
			a, vs = e.begin(e.Store, e.unit(items...))
			require.Nil(e, a)
			require.Equal(e, inbox.Duplicate, vs[999])
		}},
		{"claim/the view shows it readably", nil, func(e *env[Tx]) {
			e.process(e.item("1", ""))
			require.Equal(e, 1, e.count(`SELECT count(*) FROM inbox WHERE consumer = 'c' AND message_id = '1' AND state = 'done'`))
		}},
		{"claim/the database is said to be usable", nil, func(e *env[Tx]) {
			require.NoError(e, e.Store.Check(context.Background()))
			require.NoError(e, e.Do(`DROP VIEW inbox`))
			require.NoError(e, e.Do(`DROP TABLE held_messages`))
			require.ErrorContains(e, e.Store.Check(context.Background()), "twiceproof migrate up")
		}},
	}
}

// unitVerdicts: of a unit with every kind of message only the claims that are the
// unit's own stay after the commit.
func unitVerdicts[Tx any](e *env[Tx]) {
	e.process(e.item("done", ""))
	e.hold(e.item("head", "k"))
	items := []*inbox.Item{e.item("later", "k"), e.item("new", ""), e.item("done", ""), e.item("head", "k"), e.item("new", ""), e.item("new", "", "other"), e.item("head", "k", "other")}
	u := e.unit(items...)
	u.HoldBehind = false
	a, vs := e.begin(e.Store, u)
	require.Equal(e, []inbox.Verdict{inbox.Behind, inbox.Claimed, inbox.Duplicate, inbox.Held, inbox.Copy, inbox.Conflict, inbox.Conflict}, vs)
	e.commit(a)
	require.Zero(e, e.count(`SELECT count(*) FROM processed_messages WHERE message_id = 'later'`), "behind, and not to be held by Begin: no claim stays")
	require.Equal(e, 1, e.count(`SELECT count(*) FROM processed_messages WHERE message_id = 'new' AND state = 0`))
	require.Equal(e, 1, e.heldRows())

	a, vs = e.begin(e.Store, e.unit(items[0]))
	require.Nil(e, a)
	require.Equal(e, []inbox.Verdict{inbox.Behind}, vs)
	require.Equal(e, 1, e.count(`SELECT count(*) FROM held_messages WHERE message_id = 'later' AND reason = 'behind' AND due_at IS NULL`))
	require.Equal(e, 1, e.count(`SELECT count(*) FROM processed_messages WHERE message_id = 'later' AND state = 1`))
}
