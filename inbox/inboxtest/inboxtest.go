package inboxtest

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/inbox"
	"github.com/twiceproof/twiceproof/internal/caselist"
)

// Config says what to test.
type Config[Tx any] struct {
	// New makes the parts for one case, on a database that is fresh and migrated.
	New func(t *testing.T) Fixture[Tx]
	// Expected is the file with the list of cases.
	Expected string
}

// Fixture is what a case works with. Statements use $1 for parameters.
type Fixture[Tx any] struct {
	// Store is the store, and Other a second one on the same database, as another
	// process would have it.
	Store, Other inbox.Store[Tx]
	// Exec runs a statement in a handler's transaction.
	Exec func(ctx context.Context, tx Tx, sql string, args ...any) error
	// Do runs a statement outside, and Count returns the number a query answers.
	Do    func(sql string, args ...any) error
	Count func(sql string) (int, error)
	// End ends a handler's transaction behind the store's back, with COMMIT or
	// ROLLBACK.
	End func(ctx context.Context, tx Tx, commit bool) error
	// Lose ends the connection under a transaction from the server's side. nil: there
	// is no server.
	Lose func(ctx context.Context, tx Tx) error
	// LoseCommits makes the next COMMIT of Store's connections lose its answer, or
	// never reach the server. nil: there is no server.
	LoseCommits func(reachesServer bool)
	// SingleWriter: a second writing transaction waits for the first, whatever it
	// writes (SQLite).
	SingleWriter bool
	// Aborts: an SQL error makes the rest of its transaction fail (PostgreSQL).
	Aborts bool
	// Guarded: the transaction refuses the handler's own Commit.
	Guarded bool
}

type testCase[Tx any] struct {
	name string
	not  func(f Fixture[Tx]) string
	run  func(e *env[Tx])
}

// Run runs the suite.
func Run[Tx any](t *testing.T, cfg Config[Tx]) {
	t.Helper()
	probe := cfg.New(t)
	var list caselist.List
	groups := [][]testCase[Tx]{claimCases[Tx](), raceCases[Tx](), holdCases[Tx](), headCases[Tx](), orderCases[Tx](), txCases[Tx](), commitCases[Tx](), onceCases[Tx]()}
	for _, g := range groups {
		for _, c := range g {
			if c.not != nil {
				if why := c.not(probe); why != "" {
					list.NotApplicable(c.name, why)
					continue
				}
			}
			list.Run(c.name)
			t.Run(c.name, func(t *testing.T) {
				t.Parallel()
				c.run(&env[Tx]{T: t, Fixture: cfg.New(t), consumer: "c"})
			})
		}
	}
	list.Check(t, "inboxtest", cfg.Expected)
}

func needsConcurrency[Tx any](f Fixture[Tx]) string {
	if f.SingleWriter {
		return "the database has one writer at a time: BEGIN waits, not the claim"
	}
	return ""
}

func needsServer[Tx any](f Fixture[Tx]) string {
	if f.Lose == nil {
		return "there is no server whose connection could be lost"
	}
	return ""
}

// env is one case.
type env[Tx any] struct {
	*testing.T
	Fixture[Tx]
	consumer string
}

// item is a message as a unit has it; no body means the ID is the body.
func (e *env[Tx]) item(id, key string, body ...string) *inbox.Item {
	payload := id
	if len(body) > 0 {
		payload = body[0]
	}
	m := &brokers.Message{ID: id, Topic: "orders", Key: key, Type: "t", Payload: []byte(payload)}
	it, _ := inbox.NewItem(m, "orders/0@"+id, inbox.OrderKey(key))
	return it
}

func (e *env[Tx]) unit(items ...*inbox.Item) inbox.Unit {
	return inbox.Unit{Consumer: e.consumer, Items: items, HoldBehind: true, ClaimTimeout: 5 * time.Second, IdleTimeout: 30 * time.Second}
}

