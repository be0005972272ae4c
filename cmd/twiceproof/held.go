package main

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/user"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode/utf8"

	"github.com/mattn/go-isatty"
	"github.com/spf13/cobra"

	"github.com/twiceproof/twiceproof/inbox"
	"github.com/twiceproof/twiceproof/internal/sqldb"
	"github.com/twiceproof/twiceproof/migrations"
)

func newHeldCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "held",
		Short: "Look at held messages, and replay, mend or discard them",
		Long: `Messages that could not be processed are kept in held_messages: to be retried, dead,
or waiting behind another one of their key. These commands work while consumers run.
Every change is one transaction, with a row in twiceproof_audit.`,
		Example: `  twiceproof held list --consumer billing --dead
  twiceproof held show 4711
  twiceproof held replay --consumer billing --class handler --dry-run
  twiceproof held discard 4711 --comment "test order" --yes`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	var db databaseFlags
	db.add(c)
	c.AddCommand(newHeldListCommand(&db), newHeldShowCommand(&db), newHeldReplayCommand(&db), newHeldDiscardCommand(&db),
		newHeldExportCommand(&db), newHeldEditCommand(&db))
	return c
}

// withHeld runs fn on the operator of the database that the flags name.
func withHeld(ctx context.Context, f *databaseFlags, fn func(op *inbox.Operator) error) error {
	db, d, err := f.open(ctx)
	if err != nil {
		return err
	}
	defer db.Close()
	if err := migrations.Check(ctx, migrations.SQLDB(db, d), f.options()...); err != nil {
		return err
	}
	if d == sqldb.SQLite {
		return fn(inbox.SQLite(db).Operator())
	}
	var opts []inbox.Option
	if f.schema != "" {
		opts = append(opts, inbox.Schema(f.schema))
	}
	return fn(inbox.PostgresDB(db, opts...).Operator())
}

// filterFlags choose held messages.
type filterFlags struct {
	consumer, reason, class, id, key string
	dead, waiting                    bool
	older, newer                     time.Duration
	keySet                           func() bool
}

func (f *filterFlags) add(c *cobra.Command) {
	fs := c.Flags()
	fs.StringVar(&f.consumer, "consumer", "", "of this consumer")
	fs.StringVar(&f.reason, "reason", "", "held for this reason: retry, behind, dead, conflict, no-id, bad-id, unknown-type, tx-ended, crash-loop, too-old")
	fs.StringVar(&f.class, "class", "", "whose last error is of this class: handler, panic, timeout, permanent, …")
	fs.StringVar(&f.id, "id", "", "with this message ID")
	fs.StringVar(&f.key, "key", "", "with this key (\"\": without one)")
	fs.BoolVar(&f.dead, "dead", false, "dead ones only")
	fs.BoolVar(&f.waiting, "waiting", false, "those only that are not dead")
	fs.DurationVar(&f.older, "older-than", 0, "held for at least so long, e.g. 1h")
	fs.DurationVar(&f.newer, "newer-than", 0, "held for less than that")
	f.keySet = func() bool { return fs.Changed("key") }
}

// filter combines the flags with numbers given as arguments.
func (f *filterFlags) filter(args []string) (inbox.HeldFilter, error) {
	h := inbox.HeldFilter{Consumer: f.consumer, Reason: f.reason, Class: f.class, ID: f.id, OlderThan: f.older, NewerThan: f.newer}
	if f.keySet() {
		h.Key = &f.key
	}
	switch {
	case f.dead && f.waiting:
		return h, usageError{errors.New("--dead and --waiting exclude each other")}
	case f.older < 0 || f.newer < 0:
		return h, usageError{errors.New("--older-than and --newer-than must not be negative")}
	case f.dead || f.waiting:
		h.Dead = &f.dead
	}
	var err error
	h.Seqs, err = numbers(args)
	return h, err
}

