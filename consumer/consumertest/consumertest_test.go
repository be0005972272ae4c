package consumertest_test

import (
	"context"
	"database/sql"
	"errors"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/consumer"
	"github.com/twiceproof/twiceproof/consumer/consumertest"
	"github.com/twiceproof/twiceproof/inbox"
	"github.com/twiceproof/twiceproof/migrations"
)

type order struct{ Cents int }

// bill is a handler as a user has it.
func bill(ctx context.Context, tx *sql.Tx, e consumer.Event[order]) error {
	if e.Body.Cents == 0 {
		return errors.New("nothing to bill")
	}
	_, err := tx.ExecContext(ctx, `INSERT INTO invoices (id, cents) VALUES (?, ?)`, e.ID, e.Body.Cents)
	return err
}

func open(t *testing.T) *sql.DB {
	db, err := sql.Open("sqlite", "file:"+filepath.Join(t.TempDir(), "t.db")+"?_pragma=busy_timeout(5000)&_txlock=immediate")
	require.NoError(t, err)
	db.SetMaxOpenConns(1)
	t.Cleanup(func() { db.Close() })
	_, err = migrations.Up(t.Context(), migrations.SQLDB(db, migrations.SQLite))
	require.NoError(t, err)
	_, err = db.Exec(`CREATE TABLE invoices (id TEXT, cents INTEGER)`)
	require.NoError(t, err)
	return db
}

func TestDeliverGivesEveryMessageTwice(t *testing.T) {
	t.Parallel()
	db := open(t)
	s := consumertest.Deliver(t, inbox.SQLite(db), consumer.JSON(bill),
		&brokers.Message{ID: "1", Payload: []byte(`{"Cents":1}`)},
		&brokers.Message{ID: "2", Payload: []byte(`{"Cents":2}`)},
		&brokers.Message{ID: "bad", Payload: []byte(`{"Cents":0}`)})
	require.EqualValues(t, 2, s.Processed)
	require.EqualValues(t, 3, s.Duplicates)
	require.EqualValues(t, 1, s.Held)
	var n int
	require.NoError(t, db.QueryRow(`SELECT sum(cents) FROM invoices`).Scan(&n))
	require.Equal(t, 3, n)
}

func TestNewEvent(t *testing.T) {
	t.Parallel()
	db := open(t)
	tx, err := db.Begin()
	require.NoError(t, err)
	defer tx.Rollback()
	require.NoError(t, bill(t.Context(), tx, consumertest.NewEvent(t, "1", order{7})))
	require.Error(t, bill(t.Context(), tx, consumertest.NewEvent(t, "2", order{})))
	m := consumertest.NewMessage(t, "3", []byte("raw"))
	require.Equal(t, []byte("raw"), m.Payload)
	require.Equal(t, 1, m.Attempt)
}
