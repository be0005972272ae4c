//go:build linux || darwin

package devenv

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// fakeServer is what a rung of a fake service starts.
type fakeServer struct {
	url    string
	closed int
}

func (s *fakeServer) URL() string  { return s.url }
func (s *fakeServer) Close() error { s.closed++; return nil }

// fakeService answers the ping for the URLs in up.
func fakeService(local *fakeServer, up ...string) Service {
	return Service{
		Name: "fake", EnvVar: "TWICEPROOF_FAKE_URL",
		ping: func(_ context.Context, url string) error {
			for _, u := range up {
				if u == url {
					return nil
				}
			}
			return fmt.Errorf("nobody at %s", url)
		},
		local: func(context.Context, Options) (server, error) {
			if local == nil {
				return nil, ErrUnavailable
			}
			return local, nil
		},
		composeName: "fake", composePort: "99", composePortEnv: []string{"FAKE_PORT"},
		composeURL: func(hp string) string { return "fake://" + hp },
	}
}

// fakeDocker puts a docker into PATH that runs the script, in a repository with a
// compose file, and returns the file that it writes its calls to.
func fakeDocker(t *testing.T, script string) (calls string) {
	t.Helper()
	dir := t.TempDir()
	calls = filepath.Join(dir, "calls")
	text := "#!/bin/sh\necho \"$@\" FAKE_PORT=$FAKE_PORT >> " + calls + "\n" + script
	require.NoError(t, os.WriteFile(filepath.Join(dir, "docker"), []byte(text), 0o755))
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	for _, f := range []string{"go.mod", "docker-compose.yml"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, f), nil, 0o644))
	}
	t.Chdir(dir)
	return calls
}

func TestGivenURLWinsAndIsNeverStopped(t *testing.T) {
	local := &fakeServer{url: "fake://local"}
	t.Setenv("TWICEPROOF_FAKE_URL", "fake://given")
	e, err := Up(t.Context(), Options{StateDir: shortDir(t)}, fakeService(local, "fake://given"))
	require.NoError(t, err)
	assert.Equal(t, []string{"TWICEPROOF_FAKE_URL=fake://given"}, e.Environ())
	assert.Equal(t, RungURL, e.Found[0].Rung)
	require.NoError(t, e.Close())
	assert.Zero(t, local.closed)
}

func TestDeadGivenURLIsAnErrorWithoutItsPassword(t *testing.T) {
	t.Setenv("TWICEPROOF_FAKE_URL", "fake://user:hunter2@nowhere/")
	_, err := Up(t.Context(), Options{}, fakeService(&fakeServer{}))
	require.ErrorContains(t, err, "TWICEPROOF_FAKE_URL is set")
	assert.NotContains(t, err.Error(), "hunter2")
	assert.Contains(t, err.Error(), "user:xxxxx@nowhere")
}

// KAFKA_BROKERS is a list of addresses and no URL.
func TestDeadListOfAddressesIsAnErrorThatShowsIt(t *testing.T) {
	t.Setenv("TWICEPROOF_FAKE_URL", "127.0.0.1:1,127.0.0.1:2")
	e, err := Up(t.Context(), Options{}, fakeService(nil, "127.0.0.1:1,127.0.0.1:2"))
	require.NoError(t, err)
	assert.Equal(t, "127.0.0.1:1,127.0.0.1:2", e.Found[0].Display())
	_, err = Up(t.Context(), Options{}, fakeService(nil))
	require.ErrorContains(t, err, "TWICEPROOF_FAKE_URL is set (127.0.0.1:1,127.0.0.1:2)")
	require.ErrorContains(t, err, "nobody at 127.0.0.1:1,127.0.0.1:2")
}

func TestRunningComposeProjectIsUsedAndLeftAlone(t *testing.T) {
	calls := fakeDocker(t, `case "$*" in *port*) echo 0.0.0.0:7777;; esac`)
	local := &fakeServer{}
	e, err := Up(t.Context(), Options{StateDir: shortDir(t)}, fakeService(local, "fake://127.0.0.1:7777"))
	require.NoError(t, err)
	assert.Equal(t, RungCompose, e.Found[0].Rung)
	require.NoError(t, e.Close())
	b, err := os.ReadFile(calls)
	require.NoError(t, err)
	assert.NotContains(t, string(b), " up ")
	assert.NotContains(t, string(b), " down ")
}

