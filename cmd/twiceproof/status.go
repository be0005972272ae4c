package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/twiceproof/twiceproof/inbox"
	"github.com/twiceproof/twiceproof/internal/sqldb"
	"github.com/twiceproof/twiceproof/migrations"
)

// consumerStatus counts one consumer's messages.
type consumerStatus struct {
	Name      string  `json:"name"`
	Done      int     `json:"done"`
	Discarded int     `json:"discarded"`
	Held      int     `json:"held"`
	Dead      int     `json:"dead"`
	Due       int     `json:"due"`
	OldestDue float64 `json:"oldest_due_seconds"` // how long the first due message has been due
}

// heldGroup is held messages of one consumer with one reason and one error.
type heldGroup struct {
	Consumer string  `json:"consumer"`
	Reason   string  `json:"reason"`
	Dead     bool    `json:"dead"`
	Error    string  `json:"error"`
	Count    int     `json:"count"`
	Oldest   float64 `json:"oldest_seconds"`
	Example  string  `json:"example_id"`
}

// parkedGroup is parked outbox messages with one error.
type parkedGroup struct {
	Topic   string `json:"topic"`
	Error   string `json:"error"`
	Count   int    `json:"count"`
	Example string `json:"example_id"`
}

type outboxStatus struct {
	Waiting int           `json:"waiting"`
	Oldest  float64       `json:"oldest_seconds"` // age of the first waiting message
	Parked  int           `json:"parked"`
	Relays  int           `json:"relays"` // alive
	Groups  []parkedGroup `json:"parked_groups"`
}

type statusReport struct {
	Consumers []consumerStatus `json:"consumers"`
	Held      []heldGroup      `json:"held_groups"` // the 50 largest
	Outbox    outboxStatus     `json:"outbox"`
}

const (
	sqlConsumers = `SELECT c.name,
		(SELECT count(*) FROM {s}processed_messages p WHERE p.consumer_id = c.id AND p.state = 0),
		(SELECT count(*) FROM {s}processed_messages p WHERE p.consumer_id = c.id AND p.state = 2),
		(SELECT count(*) FROM {s}held_messages h WHERE h.consumer_id = c.id),
		(SELECT count(*) FROM {s}held_messages h WHERE h.consumer_id = c.id AND h.dead),
		(SELECT count(*) FROM {s}held_messages h WHERE h.consumer_id = c.id AND h.due_at <= {now}),
		coalesce((SELECT max({age:h.due_at}) FROM {s}held_messages h WHERE h.consumer_id = c.id AND h.due_at <= {now}), 0)
		FROM {s}inbox_consumers c ORDER BY c.name`
	sqlHeldGroups = `SELECT c.name, h.reason, h.dead, coalesce(substr(h.last_error, 1, 200), ''), count(*), max({age:h.held_at}), coalesce(min(h.message_id), '')
		FROM {s}held_messages h JOIN {s}inbox_consumers c ON c.id = h.consumer_id
		GROUP BY c.name, h.reason, h.dead, coalesce(substr(h.last_error, 1, 200), '') ORDER BY count(*) DESC, c.name, h.reason LIMIT 50`
	sqlOutbox = `SELECT (SELECT count(*) FROM {s}outbox_messages WHERE published_at IS NULL AND NOT parked),
		coalesce((SELECT max({age:created_at}) FROM {s}outbox_messages WHERE published_at IS NULL AND NOT parked), 0),
		(SELECT count(*) FROM {s}outbox_messages WHERE parked),
		(SELECT count(*) FROM {s}outbox_relays WHERE until > {now})`
	sqlParkedGroups = `SELECT topic, coalesce(substr(last_error, 1, 200), ''), count(*), min(message_id) FROM {s}outbox_messages
		WHERE parked GROUP BY topic, coalesce(substr(last_error, 1, 200), '') ORDER BY count(*) DESC LIMIT 20`
)

func newStatusCommand() *cobra.Command {
	var f databaseFlags
	var asJSON bool
	c := &cobra.Command{
		Use:   "status",
		Short: "Count what is done, held and dead, and what waits in the outbox, with the reasons",
		Example: "  twiceproof status --database-url postgres://localhost/app\n" +
			"  twiceproof status --sqlite app.db --json",
		Args: noArgs,
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
			r, err := readStatus(ctx, sqldb.SQL(db), d, f.schema)
			if err != nil {
				return fmt.Errorf("read the tables: %w", err)
			}
			if asJSON {
				return json.NewEncoder(cmd.OutOrStdout()).Encode(r)
			}
			return r.print(cmd.OutOrStdout())
		},
	}
	f.add(c)
	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	return c
}

func seconds(us int64) float64 { return (time.Duration(us) * time.Microsecond).Seconds() }

