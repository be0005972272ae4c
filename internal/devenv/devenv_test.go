//go:build linux || darwin

package devenv

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// shortDir is a directory that the postgres user can enter and that a socket's path
// fits into; t.TempDir is neither.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "dev")
	require.NoError(t, err)
	require.NoError(t, os.Chmod(dir, 0o711))
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// needs skips where the programs are not installed, unless they are required.
func needs(t *testing.T, service string, err error) {
	t.Helper()
	required := slices.Contains(strings.Split(os.Getenv("TWICEPROOF_REQUIRE"), ","), service)
	if errors.Is(err, ErrUnavailable) && !required {
		skip(t, fmt.Sprintf("%s: %s", service, err))
	}
	require.NoError(t, err)
}

func TestPostgresKeepsItsDataAndPortOverStopAndKill(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	root := shortDir(t)
	p, err := StartPostgres(ctx, Options{StateDir: root}, PostgresConfig{Settings: map[string]string{"work_mem": "5MB"}})
	needs(t, "postgres", err)
	defer p.Close() //nolint:errcheck // again: the test closes it

	exec := func(sql string) {
		t.Helper()
		c, err := pgx.Connect(ctx, p.URL())
		require.NoError(t, err)
		defer c.Close(ctx) //nolint:errcheck // read only
		_, err = c.Exec(ctx, sql)
		require.NoError(t, err)
	}
	value := func(sql string) string {
		t.Helper()
		c, err := pgx.Connect(ctx, p.URL())
		require.NoError(t, err)
		defer c.Close(ctx) //nolint:errcheck // read only
		var s string
		require.NoError(t, c.QueryRow(ctx, sql).Scan(&s))
		return s
	}
	assert.Equal(t, "on", value("SHOW fsync"))
	assert.Equal(t, "300", value("SHOW max_connections"))
	assert.Equal(t, "5MB", value("SHOW work_mem"))
	assert.Equal(t, "127.0.0.1", value("SHOW listen_addresses"))
	exec("CREATE TABLE kept (n int); INSERT INTO kept VALUES (42)")

	url, pid := p.URL(), p.PID()
	for name, stop := range map[string]func() error{
		"kill": p.Kill, "immediate": func() error { return p.Stop(true) }, "fast": func() error { return p.Stop(false) },
	} {
		require.NoError(t, stop(), name)
		assert.Zero(t, p.PID(), name)
		require.Error(t, pingPostgres(ctx, p.URL()), name)
		require.NoError(t, p.Start(ctx), name)
		assert.Equal(t, url, p.URL(), name)
		assert.NotEqual(t, pid, p.PID(), name)
		assert.Equal(t, "42", value("SELECT n::text FROM kept"), name)
		pid = p.PID()
	}
	require.NoError(t, p.Start(ctx), "starting a running server is nothing")
	assert.Equal(t, pid, p.PID())

	require.NoError(t, p.Close())
	require.NoError(t, p.Close())
	left, err := os.ReadDir(root)
	require.NoError(t, err)
	assert.Empty(t, left)
	_, running := identify(pid)
	assert.False(t, running)
}

func TestPostgresSaysWhyItDidNotStart(t *testing.T) {
	t.Parallel()
	root := shortDir(t)
	_, err := StartPostgres(t.Context(), Options{StateDir: root}, PostgresConfig{Settings: map[string]string{"no_such_setting": "1"}})
	if errors.Is(err, ErrUnavailable) {
		needs(t, "postgres", err)
	}
	require.ErrorContains(t, err, `unrecognized configuration parameter "no_such_setting"`)
	left, err := os.ReadDir(root)
	require.NoError(t, err)
	assert.Empty(t, left)
}

func TestRabbitMQKeepsItsDataOverAKillAndTakesEpmdWithIt(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	root := shortDir(t)
	r, err := StartRabbitMQ(ctx, Options{StateDir: root}, RabbitMQConfig{Conf: "consumer_timeout = 77000"})
	needs(t, "rabbitmq", err)
	defer r.Close() //nolint:errcheck // again: the test closes it

	out, err := r.Ctl(ctx, "eval", "application:get_env(rabbit, consumer_timeout).")
	require.NoError(t, err)
	assert.Contains(t, out, "77000")

	c, err := amqp.Dial(r.URL())
	require.NoError(t, err)
	ch, err := c.Channel()
	require.NoError(t, err)
	_, err = ch.QueueDeclare("kept", true, false, false, false, nil)
	require.NoError(t, err)
	closed := c.NotifyClose(make(chan *amqp.Error, 1))

	// RabbitMQ answers a declaration before its database of definitions, Mnesia, has
	// written it.
	_, err = r.Ctl(ctx, "eval", "mnesia:sync_log().")
	require.NoError(t, err)
	pid := r.PID()
	require.NoError(t, r.Kill())
	<-closed // the kill hit the node itself, not a wrapper
	require.NoError(t, r.Start(ctx))
	assert.NotEqual(t, pid, r.PID())
	c, err = amqp.Dial(r.URL())
	require.NoError(t, err)
	ch, err = c.Channel()
	require.NoError(t, err)
	_, err = ch.QueueDeclarePassive("kept", true, false, false, false, nil)
	require.NoError(t, err)
	require.NoError(t, c.Close())

	epmd := r.epmd.pid()
	require.NoError(t, r.Close())
	_, running := identify(epmd)
	assert.False(t, running, "epmd stayed behind")
	left, err := os.ReadDir(root)
	require.NoError(t, err)
	assert.Empty(t, left)
}

