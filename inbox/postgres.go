package inbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/twiceproof/twiceproof/internal/sqldb"
)

// PostgresStore is a Store on PostgreSQL through pgx: the recommended one. BEGIN and
// claim are one round trip, and handlers get a guarded pgx.Tx.
type PostgresStore struct {
	pool *pgxpool.Pool
	e    *engine
}

var _ Store[pgx.Tx] = (*PostgresStore)(nil)

// acquireTimeout bounds the wait for a connection: a pool that is empty for longer
// is an outage, not a reason to hang.
const acquireTimeout = 10 * time.Second

// Postgres returns a Store on pool. It does no I/O. The pool needs a connection for
// each running handler and two to spare.
func Postgres(pool *pgxpool.Pool, opts ...Option) *PostgresStore {
	return &PostgresStore{pool, newEngine(sqldb.Postgres, applyOptions(opts).schema)}
}

// PoolSize implements [Store].
func (s *PostgresStore) PoolSize() int { return int(s.pool.Config().MaxConns) }

// Check implements [Store].
func (s *PostgresStore) Check(ctx context.Context) error { return s.e.check(ctx, sqldb.Pgx(s.pool)) }

func (s *PostgresStore) acquire(ctx context.Context) (*pgxpool.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, acquireTimeout)
	defer cancel()
	return s.pool.Acquire(ctx)
}

// consumer returns the consumer's number, storing its name if it is new.
func (s *PostgresStore) consumer(ctx context.Context, name string) (int16, error) {
	id, err := s.e.consumer(ctx, sqldb.Pgx(s.pool), name)
	if err != nil || id != 0 {
		return id, err
	}
	err = pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error { return s.e.addConsumer(ctx, sqldb.Pgx(tx), name) })
	if err != nil {
		return 0, err
	}
	return s.e.consumer(ctx, sqldb.Pgx(s.pool), name)
}

// Begin implements [Store].
func (s *PostgresStore) Begin(ctx context.Context, u Unit) (Attempt[pgx.Tx], []Verdict, error) {
	consumer, err := s.consumer(ctx, u.Consumer)
	if err != nil {
		return nil, nil, err
	}
	items, of, conflict := fold(u.Items)
	conn, err := s.acquire(ctx)
	if err != nil {
		return nil, nil, err
	}
	a := &pgAttempt{s: s, conn: conn, guard: &guard{conn: conn.Conn()}, consumer: consumer, u: u}
	rows, err := a.beginAndClaim(ctx, items)
	if err != nil {
		_ = a.Rollback(ctx)
		return nil, nil, classify(err)
	}
	vs, open, dirty, err := s.e.settleClaims(ctx, sqldb.Pgx(conn), consumer, u, items, rows)
	if err == nil && !open {
		err = a.close(ctx, dirty)
	}
	if err != nil {
		_ = a.Rollback(ctx)
		return nil, nil, classify(err)
	}
	verdicts := unfold(vs, of, conflict)
	if !open {
		return nil, verdicts, nil
	}
	for i, v := range vs {
		if v == Claimed {
			a.claimed = append(a.claimed, items[i].ID)
		}
	}
	return a, verdicts, nil
}

// beginAndClaim sends BEGIN and the claim in one round trip.
func (a *pgAttempt) beginAndClaim(ctx context.Context, items []*Item) (rows []claimed, err error) {
	if len(items) == 1 {
		var is bool
		if rows, is, err = a.beginAndClaimOne(ctx, items[0]); is || err != nil {
			return rows, err
		}
		// Somebody else has claimed it. The statement that says what became of it is dearer.
		rows, a.pid, err = a.s.e.claimOn(ctx, sqldb.Pgx(a.conn), a.consumer, a.u, items)
		return rows, err
	}
	b := &pgx.Batch{}
	b.Queue("begin")
	b.Queue(a.s.e.claimSQL(len(items)), a.s.e.claimArgs(a.consumer, a.u, items)...)
	br := a.conn.SendBatch(ctx, b)
	defer func() { err = errors.Join(err, br.Close()) }()
	if _, err = br.Exec(); err != nil {
		return nil, err
	}
	answer, err := br.Query()
	if err != nil {
		return nil, err
	}
	defer answer.Close()
	return rows, sqldb.EachPgx(answer, scanClaim(&rows, &a.pid))
}

// beginAndClaimOne does it for one message that is most likely new: plain statements, one
// after the other, are planned and run in half the time. It reports whether the message
// was new.
func (a *pgAttempt) beginAndClaimOne(ctx context.Context, it *Item) (rows []claimed, is bool, err error) {
	e := a.s.e
	b := &pgx.Batch{}
	b.Queue("begin")
	b.Queue(sqlClaimSettings, e.settingsArgs(a.u)...)
	b.Queue(e.sql(sqlClaimOne), a.consumer, it.ID, it.Fingerprint, it.OrderKey, a.u.ContinueAfterDead)
	b.Queue(sqlClaimRestore)
	br := a.conn.SendBatch(ctx, b)
	defer func() { err = errors.Join(err, br.Close()) }()
	for range 2 {
		if _, err = br.Exec(); err != nil {
			return nil, false, err
		}
	}
	c := claimed{inserted: true}
	err = br.QueryRow().Scan(&c.heldID, &c.heldKey, &a.pid)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, false, nil
	}
	return []claimed{c}, true, err
}

