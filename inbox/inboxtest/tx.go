package inboxtest

import (
	"context"
	"errors"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/inbox"
)

func txCases[Tx any]() []testCase[Tx] {
	ctx := context.Background()
	return []testCase[Tx]{
		// erleans/pgo#131: COMMIT of an aborted transaction is a ROLLBACK that says OK.
		{"tx/a swallowed SQL error is no commit and names its cause", needsAborts[Tx], func(e *env[Tx]) {
			a := e.open(e.item("1", ""))
			e.effect(a, "1")
			_ = e.Exec(ctx, a.Tx(), `INSERT INTO effects (id) VALUES ('1')`) // unique
			r, err := a.Commit(ctx)
			require.Equal(e, inbox.CommitNo, r)
			require.ErrorIs(e, err, inbox.ErrAborted)
			if e.Guarded {
				require.ErrorContains(e, err, "duplicate key")
			}
			require.Zero(e, e.effects())
			require.Equal(e, inbox.Claimed, e.verdict(e.item("1", "")))
		}},
		{"tx/a handler that committed itself: a duplicate from then on", nil, func(e *env[Tx]) {
			a := e.open(e.item("1", ""))
			e.effect(a, "1")
			require.NoError(e, e.End(ctx, a.Tx(), true))
			r, err := a.Commit(ctx)
			require.Equal(e, inbox.CommitEnded, r)
			require.ErrorIs(e, err, inbox.ErrTxEnded)
			require.Equal(e, inbox.Duplicate, e.verdict(e.item("1", "")))
			require.Equal(e, 1, e.effects())
		}},
		{"tx/a handler that rolled back itself: free again", nil, func(e *env[Tx]) {
			a := e.open(e.item("1", ""))
			e.effect(a, "1")
			require.NoError(e, e.End(ctx, a.Tx(), false))
			r, err := a.Commit(ctx)
			require.Equal(e, inbox.CommitEnded, r)
			require.ErrorIs(e, err, inbox.ErrTxEnded)
			require.Equal(e, inbox.Claimed, e.verdict(e.item("1", "")))
			require.Zero(e, e.effects())
		}},
		{"tx/a rollback after the handler's own end says so", nil, func(e *env[Tx]) {
			a := e.open(e.item("1", ""))
			require.NoError(e, e.End(ctx, a.Tx(), true))
			require.ErrorIs(e, a.Rollback(ctx), inbox.ErrTxEnded)
		}},
		{"tx/a lost connection is told by the connection", needsServer[Tx], func(e *env[Tx]) {
			a := e.open(e.item("1", ""))
			e.effect(a, "1")
			require.False(e, a.Broken())
			_ = e.Lose(ctx, a.Tx())
			_ = e.Exec(ctx, a.Tx(), `SELECT 1`)
			require.True(e, a.Broken())
			r, err := a.Commit(ctx)
			require.Equal(e, inbox.CommitNo, r)
			require.Error(e, err)
			require.Zero(e, e.effects())
			e.process(e.item("1", ""))
		}},
		{"tx/kill ends a handler's statement and frees its claim", needsServer[Tx], func(e *env[Tx]) {
			a := e.open(e.item("1", ""))
			done := make(chan error, 1)
			go func() { done <- e.Exec(ctx, a.Tx(), `SELECT pg_sleep(60)`) }()
			e.eventually("the statement runs", func() bool {
				return e.count(`SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep(60)%' AND state = 'active'`) == 1
			})
			require.NoError(e, a.Kill(ctx))
			require.Error(e, <-done)
			require.True(e, a.Broken())
			_ = a.Rollback(ctx)
			e.process(e.item("1", ""))
		}},
		{"tx/kill under a retry keeps its outcome", needsServer[Tx], func(e *env[Tx]) {
			e.hold(e.item("1", "k"))
			h := e.head()
			a := e.retry(h)
			done := make(chan error, 1)
			go func() { done <- e.Exec(ctx, a.Tx(), `SELECT pg_sleep(60)`) }()
			e.eventually("the statement runs", func() bool {
				return e.count(`SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep(60)%' AND state = 'active'`) == 1
			})
			require.NoError(e, a.Kill(ctx))
			require.Error(e, <-done)
			o := retryOf[Tx](h.Item)
			o.Attempts = 2
			require.NoError(e, a.Fail(ctx, o))
			require.Equal(e, 1, e.count(`SELECT count(*) FROM held_messages WHERE attempts = 2`))
		}},
		{"tx/kill is refused where nobody can end the transaction", func(f Fixture[Tx]) string {
			if f.Lose != nil {
				return "the server can end it"
			}
			return ""
		}, func(e *env[Tx]) {
			a := e.open(e.item("1", ""))
			require.ErrorIs(e, a.Kill(ctx), errors.ErrUnsupported)
			require.NoError(e, a.Rollback(ctx))
		}},
		{"tx/the claim's timeout binds no statement of the handler", needsServer[Tx], func(e *env[Tx]) {
			a := e.open(e.item("1", ""))
			require.NoError(e, e.Exec(ctx, a.Tx(), `DO $$ BEGIN ASSERT current_setting('lock_timeout') = '0', current_setting('lock_timeout'); END $$`))
			e.commit(a)
			e.hold(e.item("2", "k"))
			a = e.retry(e.head())
			require.NoError(e, e.Exec(ctx, a.Tx(), `DO $$ BEGIN ASSERT current_setting('lock_timeout') = '0', current_setting('lock_timeout'); END $$`))
			e.commit(a)
		}},
		// patroni/patroni#1411: an acknowledged commit must at least be on the disk.
		{"tx/durability is raised and the client is watched", needsServer[Tx], func(e *env[Tx]) {
			a := e.open(e.item("1", ""))
			require.NoError(e, e.Exec(ctx, a.Tx(), `DO $$ BEGIN
				ASSERT current_setting('synchronous_commit') = 'on', 'synchronous_commit';
				ASSERT current_setting('idle_in_transaction_session_timeout') = '30s', 'idle';
				ASSERT current_setting('client_connection_check_interval', true) IN ('1s', NULL), 'watch';
			END $$`))
			e.commit(a)
		}},
	}
}