// empty: nothing was chosen, which means everything.
func (f *filterFlags) empty(args []string) bool {
	return len(args) == 0 && !f.keySet() && f.consumer == "" && f.reason == "" && f.class == "" && f.id == "" && !f.dead && !f.waiting && f.older == 0 && f.newer == 0
}

// numbers reads arguments that are numbers of rows; nil if there are none.
func numbers(args []string) ([]int64, error) {
	var ns []int64
	seen := map[int64]bool{}
	for _, a := range args {
		n, err := strconv.ParseInt(a, 10, 64)
		if err != nil || n <= 0 {
			return nil, usageError{fmt.Errorf("%q is no number of a message: take it from the first column of `list`", a)}
		}
		if !seen[n] {
			ns = append(ns, n)
		}
		seen[n] = true
	}
	return ns, nil
}

func newHeldListCommand(db *databaseFlags) *cobra.Command {
	var f filterFlags
	var asJSON, groups bool
	var limit int
	var after int64
	c := &cobra.Command{
		Use:   "list",
		Short: "List held messages, or groups of those that failed alike",
		Example: `  twiceproof held list --groups
  twiceproof held list --consumer billing --dead --older-than 1h
  twiceproof held list --key customer-17 --json`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			filter, err := f.filter(nil)
			if err != nil {
				return err
			}
			if limit < 1 {
				return usageError{errors.New("--limit must be positive")}
			}
			filter.Max, filter.After = limit, after
			return withHeld(cmd.Context(), db, func(op *inbox.Operator) error {
				if groups {
					gs, err := op.Groups(cmd.Context(), filter)
					if err != nil {
						return err
					}
					return printGroups(cmd.OutOrStdout(), gs, asJSON)
				}
				hs, err := op.List(cmd.Context(), filter)
				if err != nil {
					return err
				}
				return printHeld(cmd.OutOrStdout(), hs, asJSON, limit)
			})
		},
	}
	f.add(c)
	c.Flags().BoolVar(&groups, "groups", false, "count by consumer, reason and error")
	c.Flags().IntVar(&limit, "limit", 100, "at most so many")
	c.Flags().Int64Var(&after, "after", 0, "go on behind this number")
	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON array")
	return c
}

func printGroups(out io.Writer, gs []inbox.HeldGroup, asJSON bool) error {
	type group struct {
		Consumer string  `json:"consumer"`
		Reason   string  `json:"reason"`
		Class    string  `json:"class"`
		Error    string  `json:"error"`
		Dead     bool    `json:"dead"`
		Count    int     `json:"count"`
		Oldest   float64 `json:"oldest_seconds"`
		First    int64   `json:"first"`
	}
	if asJSON {
		js := make([]group, 0, len(gs))
		for _, g := range gs {
			js = append(js, group{g.Consumer, g.Reason, g.Class, g.Error, g.Dead, g.Count, g.Oldest.Seconds(), g.First})
		}
		return json.NewEncoder(out).Encode(js)
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "COUNT\tCONSUMER\tREASON\tCLASS\tOLDEST\tFIRST\tERROR\tWHAT TO DO")
	for _, g := range gs {
		fmt.Fprintf(w, "%d\t%s\t%s\t%s\t%s\t%d\t%s\t%s\n", g.Count, g.Consumer, g.Reason, g.Class, age(g.Oldest.Seconds()), g.First, firstLine(g.Error),
			whatToDo(heldGroup{Reason: g.Reason, Dead: g.Dead}))
	}
	return w.Flush()
}

func state(h inbox.HeldMessage) string {
	switch {
	case h.Dead:
		return "dead"
	case h.Waiting:
		return "waits its turn"
	case h.DueIn <= 0:
		return "due"
	}
	return "due in " + age(h.DueIn.Seconds())
}

