//go:build linux

package main

import (
	"bufio"
	"bytes"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/internal/devenv"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
)

// build builds the command: `go run` would not pass signals on.
func build(t *testing.T) string {
	t.Helper()
	bin := filepath.Join(t.TempDir(), "devenv")
	out, err := exec.Command("go", "build", "-o", bin, ".").CombinedOutput()
	require.NoError(t, err, "%s", out)
	return bin
}

func stateDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "dev")
	require.NoError(t, err)
	require.NoError(t, os.Chmod(dir, 0o711))
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// environment without URLs, so that servers are started.
func environment(state string, more ...string) []string {
	var env []string
	for _, kv := range os.Environ() {
		if !strings.HasPrefix(kv, "DATABASE_URL=") && !strings.HasPrefix(kv, "AMQP_URL=") &&
			!strings.HasPrefix(kv, "SQS_ENDPOINT=") && !strings.HasPrefix(kv, "KAFKA_BROKERS=") && !strings.HasPrefix(kv, "TWICEPROOF_") {
			env = append(env, kv)
		}
	}
	return append(append(env, devenv.EnvStateDir+"="+state), more...)
}

// processes counts those whose command line or environment names the directory.
func processes(t *testing.T, dir string) int {
	t.Helper()
	n := 0
	found, err := filepath.Glob("/proc/[0-9]*")
	require.NoError(t, err)
	for _, p := range found {
		if filepath.Base(p) == "self" {
			continue
		}
		cmdline, _ := os.ReadFile(p + "/cmdline")
		cwd, _ := os.Readlink(p + "/cwd")
		if bytes.Contains(cmdline, []byte(dir+"/")) || strings.HasPrefix(cwd, dir+"/") {
			n++
		}
	}
	return n
}

func haveLocal(t *testing.T) {
	t.Helper()
	p, err := devenv.StartPostgres(t.Context(), devenv.Options{StateDir: stateDir(t)}, devenv.PostgresConfig{})
	if err != nil {
		devtest.Missing(t, "postgres", err.Error())
	}
	require.NoError(t, p.Close())
}

func TestExitCodesAndEnvironment(t *testing.T) {
	haveLocal(t)
	bin, state := build(t), stateDir(t)
	for _, tc := range []struct {
		name   string
		args   []string
		env    []string
		code   int
		stdout string
		stderr string
	}{
		{name: "the command's own", args: []string{"-only", "postgres", "--", "sh", "-c", `echo "$DATABASE_URL"; exit 7`}, code: 7, stdout: "postgres://postgres@127.0.0.1:", stderr: "devenv: postgres (local)"},
		{name: "ended by a signal", args: []string{"-only", "postgres", "--", "sh", "-c", `kill -TERM $$`}, code: 128 + 15},
		{name: "not found", args: []string{"-only", "postgres", "--", "no-such-command"}, code: 127},
		{name: "cannot be run", args: []string{"-only", "postgres", "--", "/etc/passwd"}, code: 126},
		{name: "require reaches the command", args: []string{"-only", "postgres", "-require", "postgres", "--", "sh", "-c", `echo "$TWICEPROOF_REQUIRE"`}, env: []string{"TWICEPROOF_REQUIRE=kafka"}, stdout: "kafka,postgres\n"},
		{name: "no command", code: 125, stderr: "no command given"},
		{name: "unknown service", args: []string{"-only", "mysql", "--", "true"}, code: 125, stderr: "known are postgres, rabbitmq, sqs, kafka"},
		{name: "required but not provided", args: []string{"-only", "postgres", "-require", "rabbitmq", "--", "true"}, code: 125, stderr: "-only leaves out"},
		{name: "unknown flag", args: []string{"-x"}, code: 125},
		{name: "help", args: []string{"-h"}, stderr: "Exit codes:"},
		{name: "a dead URL", args: []string{"-only", "postgres", "--", "true"}, env: []string{"DATABASE_URL=postgres://u:hunter2@127.0.0.1:1/x"}, code: 125, stderr: "nothing answers there"},
		{
			name: "required but missing", args: []string{"-install=false", "-only", "postgres", "-require", "postgres", "--", "true"},
			env: []string{"PG_BIN=/nowhere", "PATH=/bin"}, code: 125, stderr: "required but missing: postgres",
		},
		{
			name: "missing", args: []string{"-install=false", "-only", "postgres", "--", "sh", "-c", `echo "<$DATABASE_URL>"`},
			env: []string{"PG_BIN=/nowhere", "PATH=/bin"}, stdout: "<>\n", stderr: "SKIP postgres: ",
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cmd := exec.Command(bin, tc.args...)
			cmd.Env = environment(state, tc.env...)
			var stdout, stderr bytes.Buffer
			cmd.Stdout, cmd.Stderr = &stdout, &stderr
			_ = cmd.Run() // the code tells
			assert.Equal(t, tc.code, cmd.ProcessState.ExitCode(), "%s", &stderr)
			assert.Contains(t, stdout.String(), tc.stdout)
			assert.Contains(t, stderr.String(), tc.stderr)
			assert.NotContains(t, stderr.String(), "hunter2")
			assert.Zero(t, processes(t, state))
		})
	}
}