// The leftovers of a devenv that was killed are ended, and nothing else: not a
// process that got the pid later, and nothing of an owner that lives.
func TestSweepEndsOnlyTheProcessesOfDeadOwners(t *testing.T) {
	t.Parallel()
	root := shortDir(t)
	o := Options{StateDir: root}
	sleeper := func() (*exec.Cmd, record) {
		cmd := exec.Command("sleep", "600")
		cmd.SysProcAttr = childAttr(nil)
		require.NoError(t, cmd.Start())
		r, ok := identify(cmd.Process.Pid)
		require.True(t, ok)
		r.What, r.PID = "sleep", cmd.Process.Pid
		return cmd, r
	}
	leftover, r1 := sleeper()
	stranger, r2 := sleeper()
	owned, r3 := sleeper()
	defer func() {
		for _, c := range []*exec.Cmd{stranger, owned} {
			_ = c.Process.Kill()
			_ = c.Wait()
		}
	}()
	r2.Start += "0" // written down by a process of the same pid, long ago
	dead, err := newState(o, "dead")
	require.NoError(t, err)
	require.NoError(t, errors.Join(dead.add(r1), dead.add(r2)))
	alive, err := newState(o, "alive")
	require.NoError(t, err)
	require.NoError(t, alive.add(r3))

	require.NoError(t, dead.file.Close()) // as the kernel does when the owner dies
	reaped := make(chan error, 1)
	go func() { reaped <- leftover.Wait() }()
	// A process that another test forks right now has the file too, until it executes.
	require.Eventually(t, func() bool { sweep(root, o); return len(reaped) == 1 }, 30*time.Second, 20*time.Millisecond)
	require.ErrorContains(t, <-reaped, "killed")
	_, running := identify(stranger.Process.Pid)
	assert.True(t, running, "killed a process that was not ours")
	_, running = identify(owned.Process.Pid)
	assert.True(t, running, "killed a process whose owner lives")
	assert.NoDirExists(t, dead.dir)
	assert.NoFileExists(t, dead.path)
	assert.DirExists(t, alive.dir)
	require.NoError(t, alive.close())
}

func TestStateDirectoryThatOthersMayWriteToIsRefused(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	require.NoError(t, os.Chmod(dir, 0o777))
	_, err := newState(Options{StateDir: dir}, "x")
	require.ErrorContains(t, err, "others may write to it")
	require.ErrorContains(t, err, EnvStateDir)
}

func TestNewestInstalledVersionIsTaken(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, v := range []string{"9", "17", "15"} {
		bin := filepath.Join(dir, v, "bin")
		require.NoError(t, os.MkdirAll(bin, 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(bin, "initdb"), []byte("#!/bin/sh\n"), 0o755))
	}
	assert.Equal(t, filepath.Join(dir, "17/bin/initdb"), firstExecutable(filepath.Join(dir, "*", "bin", "initdb")))
}

func TestLinkLibraries(t *testing.T) {
	t.Parallel()
	pkg := t.TempDir()
	lib := filepath.Join(pkg, "native", "lib")
	require.NoError(t, os.MkdirAll(lib, 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(lib, "libx.so.5.1"), []byte("x"), 0o644))
	list := filepath.Join(pkg, "native", "pg-symlinks.json")
	require.NoError(t, os.WriteFile(list, []byte(`[{"source":"native/lib/libx.so.5.1","target":"native/lib/libx.so"}]`), 0o644))
	require.NoError(t, linkLibraries(pkg))
	require.NoError(t, linkLibraries(pkg), "a second time")
	b, err := os.ReadFile(filepath.Join(lib, "libx.so"))
	require.NoError(t, err)
	assert.Equal(t, "x", string(b))

	require.NoError(t, os.WriteFile(list, []byte(`[{"source":"native/lib/libx.so.5.1","target":"../../evil"}]`), 0o644))
	require.ErrorContains(t, linkLibraries(pkg), "leads out of the package")
}

// TestInstallers runs the package managers for real. It changes the machine, hence
// only on request.
func TestInstallers(t *testing.T) {
	if os.Getenv("TWICEPROOF_TEST_INSTALL") == "" {
		skip(t, "set TWICEPROOF_TEST_INSTALL=1 to run apt-get and npm")
	}
	for _, in := range []installer{apt("postgresql"), apt("rabbitmq-server"), npm()} {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
		defer cancel()
		if err := in.usable(); err != nil {
			t.Log("SKIP", in.name, err)
			continue
		}
		require.NoError(t, in.install(ctx, Options{}), in.name)
	}
	p, err := StartPostgres(t.Context(), Options{StateDir: shortDir(t)}, PostgresConfig{Bin: filepath.Join(npmPackage(), "native/bin")})
	require.NoError(t, err)
	require.NoError(t, p.Close())
}