func needsAborts[Tx any](f Fixture[Tx]) string {
	if !f.Aborts {
		return "an SQL error leaves the transaction usable"
	}
	return ""
}

func commitCases[Tx any]() []testCase[Tx] {
	ctx := context.Background()
	not := func(f Fixture[Tx]) string {
		if f.LoseCommits == nil {
			return "there is no server whose answer could be lost"
		}
		return ""
	}
	return []testCase[Tx]{
		// jackc/pgx#2110: the answer is lost, the commit is not.
		{"commit/unknown and done: claiming again finds the duplicate", not, func(e *env[Tx]) {
			a := e.open(e.item("1", ""))
			e.effect(a, "1")
			e.LoseCommits(true)
			r, err := a.Commit(ctx)
			require.Equal(e, inbox.CommitUnknown, r)
			require.ErrorIs(e, err, inbox.ErrCommitUnknown)
			require.Equal(e, inbox.Duplicate, e.verdict(e.item("1", "")))
			require.Equal(e, 1, e.effects())
		}},
		{"commit/unknown and never arrived: claiming again waits for the open transaction, then claims", not, func(e *env[Tx]) {
			u := e.unit(e.item("1", ""))
			u.IdleTimeout = 2 * time.Second
			a, vs := e.begin(e.Store, u)
			require.Equal(e, inbox.Claimed, vs[0])
			e.effect(a, "1")
			e.LoseCommits(false)
			r, err := a.Commit(ctx)
			require.Equal(e, inbox.CommitUnknown, r)
			require.ErrorIs(e, err, inbox.ErrCommitUnknown)
			c := e.claimWaiting(e.item("1", ""), 20*time.Second)
			require.Equal(e, inbox.Claimed, e.verdictOf(c), "the server has ended the abandoned transaction")
			require.Zero(e, e.effects())
		}},
		{"commit/unknown of a retry needs no resolving", not, func(e *env[Tx]) {
			e.hold(e.item("1", "k"))
			a := e.retry(e.head())
			e.effect(a, "1")
			e.LoseCommits(true)
			r, _ := a.Commit(ctx)
			require.Equal(e, inbox.CommitUnknown, r)
			require.Zero(e, e.heldRows())
			require.Equal(e, inbox.Duplicate, e.verdict(e.item("1", "k")))
		}},
		// jackc/pgx#787: a commit that fails must not poison the connection.
		{"commit/a constraint that fails at the end is a plain no", func(f Fixture[Tx]) string {
			if !f.Aborts {
				return "constraints cannot be deferred to the commit"
			}
			return ""
		}, func(e *env[Tx]) {
			require.NoError(e, e.Do(`CREATE TABLE parents (id text PRIMARY KEY)`))
			require.NoError(e, e.Do(`CREATE TABLE children (parent text REFERENCES parents DEFERRABLE INITIALLY DEFERRED)`))
			a := e.open(e.item("1", ""))
			require.NoError(e, e.Exec(ctx, a.Tx(), `INSERT INTO children VALUES ('nobody')`))
			r, err := a.Commit(ctx)
			require.Equal(e, inbox.CommitNo, r)
			require.ErrorContains(e, err, "23503")
			e.process(e.item("1", ""))
		}},
	}
}

