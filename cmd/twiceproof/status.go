package main

import (
	"encoding/json"
	"fmt"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/twiceproof/twiceproof/internal/sqldb"
	"github.com/twiceproof/twiceproof/migrations"
)

type consumerStatus struct {
	Name      string `json:"name"`
	Done      int    `json:"done"`
	Discarded int    `json:"discarded"`
	Held      int    `json:"held"`
	Dead      int    `json:"dead"`
}

type statusReport struct {
	Consumers     []consumerStatus `json:"consumers"`
	OutboxWaiting int              `json:"outbox_waiting"`
	OutboxParked  int              `json:"outbox_parked"`
	Relays        int              `json:"relays"`
}

const (
	sqlConsumers = `SELECT c.name,
		(SELECT count(*) FROM {s}processed_messages p WHERE p.consumer_id = c.id AND p.state = 0),
		(SELECT count(*) FROM {s}processed_messages p WHERE p.consumer_id = c.id AND p.state = 2),
		(SELECT count(*) FROM {s}held_messages h WHERE h.consumer_id = c.id),
		(SELECT count(*) FROM {s}held_messages h WHERE h.consumer_id = c.id AND h.dead)
		FROM {s}inbox_consumers c ORDER BY c.name`
	sqlOutbox = `SELECT (SELECT count(*) FROM {s}outbox_messages WHERE published_at IS NULL AND NOT parked),
		(SELECT count(*) FROM {s}outbox_messages WHERE parked),
		(SELECT count(*) FROM {s}outbox_relays WHERE {age:seen_at} < 60000000)`
)

func newStatusCommand() *cobra.Command {
	var f databaseFlags
	var asJSON bool
	c := &cobra.Command{
		Use:     "status",
		Short:   "Count what is done, held and dead, and what waits in the outbox",
		Example: "  twiceproof status --database-url postgres://localhost/app\n  twiceproof status --sqlite app.db --json",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx := cmd.Context()
			db, d, err := f.open(ctx)
			if err != nil {
				return err
			}
			defer db.Close()
			if err := migrations.Check(ctx, migrations.SQLDB(db, d), f.options()...); err != nil {
				return err
			}
			q := sqldb.SQL(db)
			r := statusReport{Consumers: []consumerStatus{}}
			err = q.Query(ctx, d.SQL(sqlConsumers, f.schema), nil, func(scan func(...any) error) error {
				var s consumerStatus
				err := scan(&s.Name, &s.Done, &s.Discarded, &s.Held, &s.Dead)
				r.Consumers = append(r.Consumers, s)
				return err
			})
			if err == nil {
				_, err = sqldb.QueryRow(ctx, q, d.SQL(sqlOutbox, f.schema), nil, &r.OutboxWaiting, &r.OutboxParked, &r.Relays)
			}
			if err != nil {
				return fmt.Errorf("read the tables: %w", err)
			}
			if asJSON {
				return json.NewEncoder(cmd.OutOrStdout()).Encode(r)
			}
			w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
			fmt.Fprintln(w, "CONSUMER\tDONE\tDISCARDED\tHELD\tDEAD")
			for _, s := range r.Consumers {
				fmt.Fprintf(w, "%s\t%d\t%d\t%d\t%d\n", s.Name, s.Done, s.Discarded, s.Held, s.Dead)
			}
			if err := w.Flush(); err != nil {
				return err
			}
			fmt.Fprintf(cmd.OutOrStdout(), "\noutbox: %d waiting, %d parked; %d relays alive\n", r.OutboxWaiting, r.OutboxParked, r.Relays)
			return nil
		},
	}
	f.add(c)
	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	return c
}
