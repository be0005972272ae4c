package inbox

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/twiceproof/twiceproof/internal/sqldb"
)

// SQLStore is a Store through database/sql: on PostgreSQL for those whose ORM or
// driver wants it, and on SQLite.
//
// A *sql.Tx cannot be guarded, so the claim is read back before the commit.
// Handlers must not call Commit or Rollback, and should wrap SQL errors with %w: the
// store cannot see what they hide.
type SQLStore struct {
	db *sql.DB
	e  *engine
}

var _ Store[*sql.Tx] = (*SQLStore)(nil)

// PostgresDB returns a Store on a PostgreSQL database behind database/sql, with any
// driver whose errors have a SQLState method (pgx, lib/pq). It does no I/O.
func PostgresDB(db *sql.DB, opts ...Option) *SQLStore {
	return &SQLStore{db, newEngine(sqldb.Postgres, applyOptions(opts).schema)}
}

// SQLite returns a Store on an SQLite database: for demos, tests and programs on one
// node. The driver is the user's. With modernc.org/sqlite open it as
//
//	file:app.db?_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)&_txlock=immediate
//
// and SetMaxOpenConns(1): one write connection is fair, many are not. With
// synchronous below FULL a power failure may take back the last commits, which are
// acknowledged by then.
func SQLite(db *sql.DB, opts ...Option) *SQLStore {
	return &SQLStore{db, newEngine(sqldb.SQLite, "")}
}

// PoolSize implements [Store]. On SQLite it is 0: connections do not bound
// concurrency there, the one writer does.
func (s *SQLStore) PoolSize() int {
	if s.SingleWriter() {
		return 0
	}
	return s.db.Stats().MaxOpenConnections
}

// SingleWriter reports whether the database has one writer at a time (SQLite).
func (s *SQLStore) SingleWriter() bool { return s.e.dialect == sqldb.SQLite }

// Check implements [Store].
func (s *SQLStore) Check(ctx context.Context) error { return s.e.check(ctx, sqldb.SQL(s.db)) }

func (s *SQLStore) consumer(ctx context.Context, name string) (int16, error) {
	id, err := s.e.consumer(ctx, sqldb.SQL(s.db), name)
	if err != nil || id != 0 {
		return id, err
	}
	if err := s.inTx(ctx, func(tx *sql.Tx) error { return s.e.addConsumer(ctx, sqldb.SQL(tx), name) }); err != nil {
		return 0, err
	}
	return s.e.consumer(ctx, sqldb.SQL(s.db), name)
}

// begin opens a transaction whose life does not depend on ctx: database/sql would
// roll back a handler's transaction the moment its context ends.
func (s *SQLStore) begin(ctx context.Context) (*sql.Tx, error) {
	return s.db.BeginTx(context.WithoutCancel(ctx), nil)
}

// inTx runs fn in a durable transaction of the store's own.
func (s *SQLStore) inTx(ctx context.Context, fn func(*sql.Tx) error) error {
	tx, err := s.begin(ctx)
	if err != nil {
		return err
	}
	if s.e.dialect == sqldb.Postgres {
		_, err = tx.ExecContext(ctx, "SELECT "+sqlDurable)
	}
	if err == nil {
		err = fn(tx)
	}
	if err != nil {
		_ = tx.Rollback()
		return err
	}
	return tx.Commit()
}

