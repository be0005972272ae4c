package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/mattn/go-isatty"
	"github.com/schollz/progressbar/v3"
	"github.com/spf13/cobra"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/inbox"
	"github.com/twiceproof/twiceproof/outbox"
)

// changeFlags are common to commands that change rows.
type changeFlags struct {
	reason              string
	yes, dryRun, asJSON bool
}

func (f *changeFlags) add(c *cobra.Command) {
	c.Flags().StringVar(&f.reason, "comment", "", "why, for the audit")
	c.Flags().BoolVar(&f.yes, "yes", false, "do not ask")
	c.Flags().BoolVar(&f.dryRun, "dry-run", false, "say what would be done, and do nothing")
	c.Flags().BoolVar(&f.asJSON, "json", false, "print one JSON object")
}

// changed is what a command has done.
type changed struct {
	Action  string   `json:"action"`
	DryRun  bool     `json:"dry_run"`
	Chosen  int      `json:"chosen"`
	Done    int      `json:"done"`
	Gone    int      `json:"gone"`    // processed, discarded or changed meanwhile
	Refused int      `json:"refused"` // cannot be run as they are
	Running int      `json:"running"` // have been running for too long to be waited for
	Left    int      `json:"left"`    // not tried: interrupted
	Errors  []string `json:"errors,omitempty"`
}

func (c changed) print(out io.Writer, asJSON bool) error {
	if asJSON {
		return json.NewEncoder(out).Encode(c)
	}
	if c.DryRun {
		fmt.Fprintf(out, "%d would be chosen for %s; nothing is changed\n", c.Chosen, c.Action)
		return nil
	}
	fmt.Fprintf(out, "%s: %d done, %d gone or changed meanwhile, %d refused, %d running, %d left\n", c.Action, c.Done, c.Gone, c.Refused, c.Running, c.Left)
	for _, e := range c.Errors {
		fmt.Fprintln(out, "  "+e)
	}
	return nil
}

// count adds what became of one message; the error is returned if the others must not
// be tried.
func (c *changed) count(err error) error {
	const most = 20
	switch {
	case err == nil:
		c.Done++
		return nil
	case errors.Is(err, inbox.ErrNotHeld), errors.Is(err, inbox.ErrChanged), errors.Is(err, outbox.ErrNotParked):
		c.Gone++
		return nil
	case errors.Is(err, context.Canceled):
		return err
	case errors.Is(err, inbox.ErrNotReplayable):
		c.Refused++
	case errors.Is(err, inbox.ErrRunning):
		c.Running++
	default:
		return err
	}
	if len(c.Errors) < most {
		c.Errors = append(c.Errors, err.Error())
	}
	return nil
}

// partly is the error of a command that could not do all it was to.
func (c *changed) partly() error {
	if c.Refused+c.Running == 0 {
		return nil
	}
	return fmt.Errorf("%w: %d cannot be run as they are, %d run now", errPartly, c.Refused, c.Running)
}

// bar shows progress on a terminal, and nothing elsewhere.
func bar(n int, what string) *progressbar.ProgressBar {
	visible := isatty.IsTerminal(os.Stderr.Fd())
	return progressbar.NewOptions(n, progressbar.OptionSetWriter(os.Stderr), progressbar.OptionSetVisibility(visible),
		progressbar.OptionSetDescription(what), progressbar.OptionShowCount(), progressbar.OptionClearOnFinish())
}

