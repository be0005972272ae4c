package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"

	_ "github.com/jackc/pgx/v5/stdlib" // PostgreSQL through database/sql
	"github.com/spf13/cobra"

	"github.com/twiceproof/twiceproof/internal/sqldb"
	"github.com/twiceproof/twiceproof/migrations"
)

// databaseFlags say which database a command works on.
type databaseFlags struct {
	url, sqlite, schema string
	create              bool // an SQLite file that is not there is made
}

func (f *databaseFlags) add(c *cobra.Command) {
	c.PersistentFlags().StringVar(&f.url, "database-url", "", "PostgreSQL URL (default: DATABASE_URL)")
	c.PersistentFlags().StringVar(&f.sqlite, "sqlite", "", "path of an SQLite database, instead")
	c.PersistentFlags().StringVar(&f.schema, "schema", "", "PostgreSQL schema of the tables (default: the search_path)")
}

// open connects to the database.
func (f *databaseFlags) open(ctx context.Context) (*sql.DB, sqldb.Dialect, error) {
	if f.sqlite != "" {
		if f.schema != "" {
			return nil, 0, usageError{errors.New("--schema is for PostgreSQL: SQLite has no schemas")}
		}
		if _, err := os.Stat(f.sqlite); err != nil && !f.create {
			return nil, 0, fmt.Errorf("check the path of --sqlite (`migrate up` makes a new database): %w", err)
		}
		db, err := sql.Open("sqlite", "file:"+f.sqlite+"?_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)&_txlock=immediate")
		if err != nil {
			return nil, 0, err
		}
		db.SetMaxOpenConns(1)
		return db, sqldb.SQLite, nil
	}
	url := f.url
	if url == "" {
		url = os.Getenv("DATABASE_URL")
	}
	if url == "" {
		return nil, 0, usageError{errors.New("no database: give --database-url or --sqlite, or set DATABASE_URL")}
	}
	db, err := sql.Open("pgx", url)
	if err == nil {
		err = db.PingContext(ctx)
	}
	if err != nil {
		return nil, 0, fmt.Errorf("connect to the database: %w", err)
	}
	return db, sqldb.Postgres, nil
}

func (f *databaseFlags) options() []migrations.Option {
	if f.schema == "" {
		return nil
	}
	return []migrations.Option{migrations.Schema(f.schema)}
}
