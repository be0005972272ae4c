package devenv

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"time"
)

// EnvStateDir is the environment variable that overrides [Options.StateDir].
const EnvStateDir = "TWICEPROOF_DEVENV_STATE"

const (
	// bootTimeout bounds the start of one local server. RabbitMQ takes up to 10 s on
	// a loaded machine.
	bootTimeout = 90 * time.Second
	// pingEvery is how often a starting server is asked whether it is there.
	pingEvery = 25 * time.Millisecond
	// pingTimeout bounds one ping.
	pingTimeout = 5 * time.Second
)

var (
	// ErrUnavailable: the service's programs are not on this machine.
	ErrUnavailable = errors.New("not installed")
	// errNoLocal: this operating system has no local binaries rung.
	errNoLocal = fmt.Errorf("local servers are not supported on this system: set the URL or run Docker: %w", errors.ErrUnsupported)
)

// Options are common to everything in this package. The zero value is ready.
type Options struct {
	// Install allows package managers to be run. Default: false.
	Install bool
	// StateDir holds a directory and a lock file for each running server. Empty means
	// $TWICEPROOF_DEVENV_STATE, or else twiceproof-devenv-<uid> in the system's
	// directory for temporary files. Keep it short: a Unix socket's path has room
	// for 107 bytes.
	StateDir string
	// Log receives what is found, started, installed and stopped. Nil means nobody.
	Log *slog.Logger
}

func (o Options) log() *slog.Logger {
	if o.Log == nil {
		return slog.New(slog.DiscardHandler)
	}
	return o.Log
}

// stateDir returns the state directory, made and checked.
func (o Options) stateDir() (string, error) {
	dir := o.StateDir
	if dir == "" {
		dir = os.Getenv(EnvStateDir)
	}
	if dir == "" {
		dir = filepath.Join(os.TempDir(), "twiceproof-devenv-"+strconv.Itoa(os.Getuid()))
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	// Others may pass through it (the postgres user, when we are root), not look into it.
	if err := os.MkdirAll(dir, 0o711); err != nil {
		return "", fmt.Errorf("make the state directory: %w", err)
	}
	if err := ownedByUs(dir); err != nil {
		return "", fmt.Errorf("state directory %s: %w; set %s to another one", dir, err, EnvStateDir)
	}
	return dir, nil
}