func onceCases[Tx any]() []testCase[Tx] {
	ctx := context.Background()
	once := func(e *env[Tx], err error) (inbox.Verdict, error) {
		return inbox.Once(ctx, e.Store, "webhook", "1", func(ctx context.Context, tx Tx) error {
			require.NoError(e, e.Exec(ctx, tx, `INSERT INTO effects (id) VALUES ('1')`))
			return err
		})
	}
	return []testCase[Tx]{
		{"once/runs once", nil, func(e *env[Tx]) {
			for _, want := range []inbox.Verdict{inbox.Claimed, inbox.Duplicate, inbox.Duplicate} {
				v, err := once(e, nil)
				require.NoError(e, err)
				require.Equal(e, want, v)
			}
			require.Equal(e, 1, e.effects())
		}},
		{"once/an error stores nothing", nil, func(e *env[Tx]) {
			no := errors.New("no")
			v, err := once(e, no)
			require.ErrorIs(e, err, no)
			require.Zero(e, v)
			require.Zero(e, e.effects())
			v, err = once(e, nil)
			require.NoError(e, err)
			require.Equal(e, inbox.Claimed, v)
		}},
		{"once/a panic stores nothing and frees the connection", nil, func(e *env[Tx]) {
			for range 30 {
				require.PanicsWithValue(e, "boom", func() {
					_, _ = inbox.Once(ctx, e.Store, "webhook", "1", func(ctx context.Context, tx Tx) error {
						require.NoError(e, e.Exec(ctx, tx, `INSERT INTO effects (id) VALUES ('1')`))
						panic("boom")
					})
				})
			}
			require.Zero(e, e.effects())
			v, err := once(e, nil)
			require.NoError(e, err)
			require.Equal(e, inbox.Claimed, v)
		}},
		{"once/an id that cannot be kept is refused before anything runs", nil, func(e *env[Tx]) {
			for id, want := range map[string]error{"": inbox.ErrNoID, "  ": inbox.ErrNoID, "a\x00": inbox.ErrBadID} {
				_, err := inbox.Once(ctx, e.Store, "webhook", id, func(context.Context, Tx) error { e.Error("it ran"); return nil })
				require.ErrorIs(e, err, want)
			}
		}},
	}
}