// Whatever ends devenv, its servers end with it, and what a kill left on disk is
// swept away by the next start.
func TestServersEndWithDevenvBySignal(t *testing.T) {
	haveLocal(t)
	bin := build(t)
	for _, tc := range []struct {
		name string
		sig  syscall.Signal
		code int
	}{
		{"SIGINT", syscall.SIGINT, 42},
		{"SIGTERM", syscall.SIGTERM, 43},
		{"SIGKILL", syscall.SIGKILL, -1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			state := stateDir(t)
			// The command sees each signal once and says so by its code.
			script := `trap 'exit 42' INT; trap 'exit 43' TERM; echo up; while :; do sleep 0.1; done`
			cmd := exec.Command(bin, "-install=false", "--", "sh", "-c", script)
			cmd.Env = environment(state)
			cmd.Stderr = os.Stderr
			out, err := cmd.StdoutPipe()
			require.NoError(t, err)
			require.NoError(t, cmd.Start())
			line, err := bufio.NewReader(out).ReadString('\n')
			require.NoError(t, err)
			require.Equal(t, "up\n", line)
			require.GreaterOrEqual(t, processes(t, state), 2, "nothing was started")

			require.NoError(t, cmd.Process.Signal(tc.sig))
			_, _ = io.Copy(io.Discard, out) // until the command, which holds the pipe, is gone too
			_ = cmd.Wait()
			assert.Equal(t, tc.code, cmd.ProcessState.ExitCode())
			require.Eventually(t, func() bool { return processes(t, state) == 0 }, 20*time.Second, 50*time.Millisecond)

			if tc.sig == syscall.SIGKILL {
				left, err := os.ReadDir(state)
				require.NoError(t, err)
				require.NotEmpty(t, left, "a kill cannot clean up")
				next := exec.Command(bin, "-only", "postgres", "--", "true")
				next.Env = environment(state)
				msg, err := next.CombinedOutput()
				require.NoError(t, err, "%s", msg)
			}
			left, err := os.ReadDir(state)
			require.NoError(t, err)
			assert.Empty(t, left)
		})
	}
}

// A signal while the servers start ends those that have started.
func TestSignalDuringStartLeavesNothing(t *testing.T) {
	haveLocal(t)
	bin, state := build(t), stateDir(t)
	cmd := exec.Command(bin, "-install=false", "--", "true")
	cmd.Env = environment(state)
	require.NoError(t, cmd.Start())
	require.Eventually(t, func() bool { return processes(t, state) > 0 }, 20*time.Second, 5*time.Millisecond)
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	_ = cmd.Wait()
	assert.Equal(t, 128+15, cmd.ProcessState.ExitCode())
	assert.Zero(t, processes(t, state))
	left, err := os.ReadDir(state)
	require.NoError(t, err)
	assert.Empty(t, left)
}

// A command that ignores the signal is killed after the grace, with its group.
func TestCommandThatIgnoresTheSignalIsKilled(t *testing.T) {
	haveLocal(t)
	bin, state := build(t), stateDir(t)
	cmd := exec.Command(bin, "-only", "postgres", "-grace", "200ms", "--", "sh", "-c", `trap '' TERM; echo up; while :; do sleep 0.1; done`)
	cmd.Env = environment(state)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	_, err = bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	_, _ = io.Copy(io.Discard, out)
	_ = cmd.Wait()
	assert.Equal(t, 128+9, cmd.ProcessState.ExitCode())
	assert.Zero(t, processes(t, state))
}