// Begin implements [Store].
func (s *SQLStore) Begin(ctx context.Context, u Unit) (Attempt[*sql.Tx], []Verdict, error) {
	consumer, err := s.consumer(ctx, u.Consumer)
	if err != nil {
		return nil, nil, classify(err)
	}
	items, of, conflict := fold(u.Items)
	tx, err := s.begin(ctx)
	if err != nil {
		return nil, nil, classify(err)
	}
	a := &sqlAttempt{s: s, tx: tx, consumer: consumer, u: u}
	var vs []Verdict
	var open, dirty bool
	rows, pid, err := s.e.claimOn(ctx, sqldb.SQL(tx), consumer, u, items)
	if err == nil {
		a.pid = pid
		vs, open, dirty, err = s.e.settleClaims(ctx, sqldb.SQL(tx), consumer, u, items, rows)
	}
	if err == nil && !open {
		if dirty {
			err = tx.Commit()
		} else {
			err = tx.Rollback()
		}
	}
	if err != nil {
		_ = tx.Rollback()
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

// Record implements [Store].
func (s *SQLStore) Record(ctx context.Context, u Unit, outcomes ...Outcome[*sql.Tx]) ([]Verdict, error) {
	consumer, err := s.consumer(ctx, u.Consumer)
	if err != nil {
		return nil, classify(err)
	}
	var vs []Verdict
	err = s.inTx(ctx, func(tx *sql.Tx) error {
		vs, err = recordAll(ctx, s.e, tx, sqldb.SQL(tx), consumer, u, outcomes)
		return err
	})
	if err != nil {
		return nil, classify(err)
	}
	return vs, nil
}

// TakeHeads implements [Store].
func (s *SQLStore) TakeHeads(ctx context.Context, q HeadQuery) (hs []*Head, err error) {
	consumer, err := s.consumer(ctx, q.Consumer)
	if err != nil {
		return nil, err
	}
	err = s.inTx(ctx, func(tx *sql.Tx) error {
		hs, err = s.e.takeHeads(ctx, sqldb.SQL(tx), consumer, q)
		return err
	})
	return hs, classify(err)
}

// BeginRetry implements [Store].
func (s *SQLStore) BeginRetry(ctx context.Context, h *Head, u Unit) (Attempt[*sql.Tx], error) {
	tx, err := s.begin(ctx)
	if err != nil {
		return nil, classify(err)
	}
	ended, pid, err := s.e.lockHead(ctx, sqldb.SQL(tx), h, u)
	if err == nil && ended {
		if err = tx.Commit(); err == nil {
			return nil, ErrTxEnded
		}
	}
	if err != nil {
		_ = tx.Rollback()
		return nil, classify(err)
	}
	return &sqlAttempt{s: s, tx: tx, consumer: h.consumer, u: u, head: h, pid: pid}, nil
}

// ReturnHead implements [Store].
func (s *SQLStore) ReturnHead(ctx context.Context, h *Head, delay time.Duration) error {
	_, err := sqldb.SQL(s.db).Exec(ctx, s.e.sql(sqlReturnHead), h.Seq, h.Starts, delay.Microseconds())
	return err
}

// RepairHeads implements [Store].
func (s *SQLStore) RepairHeads(ctx context.Context, name string, continueAfterDead bool) (int, error) {
	consumer, err := s.consumer(ctx, name)
	if err != nil {
		return 0, err
	}
	n, err := sqldb.SQL(s.db).Exec(ctx, s.e.sql(sqlRepair), consumer, continueAfterDead)
	return int(n), err
}

// Held implements [Store].
func (s *SQLStore) Held(ctx context.Context, name string) (HeldStats, error) {
	consumer, err := s.consumer(ctx, name)
	if err != nil {
		return HeldStats{}, err
	}
	return s.e.heldStats(ctx, sqldb.SQL(s.db), consumer)
}

type sqlAttempt struct {
	s        *SQLStore
	tx       *sql.Tx
	consumer int16
	u        Unit
	pid      int32
	claimed  []string
	head     *Head
	killed   bool
}

// Tx implements [Attempt].
func (a *sqlAttempt) Tx() *sql.Tx { return a.tx }

// Broken implements [Attempt]: asked of the connection itself.
func (a *sqlAttempt) Broken() bool {
	if a.s.SingleWriter() || a.killed {
		return a.killed
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	_, err := a.tx.ExecContext(ctx, "SELECT 1")
	return err != nil && !errors.Is(err, sql.ErrTxDone) && sqldb.CommitUncertain(err)
}

// Rerun implements [Attempt].
func (a *sqlAttempt) Rerun(err error) bool { return sqldb.Rerun(err) }

// Commit implements [Attempt].
func (a *sqlAttempt) Commit(ctx context.Context) (CommitResult, error) {
	if ended, err := a.endedBehindOurBack(ctx); ended || err != nil {
		_ = a.tx.Rollback()
		switch {
		case ended:
			return CommitEnded, ErrTxEnded
		case sqldb.State(err) == sqldb.InFailedTransaction:
			return CommitNo, fmt.Errorf("%w: %w", ErrAborted, err)
		}
		return CommitNo, err
	}
	if a.head != nil {
		if err := a.s.e.finishHead(ctx, sqldb.SQL(a.tx), a.head, stateDone, nil, a.u.ContinueAfterDead); err != nil {
			_ = a.tx.Rollback()
			return CommitNo, err
		}
	}
	err := a.tx.Commit()
	switch {
	case err == nil:
		return CommitYes, nil
	case errors.Is(err, sql.ErrTxDone):
		return CommitEnded, ErrTxEnded
	case sqldb.Busy(err):
		_ = a.tx.Rollback()
		return CommitNo, err
	case sqldb.CommitUncertain(err):
		return CommitUnknown, errors.Join(ErrCommitUnknown, err)
	}
	return CommitNo, err
}

func (a *sqlAttempt) endedBehindOurBack(ctx context.Context) (bool, error) {
	q := sqldb.SQL(a.tx)
	if a.head != nil {
		_, err := q.Exec(ctx, "RELEASE SAVEPOINT "+savepoint)
		if errors.Is(err, sql.ErrTxDone) || sqldb.State(err) == "3B001" || (err != nil && a.s.SingleWriter() && !sqldb.Busy(err)) {
			return true, nil
		}
		return false, err
	}
	for _, id := range a.claimed {
		var one int
		found, err := sqldb.QueryRow(ctx, q, a.s.e.sql(sqlHasClaim), []any{a.consumer, id}, &one)
		if errors.Is(err, sql.ErrTxDone) || (err == nil && !found) {
			return true, nil
		}
		if err != nil {
			return false, err
		}
	}
	return false, nil
}

// Fail implements [Attempt].
func (a *sqlAttempt) Fail(ctx context.Context, o Outcome[*sql.Tx]) error {
	if a.head == nil {
		return errors.New("inbox: Fail is for retries; use Rollback and Record")
	}
	write := func(tx *sql.Tx) error {
		if err := a.s.e.failHead(ctx, sqldb.SQL(tx), a.head, rowOf(o, a.u), o.Discard); err != nil {
			return err
		}
		return runWith(ctx, a.s.e, tx, sqldb.SQL(tx), a.u, o)
	}
	err := errKilled
	if !a.killed {
		_, err = a.tx.ExecContext(ctx, "ROLLBACK TO SAVEPOINT "+savepoint)
	}
	if err == nil {
		if err = write(a.tx); err == nil {
			if err = a.tx.Commit(); err == nil {
				return nil
			}
		}
	}
	_ = a.tx.Rollback()
	if errors.Is(err, ErrHeadLost) {
		return err
	}
	return classify(a.s.inTx(ctx, write))
}

// Rollback implements [Attempt].
func (a *sqlAttempt) Rollback(context.Context) error {
	err := a.tx.Rollback()
	if errors.Is(err, sql.ErrTxDone) {
		return ErrTxEnded
	}
	return nil // the connection is gone, or the database has rolled back already
}

var errKilled = errors.New("the connection was cut under the handler")

// Kill implements [Attempt]: on PostgreSQL the backend is ended from another
// connection; SQLite has nobody to ask.
func (a *sqlAttempt) Kill(ctx context.Context) error {
	if a.pid == 0 {
		return errors.ErrUnsupported
	}
	_, err := a.s.db.ExecContext(ctx, fmt.Sprintf("SELECT pg_terminate_backend(%d)", a.pid))
	a.killed = err == nil
	return err
}