func newHeldReplayCommand(db *databaseFlags) *cobra.Command {
	var f filterFlags
	var cf changeFlags
	var rate float64
	var inFlight int
	c := &cobra.Command{
		Use:   "replay [NO ...]",
		Short: "Run held messages again, from their first attempt",
		Long: `The list is fixed when the command starts: what is held later is not in it, and a
message that has run or changed since is passed over. So the command may be
interrupted and given again. The consumers' own processes run what is replayed;
messages of one key in their order, what waits behind them included.

A replayed message keeps its ID and has one effect, however old it is: the inbox keeps
the ID of a message for as long as it is held, and from its end on for the consumer's
window, like that of any other. A copy that is delivered later than that is a new
message to the inbox: it is held as too-old, or runs, as the consumer's TooOld says.
A message that is held as too-old itself may have been processed before it was
forgotten: look for its effect before you replay it.`,
		Example: `  twiceproof held replay 4711
  twiceproof held replay --consumer billing --dead --class handler --rate 50 --in-flight 200 --yes
  twiceproof held replay --consumer billing --dead --dry-run`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if f.empty(args) {
				return usageError{errors.New("say which: numbers of messages, or flags such as --consumer and --dead")}
			}
			if rate < 0 || inFlight < 0 {
				return usageError{errors.New("--rate and --in-flight must not be negative")}
			}
			filter, err := f.filter(args)
			if err != nil {
				return err
			}
			return withHeld(cmd.Context(), db, func(op *inbox.Operator) error {
				chosen, err := choose(cmd.Context(), op, filter)
				if err != nil {
					return err
				}
				r := changed{Action: "replay", DryRun: cf.dryRun, Chosen: len(chosen)}
				if cf.dryRun {
					if !cf.asJSON {
						fmt.Fprintln(cmd.OutOrStdout(), "each keeps its id and has one effect; only a copy that comes later than the consumer's inbox window after that would not be known")
					}
					return r.print(cmd.OutOrStdout(), cf.asJSON)
				}
				if err := confirm(cmd, cf.yes, fmt.Sprintf("replay %d messages", len(chosen))); err != nil {
					return err
				}
				err = replay(cmd.Context(), op, chosen, inbox.By{Actor: actor(), Reason: cf.reason}, inbox.Pace{Rate: rate, InFlight: inFlight}, &r)
				return errors.Join(err, r.print(cmd.OutOrStdout(), cf.asJSON))
			})
		},
	}
	f.add(c)
	cf.add(c)
	c.Flags().Float64Var(&rate, "rate", 100, "at most so many a second; 0: no limit")
	c.Flags().IntVar(&inFlight, "in-flight", 1000, "wait while so many replayed ones are not finished; 0: no limit")
	return c
}

func choose(ctx context.Context, op *inbox.Operator, f inbox.HeldFilter) ([]inbox.Choice, error) {
	chosen, err := op.Choose(ctx, f)
	switch {
	case err != nil:
		return nil, err
	case len(chosen) == 0 && f.Seqs != nil:
		return nil, fmt.Errorf("messages %v: %w", f.Seqs, inbox.ErrNotHeld)
	case len(chosen) == 0:
		return nil, errNothing
	case f.Seqs != nil && len(chosen) < len(f.Seqs):
		return nil, fmt.Errorf("only %d of %d: %w; nothing is changed", len(chosen), len(f.Seqs), inbox.ErrNotHeld)
	}
	return chosen, nil
}

// replay replays at a pace, with a picture of it.
func replay(ctx context.Context, op *inbox.Operator, chosen []inbox.Choice, by inbox.By, pace inbox.Pace, r *changed) error {
	p := bar(len(chosen), "replay")
	defer p.Finish() //nolint:errcheck // a picture
	pace.Each = func(_ inbox.Choice, err error) {
		_ = r.count(err)
		_ = p.Add(1)
	}
	pace.Stuck = func(n int) {
		fmt.Fprintf(os.Stderr, "\nwaiting: %d replayed messages are due and not finished; does a consumer of that name run?\n", n)
	}
	tried, err := op.ReplayAll(ctx, chosen, by, pace)
	if r.Left = len(chosen) - tried; err != nil {
		return interrupted(err)
	}
	return r.partly()
}

func interrupted(err error) error {
	if errors.Is(err, context.Canceled) {
		return errInterrupted
	}
	return err
}

func newHeldDiscardCommand(db *databaseFlags) *cobra.Command {
	var f filterFlags
	var cf changeFlags
	c := &cobra.Command{
		Use:   "discard [NO ...]",
		Short: "Give held messages up, with a reason",
		Long: `A discarded message counts as dealt with: a redelivery is a duplicate, and the next
message of its key goes on. Its content is gone; export it first if it may be needed.`,
		Example: `  twiceproof held discard 4711 --comment "test order" --yes
  twiceproof held discard --consumer billing --reason conflict --comment "looked at" --dry-run`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if f.empty(args) {
				return usageError{errors.New("say which: numbers of messages, or flags such as --consumer and --dead")}
			}
			if cf.reason == "" {
				return usageError{errors.New("say why: --comment")}
			}
			filter, err := f.filter(args)
			if err != nil {
				return err
			}
			return withHeld(cmd.Context(), db, func(op *inbox.Operator) error {
				chosen, err := choose(cmd.Context(), op, filter)
				if err != nil {
					return err
				}
				r := changed{Action: "discard", DryRun: cf.dryRun, Chosen: len(chosen)}
				if cf.dryRun {
					return r.print(cmd.OutOrStdout(), cf.asJSON)
				}
				if err := confirm(cmd, cf.yes, fmt.Sprintf("discard %d messages", len(chosen))); err != nil {
					return err
				}
				err = discard(cmd.Context(), op, chosen, inbox.By{Actor: actor(), Reason: cf.reason}, &r)
				return errors.Join(err, r.print(cmd.OutOrStdout(), cf.asJSON))
			})
		},
	}
	f.add(c)
	cf.add(c)
	return c
}

