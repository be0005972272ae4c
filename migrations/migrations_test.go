package migrations_test

import (
	"context"
	"database/sql"
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite"

	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
	"github.com/twiceproof/twiceproof/migrations"
)

// onBoth runs a test on a fresh database of each dialect. open returns another
// handle on it.
func onBoth(t *testing.T, test func(t *testing.T, d migrations.Dialect, open func(conns int) *sql.DB)) {
	for _, d := range []migrations.Dialect{migrations.Postgres, migrations.SQLite} {
		t.Run(d.String(), func(t *testing.T) {
			t.Parallel()
			driver, dsn := "sqlite", sqliteFile(t) // no busy_timeout: the driver's default
			if d == migrations.Postgres {
				driver, dsn = "pgx", devtest.PostgresSchema(t)
			}
			test(t, d, func(conns int) *sql.DB {
				db, err := sql.Open(driver, dsn)
				require.NoError(t, err)
				db.SetMaxOpenConns(conns)
				t.Cleanup(func() { require.NoError(t, db.Close()) })
				return db
			})
		})
	}
}

func sqliteFile(t *testing.T) string { return "file:" + filepath.Join(t.TempDir(), "t.db") }

func TestUpIsSafeTwiceAndEightTimesAtOnce(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, d migrations.Dialect, open func(int) *sql.DB) {
		var wg sync.WaitGroup
		errs := make([]error, 8)
		applied := make([][]migrations.Migration, 8)
		for i := range errs {
			db := migrations.SQLDB(open(1), d) // as many processes, starting together
			wg.Go(func() { applied[i], errs[i] = migrations.Up(t.Context(), db) })
		}
		wg.Wait()
		n := 0
		for i := range errs {
			require.NoError(t, errs[i])
			n += len(applied[i])
		}
		require.Equal(t, len(migrations.All(d)), n, "each is applied by one")
		db := migrations.SQLDB(open(1), d)
		require.NoError(t, migrations.Check(t.Context(), db))
		again, err := migrations.Up(t.Context(), db)
		require.NoError(t, err)
		require.Empty(t, again)
	})
}

func TestUpThroughPoolAndConnection(t *testing.T) {
	t.Parallel()
	pool := devtest.PostgresPool(t, 2)
	_, err := migrations.Up(t.Context(), migrations.Pool(pool))
	require.NoError(t, err)
	c, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	defer c.Release()
	require.NoError(t, migrations.Check(t.Context(), migrations.Conn(c.Conn())))
}

// A schema of its own: nothing lands beside it, and two of them are apart.
func TestSchemaOption(t *testing.T) {
	t.Parallel()
	pool := devtest.PostgresPool(t, 2)
	db := migrations.Pool(pool)
	for range 2 {
		name := devtest.Name(`o"dd`)
		t.Cleanup(func() {
			_, err := pool.Exec(context.Background(), `DROP SCHEMA "`+strings.ReplaceAll(name, `"`, `""`)+`" CASCADE`)
			require.NoError(t, err)
		})
		schema := migrations.Schema(name)
		var missing *migrations.MissingError
		require.ErrorAs(t, migrations.Check(t.Context(), db, schema), &missing)
		require.Equal(t, name, missing.Schema)
		done, err := migrations.Up(t.Context(), db, schema)
		require.NoError(t, err)
		require.Len(t, done, len(migrations.All(migrations.Postgres)))
		require.NoError(t, migrations.Check(t.Context(), db, schema))
	}
	var here int
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT count(*) FROM pg_class WHERE relnamespace = current_schema()::regnamespace`).Scan(&here))
	require.Zero(t, here, "nothing is in the search_path")
	require.Error(t, migrations.Check(t.Context(), db))
}

func TestSchemaOnSQLiteIsRefused(t *testing.T) {
	t.Parallel()
	db, err := sql.Open("sqlite", sqliteFile(t))
	require.NoError(t, err)
	defer db.Close()
	lite := migrations.SQLDB(db, migrations.SQLite)
	_, err = migrations.Up(t.Context(), lite, migrations.Schema("x"))
	require.ErrorContains(t, err, "SQLite has no schemas")
	require.ErrorContains(t, migrations.Check(t.Context(), lite, migrations.Schema("x")), "SQLite has no schemas")
}

// Another connection writes for ever and no busy_timeout is set: Up neither spins nor
// hangs.
func TestUpOnABusySQLiteGivesUp(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, err := sql.Open("sqlite", sqliteFile(t)+"?_pragma=busy_timeout(0)")
		require.NoError(t, err)
		defer db.Close()
		writer, err := db.Conn(t.Context())
		require.NoError(t, err)
		defer writer.Close()
		_, err = writer.ExecContext(t.Context(), "BEGIN IMMEDIATE")
		require.NoError(t, err)
		lite := migrations.SQLDB(db, migrations.SQLite)
		begin := time.Now()
		_, err = migrations.Up(t.Context(), lite)
		require.ErrorContains(t, err, "another connection has been writing to the database for 30s")
		require.InDelta(t, 30, time.Since(begin).Seconds(), 1)
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		_, err = migrations.Up(ctx, lite)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorContains(t, err, "another connection writes")

		_, err = writer.ExecContext(t.Context(), "ROLLBACK")
		require.NoError(t, err)
		_, err = migrations.Up(t.Context(), lite)
		require.NoError(t, err)
	})
}

// Each table and each column in turn is not there: Check names it, and nothing else.
func TestCheckNamesWhatIsMissing(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, d migrations.Dialect, open func(int) *sql.DB) {
		db := open(1)
		own := migrations.SQLDB(db, d)
		_, err := migrations.Up(t.Context(), own)
		require.NoError(t, err)
		exec := func(format string, args ...any) {
			_, err := db.Exec(fmt.Sprintf(format, args...))
			require.NoError(t, err)
		}
		missing := func() []string {
			var m *migrations.MissingError
			require.ErrorAs(t, migrations.Check(t.Context(), own), &m)
			require.ErrorContains(t, m, "migrate up")
			return m.Missing
		}
		tables := tablesOf(d)
		require.GreaterOrEqual(t, len(tables), 6)
		total := 0
		for table, columns := range tables {
			exec(`ALTER TABLE %s RENAME TO gone`, table)
			require.Equal(t, []string{"table " + table}, missing())
			exec(`ALTER TABLE gone RENAME TO %s`, table)
			for _, c := range columns {
				exec(`ALTER TABLE %s RENAME COLUMN %s TO gone`, table, c)
				require.Equal(t, []string{"column " + table + "." + c}, missing())
				exec(`ALTER TABLE %s RENAME COLUMN gone TO %s`, table, c)
				total++
			}
		}
		require.Greater(t, total, 50)
		require.NoError(t, migrations.Check(t.Context(), own))
	})
}

// tablesOf reads the tables and columns out of the SQL, in another way than Check.
func tablesOf(d migrations.Dialect) map[string][]string {
	table := regexp.MustCompile(`(?s)CREATE TABLE IF NOT EXISTS ([a-z_]+) \(\n(.*?)\n\)`)
	tables := map[string][]string{}
	for _, m := range migrations.All(d) {
		for _, t := range table.FindAllStringSubmatch(m.SQL, -1) {
			for line := range strings.Lines(t[2]) {
				word, _, _ := strings.Cut(strings.TrimSpace(line), " ")
				if word != "" && word == strings.ToLower(word) && !strings.HasPrefix(word, "--") {
					tables[t[1]] = append(tables[t[1]], word)
				}
			}
		}
	}
	return tables
}
