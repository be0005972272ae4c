package inbox

import (
	"context"
	"database/sql"

	"github.com/jackc/pgx/v5"

	"github.com/twiceproof/twiceproof/internal/sqldb"
)

const (
	sqlSuspect = `INSERT INTO {s}inbox_suspects AS t (consumer_id, message_id, starts, last_at) VALUES ($1, $2, 1, {now})
		ON CONFLICT (consumer_id, message_id) DO UPDATE SET starts = t.starts + 1, last_at = {now} RETURNING starts`
	sqlCleared   = `DELETE FROM {s}inbox_suspects WHERE consumer_id = $1 AND message_id = $2`
	sqlLaneOwner = `SELECT owner FROM {s}inbox_lanes WHERE consumer_id = $1 AND lane = $2`
	sqlEnterLane = `INSERT INTO {s}inbox_lanes AS t (consumer_id, lane, owner, since) VALUES ($1, $2, $3, {now})
		ON CONFLICT (consumer_id, lane) DO UPDATE SET owner = $3, since = {now}`
	sqlLeaveLane = `DELETE FROM {s}inbox_lanes WHERE consumer_id = $1 AND lane = $2 AND owner = $3`
)

func (e *engine) suspect(ctx context.Context, q sqldb.Q, consumer int16, it *Item) (starts int, err error) {
	_, err = sqldb.QueryRow(ctx, q, e.sql(sqlSuspect), []any{consumer, it.ID}, &starts)
	return starts, err
}

func (e *engine) cleared(ctx context.Context, q sqldb.Q, consumer int16, it *Item) error {
	_, err := q.Exec(ctx, e.sql(sqlCleared), consumer, it.ID)
	return err
}

func (e *engine) laneOwner(ctx context.Context, q sqldb.Q, consumer int16, lane string) (owner string, err error) {
	_, err = sqldb.QueryRow(ctx, q, e.sql(sqlLaneOwner), []any{consumer, text(lane)}, &owner)
	return owner, err
}

func (e *engine) enterLane(ctx context.Context, q sqldb.Q, consumer int16, lane, owner string) error {
	_, err := q.Exec(ctx, e.sql(sqlEnterLane), consumer, text(lane), owner)
	return err
}

func (e *engine) leaveLane(ctx context.Context, q sqldb.Q, consumer int16, lane, owner string) error {
	_, err := q.Exec(ctx, e.sql(sqlLeaveLane), consumer, text(lane), owner)
	return err
}

// Suspect implements [Store].
func (s *PostgresStore) Suspect(ctx context.Context, consumer string, it *Item) (starts int, err error) {
	id, err := s.consumer(ctx, consumer)
	if err == nil {
		err = s.inTx(ctx, func(tx pgx.Tx) error {
			starts, err = s.e.suspect(ctx, sqldb.Pgx(tx), id, it)
			return err
		})
	}
	return starts, classify(err)
}

// Cleared implements [Store].
func (s *PostgresStore) Cleared(ctx context.Context, consumer string, it *Item) error {
	id, err := s.consumer(ctx, consumer)
	if err == nil {
		err = s.e.cleared(ctx, sqldb.Pgx(s.pool), id, it)
	}
	return classify(err)
}

// LaneOwner implements [Store].
func (s *PostgresStore) LaneOwner(ctx context.Context, consumer, lane string) (owner string, err error) {
	id, err := s.consumer(ctx, consumer)
	if err == nil {
		owner, err = s.e.laneOwner(ctx, sqldb.Pgx(s.pool), id, lane)
	}
	return owner, classify(err)
}

// EnterLane implements [Store].
func (s *PostgresStore) EnterLane(ctx context.Context, consumer, lane, owner string) error {
	id, err := s.consumer(ctx, consumer)
	if err == nil {
		err = s.e.enterLane(ctx, sqldb.Pgx(s.pool), id, lane, owner)
	}
	return classify(err)
}

// LeaveLane implements [Store].
func (s *PostgresStore) LeaveLane(ctx context.Context, consumer, lane, owner string) error {
	id, err := s.consumer(ctx, consumer)
	if err == nil {
		err = s.e.leaveLane(ctx, sqldb.Pgx(s.pool), id, lane, owner)
	}
	return classify(err)
}

// Suspect implements [Store].
func (s *SQLStore) Suspect(ctx context.Context, consumer string, it *Item) (starts int, err error) {
	id, err := s.consumer(ctx, consumer)
	if err == nil {
		err = s.inTx(ctx, func(tx *sql.Tx) error {
			starts, err = s.e.suspect(ctx, sqldb.SQL(tx), id, it)
			return err
		})
	}
	return starts, classify(err)
}

// Cleared implements [Store].
func (s *SQLStore) Cleared(ctx context.Context, consumer string, it *Item) error {
	id, err := s.consumer(ctx, consumer)
	if err == nil {
		err = s.e.cleared(ctx, sqldb.SQL(s.db), id, it)
	}
	return classify(err)
}

// LaneOwner implements [Store].
func (s *SQLStore) LaneOwner(ctx context.Context, consumer, lane string) (owner string, err error) {
	id, err := s.consumer(ctx, consumer)
	if err == nil {
		owner, err = s.e.laneOwner(ctx, sqldb.SQL(s.db), id, lane)
	}
	return owner, classify(err)
}

// EnterLane implements [Store].
func (s *SQLStore) EnterLane(ctx context.Context, consumer, lane, owner string) error {
	id, err := s.consumer(ctx, consumer)
	if err == nil {
		err = s.e.enterLane(ctx, sqldb.SQL(s.db), id, lane, owner)
	}
	return classify(err)
}

// LeaveLane implements [Store].
func (s *SQLStore) LeaveLane(ctx context.Context, consumer, lane, owner string) error {
	id, err := s.consumer(ctx, consumer)
	if err == nil {
		err = s.e.leaveLane(ctx, sqldb.SQL(s.db), id, lane, owner)
	}
	return classify(err)
}
