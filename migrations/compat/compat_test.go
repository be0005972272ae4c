package compat_test

import (
	"database/sql"
	"errors"
	"path/filepath"
	"testing"

	"github.com/golang-migrate/migrate/v4"
	"github.com/golang-migrate/migrate/v4/database"
	migratepgx "github.com/golang-migrate/migrate/v4/database/pgx/v5"
	migratesqlite "github.com/golang-migrate/migrate/v4/database/sqlite"
	"github.com/golang-migrate/migrate/v4/source/iofs"
	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite"

	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
	"github.com/twiceproof/twiceproof/migrations"
)

// open returns a handle on an empty database or schema; each call another handle.
func open(t *testing.T, d migrations.Dialect) func() *sql.DB {
	driver, dsn := "sqlite", "file:"+filepath.Join(t.TempDir(), "t.db")+"?_pragma=busy_timeout(5000)"
	if d == migrations.Postgres {
		driver, dsn = "pgx", devtest.PostgresSchema(t)
	}
	return func() *sql.DB {
		db, err := sql.Open(driver, dsn)
		require.NoError(t, err)
		t.Cleanup(func() { _ = db.Close() }) // golang-migrate closes it itself
		return db
	}
}

// tool applies everything and returns how many files that were.
type tool func(t *testing.T, db *sql.DB, d migrations.Dialect) int

func byGoose(t *testing.T, db *sql.DB, d migrations.Dialect) int {
	dialect := goose.DialectPostgres
	if d == migrations.SQLite {
		dialect = goose.DialectSQLite3
	}
	p, err := goose.NewProvider(dialect, db, migrations.FS(d))
	require.NoError(t, err)
	done, err := p.Up(t.Context())
	require.NoError(t, err)
	return len(done)
}

func byGolangMigrate(t *testing.T, db *sql.DB, d migrations.Dialect) int {
	src, err := iofs.New(migrations.FS(d), ".")
	require.NoError(t, err)
	var drv database.Driver
	if d == migrations.SQLite {
		drv, err = migratesqlite.WithInstance(db, &migratesqlite.Config{})
	} else {
		drv, err = migratepgx.WithInstance(db, &migratepgx.Config{})
	}
	require.NoError(t, err)
	m, err := migrate.NewWithInstance("iofs", src, d.String(), drv)
	require.NoError(t, err)
	defer m.Close()
	before, _, err := m.Version()
	if errors.Is(err, migrate.ErrNilVersion) {
		before, err = 0, nil
	}
	require.NoError(t, err)
	err = m.Up()
	if errors.Is(err, migrate.ErrNoChange) {
		return 0
	}
	require.NoError(t, err)
	after, dirty, err := m.Version()
	require.NoError(t, err)
	require.False(t, dirty)
	return int(after - before)
}

func TestOtherToolsApplyTheFiles(t *testing.T) {
	t.Parallel()
	for name, apply := range map[string]tool{"goose": byGoose, "golang-migrate": byGolangMigrate} {
		for _, d := range []migrations.Dialect{migrations.Postgres, migrations.SQLite} {
			t.Run(name+"/"+d.String(), func(t *testing.T) {
				t.Parallel()
				db := open(t, d)
				own := migrations.SQLDB(db(), d)
				require.Error(t, migrations.Check(t.Context(), own), "the database is empty")
				require.Equal(t, len(migrations.All(d)), apply(t, db(), d))
				require.NoError(t, migrations.Check(t.Context(), own))
				require.Zero(t, apply(t, db(), d), "the second time there is nothing to do")
				require.NoError(t, migrations.Check(t.Context(), own))

				// Changing over to Up: it finds the tables there and only writes down that they are.
				_, err := migrations.Up(t.Context(), own)
				require.NoError(t, err)
				require.NoError(t, migrations.Check(t.Context(), own))
				require.Zero(t, apply(t, db(), d))
			})
		}
	}
}

// And the other way round: a database that Up has made, taken over by another tool.
func TestOtherToolsTakeOverFromUp(t *testing.T) {
	t.Parallel()
	for name, apply := range map[string]tool{"goose": byGoose, "golang-migrate": byGolangMigrate} {
		for _, d := range []migrations.Dialect{migrations.Postgres, migrations.SQLite} {
			t.Run(name+"/"+d.String(), func(t *testing.T) {
				t.Parallel()
				db := open(t, d)
				own := migrations.SQLDB(db(), d)
				_, err := migrations.Up(t.Context(), own)
				require.NoError(t, err)
				apply(t, db(), d)
				require.NoError(t, migrations.Check(t.Context(), own))
			})
		}
	}
}
