package devenv

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

// PostgresConfig is what a private PostgreSQL server is started with.
type PostgresConfig struct {
	// Settings are server parameters, for example "max_connections": "20". Durability
	// is as PostgreSQL ships it (fsync on); max_connections is 300.
	Settings map[string]string
	// Bin is the directory of initdb and postgres. Empty means $PG_BIN, then PATH, the
	// newest of /usr/lib/postgresql/*/bin and of Homebrew's, then what an earlier
	// install left in the cache.
	Bin string
}

// Postgres is a private PostgreSQL server: listening on 127.0.0.1 only, on a port
// and a directory of its own, with the superuser postgres, whom every local user
// may be. Its methods are not for concurrent use, PID and URL excepted.
type Postgres struct {
	st   *state
	cfg  PostgresConfig
	cred *credential
	data string
	port int
	opts Options

	mu   sync.Mutex
	proc *process
}

// StartPostgres starts a private server from local binaries and waits until it
// answers. It returns [ErrUnavailable] where there are none. ctx bounds the start
// alone; the server runs until Close.
func StartPostgres(ctx context.Context, o Options, cfg PostgresConfig) (*Postgres, error) {
	if !localSupported {
		return nil, errNoLocal
	}
	bin := postgresBin(cfg.Bin)
	if bin == "" {
		return nil, fmt.Errorf("PostgreSQL (no initdb and postgres in $PG_BIN, PATH or the usual places): %w", ErrUnavailable)
	}
	cfg.Bin = bin
	cred, err := unprivileged()
	if err != nil {
		return nil, err
	}
	st, err := newState(o, "pg")
	if err != nil {
		return nil, err
	}
	p := &Postgres{st: st, cfg: cfg, cred: cred, data: filepath.Join(st.dir, "data"), opts: o}
	if err := p.create(ctx); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

// create makes the data directory and starts the server on a free port. Another
// process may take the port in between: then it draws again.
func (p *Postgres) create(ctx context.Context) error {
	if err := chown(p.st.dir, p.cred); err != nil {
		return err
	}
	initdb := exec.CommandContext(ctx, filepath.Join(p.cfg.Bin, "initdb"),
		"-D", p.data, "-U", "postgres", "-A", "trust", "--no-sync", "--no-locale", "-E", "UTF8")
	initdb.Dir, initdb.SysProcAttr = p.st.dir, childAttr(p.cred)
	if out, err := initdb.CombinedOutput(); err != nil {
		return fmt.Errorf("initdb: %w\n%s", err, out)
	}
	var errs []error
	for range 3 {
		ports, err := freePorts(1)
		if err != nil {
			return err
		}
		p.port = ports[0]
		if err = p.Start(ctx); err == nil {
			return nil
		}
		errs = append(errs, err)
		if ctx.Err() != nil {
			break
		}
	}
	return errors.Join(errs...)
}

// URL returns the URL of the database postgres; it is the same after a restart.
func (p *Postgres) URL() string {
	return fmt.Sprintf("postgres://postgres@127.0.0.1:%d/postgres?sslmode=disable", p.port)
}

// PID returns the postmaster's process id, or 0 while the server is stopped.
func (p *Postgres) PID() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.proc.alive() {
		return 0
	}
	return p.proc.pid()
}

// Start starts a stopped or killed server again, on the same port and data, and
// waits until it answers. On a running one it only waits.
func (p *Postgres) Start(ctx context.Context) error {
	ping := func(ctx context.Context) error { return pingPostgres(ctx, p.URL()) }
	var errs []error
	// After a kill the backends hold the shared memory until they notice: the new
	// postmaster refuses to start then.
	for range 20 {
		proc, err := p.spawn()
		if err != nil {
			return err
		}
		if err = proc.await(ctx, ping); err == nil {
			return nil
		}
		errs = append(errs, errors.Join(err, p.end(os.Kill, 0)))
		if ctx.Err() != nil || !strings.Contains(err.Error(), "pre-existing shared memory") {
			return errors.Join(errs...)
		}
		select {
		case <-ctx.Done():
		case <-time.After(100 * time.Millisecond):
		}
	}
	return errors.Join(errs...)
}

func (p *Postgres) spawn() (*process, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.proc.alive() {
		return p.proc, nil
	}
	args := []string{"-D", p.data, "-p", strconv.Itoa(p.port),
		"-c", "listen_addresses=127.0.0.1", "-c", "max_connections=300", "-c", "unix_socket_directories=" + p.socketDir()}
	for _, k := range sortedKeys(p.cfg.Settings) {
		args = append(args, "-c", k+"="+p.cfg.Settings[k])
	}
	cmd := exec.Command(filepath.Join(p.cfg.Bin, "postgres"), args...)
	cmd.Dir = p.st.dir
	cmd.Env = append(os.Environ(), "LC_ALL=C", "PGOPTIONS=")
	proc, err := start(p.st, "postgres", cmd, childAttr(p.cred))
	if err != nil {
		return nil, err
	}
	p.proc = proc
	return proc, nil
}

// socketDir is empty (no socket) where the path would be too long for one.
func (p *Postgres) socketDir() string {
	if len(p.st.dir)+len("/.s.PGSQL.65535.lock") > 100 {
		return ""
	}
	return p.st.dir
}

// Stop stops the server and keeps its data: fast (running transactions are rolled
// back and the buffers are written), or immediate, which is a crash without the
// kill. It returns once the process is gone.
func (p *Postgres) Stop(immediate bool) error {
	if immediate {
		return p.end(syscall.SIGQUIT, 10*time.Second)
	}
	return p.end(syscall.SIGINT, 30*time.Second)
}

// Kill kills the postmaster (SIGKILL): a crash. It returns once the process is gone.
func (p *Postgres) Kill() error { return p.end(os.Kill, 0) }

func (p *Postgres) end(sig os.Signal, patience time.Duration) error {
	p.mu.Lock()
	proc := p.proc
	p.mu.Unlock()
	return proc.end(sig, patience)
}

// Close stops the server and removes its data. It may be called again.
func (p *Postgres) Close() error {
	return errors.Join(p.Stop(true), p.st.close())
}

func pingPostgres(ctx context.Context, url string) error {
	c, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	_, err = c.Exec(ctx, "SELECT 1")
	return errors.Join(err, c.Close(ctx))
}

// postgresBin returns the directory of a PostgreSQL server's programs, or "".
func postgresBin(given string) string {
	if given == "" {
		given = os.Getenv("PG_BIN")
	}
	var patterns []string
	if given != "" {
		patterns = []string{filepath.Join(given, "initdb")}
	} else {
		patterns = []string{"initdb", "/usr/lib/postgresql/*/bin/initdb", "/usr/pgsql-*/bin/initdb",
			"/opt/homebrew/opt/postgresql@*/bin/initdb", "/usr/local/opt/postgresql@*/bin/initdb",
			filepath.Join(npmPackage(), "native/bin/initdb")}
	}
	for _, pattern := range patterns {
		// PATH may hold a wrapper or a link: the server's other programs lie beside its target.
		found := firstExecutable(pattern)
		if real, err := filepath.EvalSymlinks(found); err == nil {
			found = real
		}
		if dir := filepath.Dir(found); found != "" && firstExecutable(filepath.Join(dir, "postgres")) != "" {
			return dir
		}
	}
	return ""
}

func sortedKeys(m map[string]string) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
