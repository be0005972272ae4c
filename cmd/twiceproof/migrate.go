package main

import (
	"encoding/json"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/twiceproof/twiceproof/migrations"
)

func newMigrateCommand() *cobra.Command {
	var f databaseFlags
	c := &cobra.Command{
		Use:   "migrate",
		Short: "Create and check the tables",
		Example: `  twiceproof migrate up --database-url postgres://localhost/app
  twiceproof migrate check --sqlite app.db
  twiceproof migrate print --dialect postgres > twiceproof.sql`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	f.add(c)
	c.AddCommand(newMigrateUp(&f), newMigrateCheck(&f), newMigratePrint())
	return c
}

func newMigrateUp(f *databaseFlags) *cobra.Command {
	return &cobra.Command{Use: "up", Short: "Apply what is missing; safe to run at once from many places", Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			f.create = true
			db, d, err := f.open(cmd.Context())
			if err != nil {
				return err
			}
			defer db.Close()
			done, err := migrations.Up(cmd.Context(), migrations.SQLDB(db, d), f.options()...)
			if err != nil {
				return err
			}
			for _, m := range done {
				fmt.Fprintf(cmd.OutOrStdout(), "applied %04d_%s\n", m.Version, m.Name)
			}
			if len(done) == 0 {
				fmt.Fprintln(cmd.OutOrStdout(), "nothing to apply")
			}
			return nil
		}}
}

func newMigrateCheck(f *databaseFlags) *cobra.Command {
	var asJSON bool
	c := &cobra.Command{Use: "check", Short: "Say what is missing; exit code 4 when something is", Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			db, d, err := f.open(cmd.Context())
			if err != nil {
				return err
			}
			defer db.Close()
			err = migrations.Check(cmd.Context(), migrations.SQLDB(db, d), f.options()...)
			if asJSON {
				missing := []string{}
				var me *migrations.MissingError
				if errors.As(err, &me) {
					missing = me.Missing
				} else if err != nil {
					return err
				}
				if e := json.NewEncoder(cmd.OutOrStdout()).Encode(map[string]any{"missing": missing}); e != nil {
					return e
				}
			} else if err == nil {
				fmt.Fprintln(cmd.OutOrStdout(), "all tables are there")
			}
			return err
		}}
	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	return c
}

func newMigratePrint() *cobra.Command {
	var dialect string
	c := &cobra.Command{Use: "print", Short: "Print the SQL, for your own migration tool", Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			d := migrations.Postgres
			switch dialect {
			case "postgres":
			case "sqlite":
				d = migrations.SQLite
			default:
				return usageError{fmt.Errorf("--dialect %q: use postgres or sqlite", dialect)}
			}
			for _, m := range migrations.All(d) {
				fmt.Fprintf(cmd.OutOrStdout(), "-- %04d_%s\n%s\n", m.Version, m.Name, m.SQL)
			}
			return nil
		}}
	c.Flags().StringVar(&dialect, "dialect", "postgres", "postgres or sqlite")
	return c
}