func readStatus(ctx context.Context, q sqldb.Q, d sqldb.Dialect, schema string) (r statusReport, err error) {
	r.Consumers, r.Held, r.Outbox.Groups = []consumerStatus{}, []heldGroup{}, []parkedGroup{}
	err = q.Query(ctx, d.SQL(sqlConsumers, schema), nil, func(scan func(...any) error) error {
		var s consumerStatus
		var oldest int64
		err := scan(&s.Name, &s.Done, &s.Discarded, &s.Held, &s.Dead, &s.Due, &oldest)
		s.OldestDue = seconds(oldest)
		r.Consumers = append(r.Consumers, s)
		return err
	})
	if err != nil {
		return r, err
	}
	err = q.Query(ctx, d.SQL(sqlHeldGroups, schema), nil, func(scan func(...any) error) error {
		var g heldGroup
		var oldest int64
		err := scan(&g.Consumer, &g.Reason, &g.Dead, &g.Error, &g.Count, &oldest, &g.Example)
		g.Oldest = seconds(oldest)
		r.Held = append(r.Held, g)
		return err
	})
	if err != nil {
		return r, err
	}
	var oldest int64
	if _, err := sqldb.QueryRow(ctx, q, d.SQL(sqlOutbox, schema), nil, &r.Outbox.Waiting, &oldest, &r.Outbox.Parked, &r.Outbox.Relays); err != nil {
		return r, err
	}
	r.Outbox.Oldest = seconds(oldest)
	err = q.Query(ctx, d.SQL(sqlParkedGroups, schema), nil, func(scan func(...any) error) error {
		var g parkedGroup
		var topic []byte
		err := scan(&topic, &g.Error, &g.Count, &g.Example)
		g.Topic = strings.ToValidUTF8(string(topic), "\uFFFD")
		r.Outbox.Groups = append(r.Outbox.Groups, g)
		return err
	})
	return r, err
}

// whatToDo says what a reason means for the person who reads it at night.
func whatToDo(g heldGroup) string {
	switch {
	case g.Reason == inbox.ReasonBehind:
		return "waits for an earlier message of its key"
	case !g.Dead && g.Reason == inbox.ReasonUnknownType:
		return "runs when an instance that knows its type is deployed"
	case !g.Dead:
		return "runs again by itself"
	case g.Reason == inbox.ReasonConflict:
		return "two contents under one id: find out which is right; nothing waits for it"
	case g.Reason == inbox.ReasonNoID, g.Reason == inbox.ReasonBadID:
		return "mend the producer; nothing waits for it"
	case g.Reason == inbox.ReasonTooOld:
		return "older than what the inbox remembers: replay it if it was never processed, else discard it"
	case g.Reason == inbox.ReasonTooOld:
		return "older than the inbox remembers: look for its effect, then replay or discard"
	case g.Reason == inbox.ReasonTxEnded:
		return "the handler ends its transaction itself: mend it, check what it wrote, then replay or discard"
	case g.Reason == inbox.ReasonCrashLoop:
		return "its runs end with the process: mend the handler, then replay"
	}
	return "mend the cause, then replay or discard; its key waits, unless AfterDead is Continue"
}

func age(seconds float64) string {
	d := time.Duration(seconds * float64(time.Second))
	if d >= time.Minute {
		return d.Round(time.Second).String()
	}
	return d.Round(10 * time.Millisecond).String()
}

// firstLine is the beginning of a text, without anything that could steer a terminal.
func firstLine(s string) string {
	s, _, _ = strings.Cut(s, "\n")
	s = strings.Map(func(r rune) rune {
		if strconv.IsPrint(r) {
			return r
		}
		return ' '
	}, s)
	if r := []rune(s); len(r) > 80 {
		s = string(r[:79]) + "…"
	}
	return s
}

func (r statusReport) print(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "CONSUMER\tDONE\tDISCARDED\tHELD\tDEAD\tDUE\tOLDEST DUE")
	for _, s := range r.Consumers {
		fmt.Fprintf(w, "%s\t%d\t%d\t%d\t%d\t%d\t%s\n", s.Name, s.Done, s.Discarded, s.Held, s.Dead, s.Due, age(s.OldestDue))
	}
	if len(r.Held) > 0 {
		fmt.Fprintln(w, "\nHELD\tREASON\tCOUNT\tOLDEST\tEXAMPLE\tERROR\tWHAT TO DO")
		for _, g := range r.Held {
			fmt.Fprintf(w, "%s\t%s\t%d\t%s\t%s\t%s\t%s\n", g.Consumer, g.Reason, g.Count, age(g.Oldest), g.Example, firstLine(g.Error), whatToDo(g))
		}
	}
	if err := w.Flush(); err != nil {
		return err
	}
	fmt.Fprintf(out, "\noutbox: %d waiting (the first for %s), %d parked; %d relays alive\n", r.Outbox.Waiting, age(r.Outbox.Oldest), r.Outbox.Parked, r.Outbox.Relays)
	for _, g := range r.Outbox.Groups {
		fmt.Fprintf(out, "  parked: %d for %s, such as %s: %s\n", g.Count, g.Topic, g.Example, firstLine(g.Error))
	}
	if r.Outbox.Waiting > 0 && r.Outbox.Relays == 0 {
		fmt.Fprintln(out, "  no relay is alive: start one, or nothing is published")
	}
	return nil
}