// Record implements [Store].
func (s *PostgresStore) Record(ctx context.Context, u Unit, outcomes ...Outcome[pgx.Tx]) ([]Verdict, error) {
	consumer, err := s.consumer(ctx, u.Consumer)
	if err != nil {
		return nil, err
	}
	var vs []Verdict
	err = s.inTx(ctx, func(tx pgx.Tx) error {
		vs, err = recordAll(ctx, s.e, tx, sqldb.Pgx(tx), consumer, u, outcomes)
		return err
	})
	if err != nil {
		return nil, classify(err)
	}
	return vs, nil
}

// inTx runs fn in a durable transaction of the store's own, at READ COMMITTED.
func (s *PostgresStore) inTx(ctx context.Context, fn func(tx pgx.Tx) error) error {
	conn, err := s.acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	return pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{BeginQuery: "begin isolation level read committed; SELECT " + sqlDurable}, fn)
}

// TakeHeads implements [Store].
func (s *PostgresStore) TakeHeads(ctx context.Context, q HeadQuery) (hs []*Head, err error) {
	consumer, err := s.consumer(ctx, q.Consumer)
	if err != nil {
		return nil, err
	}
	err = s.inTx(ctx, func(tx pgx.Tx) error {
		hs, err = s.e.takeHeads(ctx, sqldb.Pgx(tx), consumer, q)
		return err
	})
	return hs, err
}

// BeginRetry implements [Store].
func (s *PostgresStore) BeginRetry(ctx context.Context, h *Head, u Unit) (Attempt[pgx.Tx], error) {
	conn, err := s.acquire(ctx)
	if err != nil {
		return nil, err
	}
	a := &pgAttempt{s: s, conn: conn, guard: &guard{conn: conn.Conn()}, consumer: h.consumer, u: u, head: h}
	var ended bool
	if _, err = conn.Exec(ctx, "begin isolation level read committed"); err == nil {
		ended, a.pid, err = s.e.lockHead(ctx, sqldb.Pgx(conn), h, u)
	}
	if err == nil && ended {
		if err = a.close(ctx, true); err == nil {
			return nil, ErrTxEnded
		}
	}
	if err != nil {
		_ = a.Rollback(ctx)
		return nil, classify(err)
	}
	return a, nil
}

// ReturnHead implements [Store].
func (s *PostgresStore) ReturnHead(ctx context.Context, h *Head, delay time.Duration) error {
	_, err := s.pool.Exec(ctx, s.e.sql(sqlReturnHead), h.Seq, h.Starts, delay.Microseconds())
	return err
}

// RepairHeads implements [Store].
func (s *PostgresStore) RepairHeads(ctx context.Context, name string, continueAfterDead bool) (int, error) {
	consumer, err := s.consumer(ctx, name)
	if err != nil {
		return 0, err
	}
	tag, err := s.pool.Exec(ctx, s.e.sql(sqlRepair), consumer, continueAfterDead)
	return int(tag.RowsAffected()), err
}

// Held implements [Store].
func (s *PostgresStore) Held(ctx context.Context, name string) (HeldStats, error) {
	consumer, err := s.consumer(ctx, name)
	if err != nil {
		return HeldStats{}, err
	}
	return s.e.heldStats(ctx, sqldb.Pgx(s.pool), consumer)
}

// pgAttempt is a transaction on a connection of its own.
type pgAttempt struct {
	s        *PostgresStore
	conn     *pgxpool.Conn
	guard    *guard
	consumer int16
	u        Unit
	pid      int32
	claimed  []string
	head     *Head
	killed   bool
	broken   bool // as it was when the connection was given back
}

// Tx implements [Attempt].
func (a *pgAttempt) Tx() pgx.Tx { return a.guard }

// Broken implements [Attempt].
func (a *pgAttempt) Broken() bool {
	if a.conn == nil || a.killed {
		return a.broken || a.killed
	}
	return a.guard.conn.IsClosed()
}

// Rerun implements [Attempt].
func (a *pgAttempt) Rerun(err error) bool {
	if sqldb.Rerun(err) {
		return true
	}
	return a.conn != nil && !a.killed && a.guard.lastErr != nil && sqldb.Rerun(a.guard.lastErr) && !a.Broken() && a.guard.conn.PgConn().TxStatus() == 'E'
}