func printHeld(out io.Writer, hs []inbox.HeldMessage, asJSON bool, limit int) error {
	if asJSON {
		js := make([]heldJSON, 0, len(hs))
		for _, h := range hs {
			js = append(js, jsonOf(h))
		}
		return json.NewEncoder(out).Encode(js)
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "NO\tCONSUMER\tREASON\tSTATE\tFOR\tATTEMPTS\tID\tKEY\tTYPE\tERROR")
	for _, h := range hs {
		fmt.Fprintf(w, "%d\t%s\t%s\t%s\t%s\t%d\t%s\t%s\t%s\t%s\n", h.Seq, h.Consumer, h.Reason, state(h), age(h.HeldFor.Seconds()), h.Attempts,
			shown(h.Message.ID), shown(h.Message.Key), shown(h.Message.Type), firstLine(h.Last.Text))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if len(hs) == limit {
		fmt.Fprintf(out, "… and perhaps more: --after %d\n", hs[len(hs)-1].Seq)
	}
	return nil
}

// shown is text for a terminal: nothing of a message may steer it.
func shown(s string) string {
	if q := strconv.Quote(s); q != `"`+s+`"` || strings.Contains(s, " ") {
		s = q
	}
	return firstLine(s)
}

func newHeldShowCommand(db *databaseFlags) *cobra.Command {
	var asJSON, payload bool
	c := &cobra.Command{
		Use:     "show NO",
		Short:   "Show one held message whole, with its errors",
		Example: "  twiceproof held show 4711\n  twiceproof held show 4711 --json\n  twiceproof held show 4711 --payload > body.json",
		Args:    oneArg,
		RunE: func(cmd *cobra.Command, args []string) error {
			seqs, err := numbers(args)
			if err != nil {
				return err
			}
			if asJSON && payload {
				return usageError{errors.New("--json and --payload exclude each other")}
			}
			return withHeld(cmd.Context(), db, func(op *inbox.Operator) error {
				h, err := op.Get(cmd.Context(), seqs[0])
				if err != nil {
					return err
				}
				switch {
				case payload:
					_, err := cmd.OutOrStdout().Write(h.Message.Payload)
					return err
				case asJSON:
					return json.NewEncoder(cmd.OutOrStdout()).Encode(jsonOf(h))
				}
				return show(cmd.OutOrStdout(), h)
			})
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON object, with everything that is no text in base64")
	c.Flags().BoolVar(&payload, "payload", false, "write the payload alone, byte for byte")
	return c
}

func oneArg(c *cobra.Command, args []string) error {
	if err := cobra.ExactArgs(1)(c, args); err != nil {
		return usageError{err}
	}
	return nil
}

func show(out io.Writer, h inbox.HeldMessage) error {
	m := h.Message
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	row := func(name, value string) { fmt.Fprintf(w, "%s\t%s\n", name, value) }
	row("number", strconv.FormatInt(h.Seq, 10))
	row("consumer", h.Consumer)
	row("reason", h.Reason+" ("+state(h)+")")
	row("what to do", whatToDo(heldGroup{Reason: h.Reason, Dead: h.Dead}))
	row("held for", age(h.HeldFor.Seconds()))
	row("attempts", fmt.Sprintf("%d failed, %d begun as a held message", h.Attempts, h.Starts))
	row("from", shown(h.Coordinates))
	if h.EditedFrom != "" {
		row("replaces", shown(h.EditedFrom))
	}
	row("id", shown(m.ID))
	row("topic", shown(m.Topic))
	row("key", shown(m.Key))
	row("type", shown(m.Type))
	row("content type", shown(m.ContentType))
	if !m.Time.IsZero() {
		row("produced at", m.Time.Format(time.RFC3339Nano))
	}
	row("fingerprint", fmt.Sprintf("%x", h.Fingerprint))
	if h.ProcessedFingerprint != nil {
		row("processed", fmt.Sprintf("%x was processed under this id", h.ProcessedFingerprint))
	}
	for _, hd := range m.Headers {
		row("header "+shown(hd.Key), shown(string(hd.Value)))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	for _, f := range []struct {
		name string
		inbox.Failure
	}{{"first error", h.First}, {"last error", h.Last}} {
		if f.Failure != (inbox.Failure{}) {
			fmt.Fprintf(out, "\n%s (%s):\n%s\n", f.name, f.Class, indent(f.Text))
		}
	}
	if h.Last.Stack != "" {
		fmt.Fprintf(out, "\nstack:\n%s\n", indent(h.Last.Stack))
	}
	switch {
	case m.Payload == nil:
		fmt.Fprintln(out, "\npayload: none (a tombstone)")
	case utf8.Valid(m.Payload):
		fmt.Fprintf(out, "\npayload, %d bytes:\n%s\n", len(m.Payload), indent(string(m.Payload)))
	default:
		fmt.Fprintf(out, "\npayload, %d bytes, base64:\n%s\n", len(m.Payload), indent(base64.StdEncoding.EncodeToString(m.Payload)))
	}
	return nil
}

// indent indents lines, and keeps what could steer a terminal from it.
func indent(s string) string {
	var b strings.Builder
	for line := range strings.SplitSeq(s, "\n") {
		b.WriteString("  ")
		for _, r := range line {
			if r == '\t' || strconv.IsPrint(r) {
				b.WriteRune(r)
			} else {
				fmt.Fprintf(&b, "\\x%02x", r)
			}
		}
		b.WriteByte('\n')
	}
	return strings.TrimRight(b.String(), "\n")
}

// actor is who runs the command, for the audit.
func actor() string {
	if u, err := user.Current(); err == nil && u.Username != "" {
		if host, err := os.Hostname(); err == nil {
			return u.Username + "@" + host
		}
		return u.Username
	}
	return "twiceproof"
}

// confirm asks on a terminal, and demands --yes elsewhere.
func confirm(cmd *cobra.Command, yes bool, what string) error {
	if yes {
		return nil
	}
	in, ok := cmd.InOrStdin().(*os.File)
	if !ok || !isatty.IsTerminal(in.Fd()) {
		return usageError{fmt.Errorf("%s: add --yes, or --dry-run to see what would be done", what)}
	}
	fmt.Fprintf(cmd.ErrOrStderr(), "%s? [y/N] ", what)
	answered := make(chan string, 1)
	go func() { // a terminal that is read from cannot be told to stop: it ends with the process
		var answer string
		_, _ = fmt.Fscanln(in, &answer) // no answer is no
		answered <- answer
	}()
	select {
	case <-cmd.Context().Done():
		return errInterrupted
	case answer := <-answered:
		if strings.EqualFold(answer, "y") || strings.EqualFold(answer, "yes") {
			return nil
		}
		return errors.New("not confirmed; nothing is changed")
	}
}

func newHeldExportCommand(db *databaseFlags) *cobra.Command {
	var f filterFlags
	c := &cobra.Command{
		Use:   "export",
		Short: "Write held messages as JSON lines, each whole",
		Long: `Writes one JSON object a line, in the order in which the messages were held. What is no
text is in the fields that end in _base64. A payload that is null and has no
payload_base64 is a tombstone.`,
		Example: "  twiceproof held export --consumer billing --dead > dead.jsonl",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			filter, err := f.filter(args)
			if err != nil {
				return err
			}
			filter.Max = 500
			return withHeld(cmd.Context(), db, func(op *inbox.Operator) error {
				enc := json.NewEncoder(cmd.OutOrStdout())
				for {
					hs, err := op.List(cmd.Context(), filter)
					if err != nil {
						return err
					}
					for _, h := range hs {
						if err := enc.Encode(jsonOf(h)); err != nil {
							return err
						}
						filter.After = h.Seq
					}
					if len(hs) < filter.Max {
						return nil
					}
				}
			})
		},
	}
	f.add(c)
	return c
}