func discard(ctx context.Context, op *inbox.Operator, chosen []inbox.Choice, by inbox.By, r *changed) error {
	p := bar(len(chosen), "discard")
	defer p.Finish() //nolint:errcheck // a picture
	for i, c := range chosen {
		if err := r.count(op.Discard(ctx, c, by)); err != nil {
			r.Left = len(chosen) - i
			return interrupted(err)
		}
		_ = p.Add(1)
	}
	return r.partly()
}

// headerChanges returns what makes the headers of a copy out of the old ones.
func headerChanges(set, drop []string) (func(brokers.Headers) brokers.Headers, error) {
	for _, s := range set {
		if name, _, ok := strings.Cut(s, "="); !ok || name == "" {
			return nil, usageError{fmt.Errorf("--set-header %q: write name=value", s)}
		}
	}
	return func(old brokers.Headers) brokers.Headers {
		hs := append(brokers.Headers{}, old...)
		for _, d := range drop {
			hs.Del(d)
		}
		for _, s := range set {
			name, value, _ := strings.Cut(s, "=")
			hs.Set(name, []byte(value))
		}
		return hs
	}, nil
}

func newHeldEditCommand(db *databaseFlags) *cobra.Command {
	var cf changeFlags
	var newID, payload, typ, contentType string
	var set, drop []string
	c := &cobra.Command{
		Use:   "edit NO",
		Short: "Replace a held message by a mended copy, in its place, and run it",
		Long: `The copy gets a new ID, which is linked to the old one: the old ID counts as discarded,
so that a redelivery of the broken message is a duplicate. It keeps the place of the old
one in its key, and everything that is not given here.

For a conflict, and for a message without a usable ID, this is the way to run it.`,
		Example: `  twiceproof held show 4711 --payload > body.json
  $EDITOR body.json
  twiceproof held edit 4711 --new-id order-17-mended --payload-file body.json --comment "currency was missing"
  twiceproof held edit 4711 --new-id order-17-b --set-header tenant=7 --drop-header debug --yes`,
		Args: oneArg,
		RunE: func(cmd *cobra.Command, args []string) error {
			seqs, err := numbers(args)
			if err != nil {
				return err
			}
			if newID == "" {
				return usageError{errors.New("give the copy an ID of its own: --new-id")}
			}
			headers, err := headerChanges(set, drop)
			if err != nil {
				return err
			}
			var body []byte
			switch payload {
			case "":
			case "-":
				if !cf.yes && !cf.dryRun {
					return usageError{errors.New("the payload comes from standard input, so nothing can be asked there: add --yes")}
				}
				body, err = io.ReadAll(cmd.InOrStdin())
			default:
				body, err = os.ReadFile(payload)
			}
			if err != nil {
				return err
			}
			return withHeld(cmd.Context(), db, func(op *inbox.Operator) error {
				chosen, err := choose(cmd.Context(), op, inbox.HeldFilter{Seqs: seqs})
				if err != nil {
					return err
				}
				r := changed{Action: "edit", DryRun: cf.dryRun, Chosen: 1}
				if cf.dryRun {
					return r.print(cmd.OutOrStdout(), cf.asJSON)
				}
				if err := confirm(cmd, cf.yes, fmt.Sprintf("replace message %d by %q", seqs[0], newID)); err != nil {
					return err
				}
				// What was chosen is what is read here, or the edit fails.
				old, err := op.Get(cmd.Context(), seqs[0])
				if err != nil {
					return err
				}
				m := &brokers.Message{ID: newID, Payload: old.Message.Payload, Type: typ, ContentType: contentType, Headers: headers(old.Message.Headers)}
				if payload != "" {
					m.Payload = append([]byte{}, body...)
				}
				if _, err := op.Edit(cmd.Context(), chosen[0], m, inbox.By{Actor: actor(), Reason: cf.reason}); err != nil {
					return err
				}
				r.Done = 1
				return r.print(cmd.OutOrStdout(), cf.asJSON)
			})
		},
	}
	cf.add(c)
	c.Flags().StringVar(&newID, "new-id", "", "the copy's message ID, which nobody has used")
	c.Flags().StringVar(&payload, "payload-file", "", "file with the copy's payload; - is standard input (default: the old one's)")
	c.Flags().StringArrayVar(&set, "set-header", nil, "name=value of a header to set; may be repeated")
	c.Flags().StringArrayVar(&drop, "drop-header", nil, "name of a header to leave out; may be repeated")
	c.Flags().StringVar(&typ, "type", "", "the copy's type (default: the old one's)")
	c.Flags().StringVar(&contentType, "content-type", "", "the copy's content type (default: the old one's)")
	return c
}