// Commit implements [Attempt].
func (a *pgAttempt) Commit(ctx context.Context) (CommitResult, error) {
	if a.Broken() {
		_ = a.Rollback(ctx)
		return CommitNo, errors.New("connection was lost before the commit")
	}
	switch a.guard.conn.PgConn().TxStatus() {
	case 'E':
		err := ErrAborted
		if a.guard.lastErr != nil {
			err = fmt.Errorf("%w: %w", ErrAborted, a.guard.lastErr)
		}
		_ = a.Rollback(ctx)
		return CommitNo, err
	case 'I':
		_ = a.Rollback(ctx)
		return CommitEnded, ErrTxEnded
	}
	if ended, err := a.endedBehindOurBack(ctx); ended || err != nil {
		_ = a.Rollback(ctx)
		if ended {
			return CommitEnded, ErrTxEnded
		}
		return CommitNo, err
	}
	if a.head != nil {
		if err := a.s.e.finishHead(ctx, sqldb.Pgx(a.guard.conn), a.head, stateDone, nil, a.u.ContinueAfterDead); err != nil {
			_ = a.Rollback(ctx)
			return CommitNo, err
		}
	}
	tag, err := a.guard.conn.Exec(ctx, "commit")
	a.release()
	switch {
	case err == nil && tag.String() == "COMMIT":
		return CommitYes, nil
	case err == nil:
		return CommitNo, ErrAborted
	case sqldb.CommitUncertain(err):
		return CommitUnknown, errors.Join(ErrCommitUnknown, err)
	}
	return CommitNo, err
}

// endedBehindOurBack looks whether the transaction is still ours: by its savepoint
// on a retry, by its claims where a statement of the handler raised suspicion.
func (a *pgAttempt) endedBehindOurBack(ctx context.Context) (bool, error) {
	if a.head != nil {
		_, err := a.guard.conn.Exec(ctx, "RELEASE SAVEPOINT "+savepoint)
		if sqldb.State(err) == "3B001" {
			return true, nil
		}
		return false, err
	}
	if !a.guard.suspect {
		return false, nil
	}
	for _, id := range a.claimed {
		var one int
		found, err := sqldb.QueryRow(ctx, sqldb.Pgx(a.guard.conn), a.s.e.sql(sqlHasClaim), []any{a.consumer, id}, &one)
		if err != nil || !found {
			return !found && err == nil, err
		}
	}
	return false, nil
}

// Fail implements [Attempt].
func (a *pgAttempt) Fail(ctx context.Context, o Outcome[pgx.Tx]) error {
	if a.head == nil {
		return errors.New("inbox: Fail is for retries; use Rollback and Record")
	}
	write := func(ctx context.Context, tx pgx.Tx) error {
		if err := a.s.e.failHead(ctx, sqldb.Pgx(tx), a.head, rowOf(o, a.u), o.Discard); err != nil {
			return err
		}
		return runWith(ctx, a.s.e, tx, sqldb.Pgx(tx), a.u, o)
	}
	if a.conn != nil && !a.killed && !a.Broken() && !a.Rerun(nil) {
		_, err := a.guard.conn.Exec(ctx, "ROLLBACK TO SAVEPOINT "+savepoint)
		if err == nil {
			err = write(ctx, a.guard)
		}
		if err == nil {
			return a.close(ctx, true)
		}
		if errors.Is(err, ErrHeadLost) {
			_ = a.Rollback(ctx)
			return err
		}
	}
	_ = a.Rollback(ctx)
	return classify(a.s.inTx(ctx, func(tx pgx.Tx) error { return write(ctx, tx) }))
}

// Rollback implements [Attempt].
func (a *pgAttempt) Rollback(ctx context.Context) error {
	if a.conn == nil {
		return nil
	}
	var err error
	if !a.Broken() {
		if a.guard.conn.PgConn().TxStatus() == 'I' {
			err = ErrTxEnded
		} else if _, e := a.guard.conn.Exec(ctx, "rollback"); e != nil {
			_ = a.guard.conn.Close(ctx) // never back to the pool with an open transaction
		}
	}
	a.release()
	return err
}

// close ends a transaction that the store alone has written in.
func (a *pgAttempt) close(ctx context.Context, commit bool) error {
	if !commit {
		return ignoreEnded(a.Rollback(ctx))
	}
	tag, err := a.guard.conn.Exec(ctx, "commit")
	a.release()
	if err == nil && tag.String() != "COMMIT" {
		err = ErrAborted
	}
	return err
}

func ignoreEnded(err error) error {
	if errors.Is(err, ErrTxEnded) {
		return nil
	}
	return err
}

func (a *pgAttempt) release() {
	if a.conn != nil {
		a.broken = a.Broken()
		if !a.killed { // a killed one is the handler's, and was the pool's
			a.conn.Release()
		}
		a.conn = nil
	}
}

// Kill implements [Attempt]: it closes the socket under the handler and gives the
// pool its place back. From then on the connection is the handler's alone.
func (a *pgAttempt) Kill(context.Context) error {
	a.killed = true
	c := a.conn.Hijack()
	return c.PgConn().Conn().Close()
}
