// Command twiceproof shows what Twiceproof does (demo), keeps its tables up to date
// (migrate), tells how consumers and outbox are doing (status), and lets people deal
// with held messages (held) and parked ones (outbox).
//
// Exit codes: 0 done; 1 failed; 2 wrong usage; 3 nothing matches, or there is no such
// message; 4 tables are missing or old; 5 the database refuses the login or the access;
// 6 some of the messages could not be changed; 130 interrupted.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	// A second signal ends the process; some wrappers send the first one twice.
	context.AfterFunc(ctx, func() { time.AfterFunc(time.Second, stop) })
	os.Exit(run(ctx, os.Args[1:]))
}

// noArgs refuses arguments, as wrong usage.
func noArgs(c *cobra.Command, args []string) error {
	if err := cobra.NoArgs(c, args); err != nil {
		return usageError{err}
	}
	return nil
}

func run(ctx context.Context, args []string) int {
	root := newRootCommand()
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	fmt.Fprintln(os.Stderr, "twiceproof:", err)
	return exitCode(ctx, err)
}

func newRootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   "twiceproof",
		Short: "Message consumers that may safely receive every message twice",
		Example: `  twiceproof demo
  twiceproof migrate up --database-url postgres://localhost/app
  twiceproof status --database-url postgres://localhost/app`,
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          noArgs,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.AddCommand(newDemoCommand(), newMigrateCommand(), newStatusCommand(), newHeldCommand(), newOutboxCommand(), newDoctorCommand())
	return root
}