func (e *env[Tx]) begin(s inbox.Store[Tx], u inbox.Unit) (inbox.Attempt[Tx], []inbox.Verdict) {
	e.Helper()
	a, vs, err := s.Begin(context.Background(), u)
	require.NoError(e, err)
	require.Len(e, vs, len(u.Items))
	if a != nil {
		e.Cleanup(func() { _ = a.Rollback(context.Background()) }) // nothing, unless the case failed
	}
	return a, vs
}

// open claims one message that must be free.
func (e *env[Tx]) open(it *inbox.Item) inbox.Attempt[Tx] {
	e.Helper()
	a, vs := e.begin(e.Store, e.unit(it))
	require.Equal(e, inbox.Claimed, vs[0])
	return a
}

// verdict claims one message and rolls back.
func (e *env[Tx]) verdict(it *inbox.Item) inbox.Verdict {
	e.Helper()
	a, vs := e.begin(e.Other, e.unit(it))
	if a != nil {
		require.NoError(e, a.Rollback(context.Background()))
	}
	return vs[0]
}

func (e *env[Tx]) effect(a inbox.Attempt[Tx], id string) {
	e.Helper()
	require.NoError(e, e.Exec(context.Background(), a.Tx(), `INSERT INTO effects (id) VALUES ($1)`, id))
}

func (e *env[Tx]) commit(a inbox.Attempt[Tx]) {
	e.Helper()
	r, err := a.Commit(context.Background())
	require.NoError(e, err)
	require.Equal(e, inbox.CommitYes, r)
}

// process claims, writes an effect, and commits.
func (e *env[Tx]) process(it *inbox.Item) {
	e.Helper()
	a := e.open(it)
	e.effect(a, it.ID)
	e.commit(a)
}

func (e *env[Tx]) count(sql string) int {
	e.Helper()
	n, err := e.Count(sql)
	require.NoError(e, err)
	return n
}

func (e *env[Tx]) effects() int { e.Helper(); return e.count(`SELECT count(*) FROM effects`) }
func (e *env[Tx]) heldRows() int {
	e.Helper()
	return e.count(`SELECT count(*) FROM held_messages`)
}

// hold records a message as held for a retry that is due at once.
func (e *env[Tx]) hold(it *inbox.Item) { e.Helper(); e.record(retryOf[Tx](it), inbox.Recorded) }

func retryOf[Tx any](it *inbox.Item) inbox.Outcome[Tx] {
	return inbox.Outcome[Tx]{Item: it, Reason: inbox.ReasonRetry, Attempts: 1, Failure: inbox.Failure{Class: "handler", Text: "no"}}
}

func deadOf[Tx any](it *inbox.Item) inbox.Outcome[Tx] {
	o := retryOf[Tx](it)
	o.Reason, o.Dead = inbox.ReasonDead, true
	return o
}

func (e *env[Tx]) record(o inbox.Outcome[Tx], want inbox.Verdict) {
	e.Helper()
	vs, err := e.Store.Record(context.Background(), e.unit(), o)
	require.NoError(e, err)
	require.Equal(e, []inbox.Verdict{want}, vs)
}

func (e *env[Tx]) heads(s inbox.Store[Tx], n int, lease time.Duration) []*inbox.Head {
	e.Helper()
	hs, err := s.TakeHeads(context.Background(), inbox.HeadQuery{Consumer: e.consumer, Max: n, Lease: lease})
	require.NoError(e, err)
	return hs
}

// head takes the one head that must be due.
func (e *env[Tx]) head() *inbox.Head {
	e.Helper()
	hs := e.heads(e.Store, 10, time.Minute)
	require.Len(e, hs, 1)
	return hs[0]
}

func (e *env[Tx]) retry(h *inbox.Head) inbox.Attempt[Tx] {
	e.Helper()
	a, err := e.Store.BeginRetry(context.Background(), h, e.unit())
	require.NoError(e, err)
	e.Cleanup(func() { _ = a.Rollback(context.Background()) })
	return a
}

// eventually polls for what must happen.
func (e *env[Tx]) eventually(what string, ok func() bool) {
	e.Helper()
	require.Eventually(e, ok, 20*time.Second, 5*time.Millisecond, what)
}
