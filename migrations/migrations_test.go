package migrations_test

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
	"github.com/twiceproof/twiceproof/migrations"
)

func TestUpIsSafeTwiceAndEightTimesAtOnce(t *testing.T) {
	t.Parallel()
	pool := devtest.PostgresPool(t, 10)
	db := migrations.Pool(pool)
	var wg sync.WaitGroup
	errs := make([]error, 8)
	applied := make([][]migrations.Migration, 8)
	for i := range errs {
		wg.Go(func() { applied[i], errs[i] = migrations.Up(t.Context(), db) })
	}
	wg.Wait()
	n := 0
	for i := range errs {
		require.NoError(t, errs[i])
		n += len(applied[i])
	}
	require.Equal(t, len(migrations.All(migrations.Postgres)), n, "each is applied by one")
	require.NoError(t, migrations.Check(t.Context(), db))
	again, err := migrations.Up(t.Context(), db)
	require.NoError(t, err)
	require.Empty(t, again)
}

func TestCheckSaysWhatIsMissing(t *testing.T) {
	t.Parallel()
	pool := devtest.PostgresPool(t, 4)
	db := migrations.Pool(pool)
	_, err := migrations.Up(t.Context(), db)
	require.NoError(t, err)
	_, err = pool.Exec(t.Context(), `DROP TABLE outbox_shares; ALTER TABLE held_messages DROP COLUMN tx_mark`)
	require.NoError(t, err)
	var missing *migrations.MissingError
	require.ErrorAs(t, migrations.Check(t.Context(), db), &missing)
	require.ElementsMatch(t, []string{"table outbox_shares", "column held_messages.tx_mark"}, missing.Missing)
}
