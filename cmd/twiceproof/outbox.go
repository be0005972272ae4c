package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/twiceproof/twiceproof/internal/sqldb"
	"github.com/twiceproof/twiceproof/migrations"
	"github.com/twiceproof/twiceproof/outbox"
)

func newOutboxCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "outbox",
		Short: "Look at parked messages of the outbox, and retry or discard them",
		Long: `A message that the broker refuses for good, or too often, is parked and blocks its key.
These commands work while relays run.`,
		Example: "  twiceproof outbox list\n  twiceproof outbox retry 17 --yes",
		Args:    noArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	var db databaseFlags
	db.add(c)
	c.AddCommand(newOutboxListCommand(&db), newOutboxShowCommand(&db),
		newOutboxChangeCommand(&db, "retry", "Publish parked messages again, from their first attempt", (*outbox.Operator).Retry),
		newOutboxChangeCommand(&db, "discard", "Delete parked messages unpublished", (*outbox.Operator).Discard))
	return c
}

func withOutbox(ctx context.Context, f *databaseFlags, fn func(op *outbox.Operator) error) error {
	db, d, err := f.open(ctx)
	if err != nil {
		return err
	}
	defer db.Close()
	if err := migrations.Check(ctx, migrations.SQLDB(db, d), f.options()...); err != nil {
		return err
	}
	if d == sqldb.SQLite {
		return fn(outbox.SQLite(db).Operator())
	}
	var opts []outbox.Option
	if f.schema != "" {
		opts = append(opts, outbox.Schema(f.schema))
	}
	return fn(outbox.PostgresDB(db, opts...).Operator())
}

// parkedFlags choose parked messages.
type parkedFlags struct {
	topic, id string
	older     time.Duration
}

func (f *parkedFlags) add(c *cobra.Command) {
	c.Flags().StringVar(&f.topic, "topic", "", "to this topic")
	c.Flags().StringVar(&f.id, "id", "", "with this message ID")
	c.Flags().DurationVar(&f.older, "older-than", 0, "enqueued at least so long ago, e.g. 1h")
}

func (f *parkedFlags) filter(args []string) (outbox.ParkedFilter, error) {
	seqs, err := numbers(args)
	return outbox.ParkedFilter{Topic: f.topic, ID: f.id, OlderThan: f.older, Seqs: seqs}, err
}

type parkedJSON struct {
	Seq      int64       `json:"seq"`
	Attempts int         `json:"attempts"`
	Age      float64     `json:"age_seconds"`
	Behind   int         `json:"behind"`
	Error    string      `json:"error"`
	Message  messageJSON `json:"message"`
}

func parkedOf(p outbox.ParkedMessage) parkedJSON {
	return parkedJSON{p.Seq, p.Attempts, p.Age.Seconds(), p.Behind, p.Error, messageOf(p.Message)}
}

func newOutboxListCommand(db *databaseFlags) *cobra.Command {
	var f parkedFlags
	var asJSON bool
	var limit int
	c := &cobra.Command{
		Use:     "list",
		Short:   "List parked messages",
		Example: "  twiceproof outbox list --topic orders --json",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if limit < 1 {
				return usageError{errors.New("--limit must be positive")}
			}
			filter, err := f.filter(nil)
			if err != nil {
				return err
			}
			filter.Max = limit
			return withOutbox(cmd.Context(), db, func(op *outbox.Operator) error {
				ps, err := op.List(cmd.Context(), filter)
				if err != nil {
					return err
				}
				return printParked(cmd.OutOrStdout(), ps, asJSON)
			})
		},
	}
	f.add(c)
	c.Flags().IntVar(&limit, "limit", 100, "at most so many")
	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON array")
	return c
}

func printParked(out io.Writer, ps []outbox.ParkedMessage, asJSON bool) error {
	if asJSON {
		js := make([]parkedJSON, 0, len(ps))
		for _, p := range ps {
			js = append(js, parkedOf(p))
		}
		return json.NewEncoder(out).Encode(js)
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "NO\tTOPIC\tID\tKEY\tAGE\tATTEMPTS\tBEHIND\tERROR")
	for _, p := range ps {
		fmt.Fprintf(w, "%d\t%s\t%s\t%s\t%s\t%d\t%d\t%s\n", p.Seq, shown(p.Message.Topic), shown(p.Message.ID), shown(p.Message.Key), age(p.Age.Seconds()), p.Attempts, p.Behind, firstLine(p.Error))
	}
	return w.Flush()
}

func newOutboxShowCommand(db *databaseFlags) *cobra.Command {
	c := &cobra.Command{
		Use:     "show NO",
		Short:   "Show one parked message whole, as JSON",
		Example: "  twiceproof outbox show 17",
		Args:    oneArg,
		RunE: func(cmd *cobra.Command, args []string) error {
			seqs, err := numbers(args)
			if err != nil {
				return err
			}
			return withOutbox(cmd.Context(), db, func(op *outbox.Operator) error {
				p, err := op.Get(cmd.Context(), seqs[0])
				if err != nil {
					return err
				}
				enc := json.NewEncoder(cmd.OutOrStdout())
				enc.SetIndent("", "  ")
				return enc.Encode(parkedOf(p))
			})
		},
	}
	return c
}

func newOutboxChangeCommand(db *databaseFlags, action, short string, change func(op *outbox.Operator, ctx context.Context, seq int64, actor, reason string) error) *cobra.Command {
	var f parkedFlags
	var cf changeFlags
	c := &cobra.Command{
		Use:     action + " [NO ...]",
		Short:   short,
		Example: fmt.Sprintf("  twiceproof outbox %s 17 --comment \"the limit is raised\" --yes\n  twiceproof outbox %[1]s --topic orders --dry-run", action),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 && f == (parkedFlags{}) {
				return usageError{errors.New("say which: numbers of messages, or flags such as --topic")}
			}
			if action == "discard" && cf.reason == "" {
				return usageError{errors.New("say why: --comment")}
			}
			filter, err := f.filter(args)
			if err != nil {
				return err
			}
			return withOutbox(cmd.Context(), db, func(op *outbox.Operator) error {
				ps, err := op.List(cmd.Context(), filter)
				switch {
				case err != nil:
					return err
				case filter.Seqs != nil && len(ps) < len(filter.Seqs):
					return fmt.Errorf("only %d of %d: %w; nothing is changed", len(ps), len(filter.Seqs), outbox.ErrNotParked)
				case len(ps) == 0:
					return errNothing
				}
				r := changed{Action: action, DryRun: cf.dryRun, Chosen: len(ps)}
				if cf.dryRun {
					return r.print(cmd.OutOrStdout(), cf.asJSON)
				}
				if err := confirm(cmd, cf.yes, fmt.Sprintf("%s %d messages", action, len(ps))); err != nil {
					return err
				}
				for i, p := range ps {
					err := cmd.Context().Err()
					if err == nil {
						err = r.count(change(op, context.WithoutCancel(cmd.Context()), p.Seq, actor(), cf.reason))
					}
					if err != nil {
						r.Left = len(ps) - i
						return errors.Join(interrupted(err), r.print(cmd.OutOrStdout(), cf.asJSON))
					}
				}
				return r.print(cmd.OutOrStdout(), cf.asJSON)
			})
		},
	}
	f.add(c)
	cf.add(c)
	return c
}