func TestDockerIsStartedAsAProjectOfItsOwnAndTakenDown(t *testing.T) {
	// Not running as the default project; our own, started on any port, is.
	calls := fakeDocker(t, `case "$*" in *-p*port*) echo 127.0.0.1:8888;; *port*) exit 1;; esac`)
	root := shortDir(t)
	e, err := Up(t.Context(), Options{StateDir: root}, fakeService(nil, "fake://127.0.0.1:8888"))
	require.NoError(t, err)
	require.Equal(t, RungDocker, e.Found[0].Rung, e.Found[0].Missing)
	require.NoError(t, e.Close())
	b, err := os.ReadFile(calls)
	require.NoError(t, err)
	assert.Regexp(t, `-p (twiceproof-compose-fake-[0-9a-f]+) up .* fake FAKE_PORT=0\n(.*\n)*.*-p twiceproof-compose-fake-[0-9a-f]+ down`, string(b))
	left, err := os.ReadDir(root)
	require.NoError(t, err)
	assert.Empty(t, left)
}

func TestDockerClientWithoutAnEngineIsPassedOver(t *testing.T) {
	for name, script := range map[string]string{"fails": "exit 1", "hangs": "exec sleep 60"} {
		t.Run(name, func(t *testing.T) {
			fakeDocker(t, script)
			local := &fakeServer{url: "fake://local"}
			began := time.Now()
			e, err := Up(t.Context(), Options{StateDir: shortDir(t)}, fakeService(local))
			require.NoError(t, err)
			assert.Less(t, time.Since(began), 10*time.Second)
			assert.Equal(t, RungLocal, e.Found[0].Rung)
			require.NoError(t, e.Close())
			require.NoError(t, e.Close())
			assert.Equal(t, 1, local.closed)
		})
	}
}

func TestInstallIsTheLastResortAndOnlyWhereAllowed(t *testing.T) {
	t.Setenv("PATH", "")
	installed := 0
	local := &fakeServer{url: "fake://installed"}
	s := fakeService(nil)
	s.local = func(context.Context, Options) (server, error) {
		if installed == 0 {
			return nil, ErrUnavailable
		}
		return local, nil
	}
	s.installers = []installer{
		{name: "first", usable: func() error { return errors.New("needs root") }},
		{name: "second", usable: func() error { return nil }, install: func(context.Context, Options) error { installed++; return nil }},
	}
	e, err := Up(t.Context(), Options{StateDir: shortDir(t)}, s)
	require.NoError(t, err)
	require.Error(t, e.Found[0].Missing)
	assert.Empty(t, e.Environ())
	assert.Zero(t, installed)
	require.ErrorIs(t, e.Found[0].Missing, ErrUnavailable)

	e, err = Up(t.Context(), Options{StateDir: shortDir(t), Install: true}, s)
	require.NoError(t, err)
	assert.Equal(t, RungInstall, e.Found[0].Rung)
	require.NoError(t, e.Close())
}

func TestUpThatFailsStopsWhatItHadStarted(t *testing.T) {
	first := &fakeServer{url: "fake://local"}
	one, two := fakeService(first), fakeService(nil)
	two.EnvVar = "TWICEPROOF_FAKE_URL_2"
	t.Setenv(two.EnvVar, "fake://dead")
	_, err := Up(t.Context(), Options{StateDir: shortDir(t)}, one, two)
	require.Error(t, err)
	assert.Equal(t, 1, first.closed)
}

func TestUnknownServiceNamesTheKnownOnes(t *testing.T) {
	_, err := Find("postgres", "mysql")
	require.EqualError(t, err, `unknown service "mysql"; known are postgres, rabbitmq, sqs, kafka`)
}
