package devenv

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// RabbitMQConfig is what a private RabbitMQ node is started with.
type RabbitMQConfig struct {
	// Conf is appended to rabbitmq.conf, for example "consumer_timeout = 3000".
	Conf string
	// Advanced is the content of advanced.config, for example
	// "[{rabbit,[{channel_tick_interval,500}]}]." Empty means "[]."
	Advanced string
	// Plugins are enabled from the start, for example "rabbitmq_management".
	Plugins []string
	// Bin is the directory of rabbitmq-server and rabbitmqctl, not of Debian's
	// wrappers in /usr/sbin. Empty means the directory of $RABBITMQ_SERVER, then
	// /usr/lib/rabbitmq/bin, Homebrew's, then PATH.
	Bin string
}

// RabbitMQ is a private RabbitMQ node with an epmd of its own, everything on
// 127.0.0.1 and on ports and a directory of its own, with the user guest. Its
// methods are not for concurrent use; PID, URL and Ctl excepted.
type RabbitMQ struct {
	st    *state
	cfg   RabbitMQConfig
	env   []string
	port  int
	epmd  *process
	ports [3]int // AMQP, Erlang distribution, epmd

	mu   sync.Mutex
	node *process
}

// StartRabbitMQ starts a private node from local binaries and waits until it
// answers, which takes 5 to 10 seconds. It returns [ErrUnavailable] where there are
// none. ctx bounds the start alone; the node runs until Close.
func StartRabbitMQ(ctx context.Context, o Options, cfg RabbitMQConfig) (*RabbitMQ, error) {
	if !localSupported {
		return nil, errNoLocal
	}
	if cfg.Bin = rabbitBin(cfg.Bin); cfg.Bin == "" {
		return nil, fmt.Errorf("RabbitMQ (no rabbitmq-server in /usr/lib/rabbitmq/bin, Homebrew or PATH): %w", ErrUnavailable)
	}
	epmd := firstExecutable("epmd", "/usr/lib/erlang/bin/epmd", "/usr/lib/erlang/erts-*/bin/epmd", "/opt/homebrew/opt/erlang/lib/erlang/bin/epmd")
	if epmd == "" {
		return nil, fmt.Errorf("RabbitMQ (Erlang's epmd was not found in PATH): %w", ErrUnavailable)
	}
	st, err := newState(o, "rmq")
	if err != nil {
		return nil, err
	}
	r := &RabbitMQ{st: st, cfg: cfg}
	if err := r.create(ctx, epmd); err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return r, nil
}

func (r *RabbitMQ) create(ctx context.Context, epmd string) error {
	ports, err := freePorts(3)
	if err != nil {
		return err
	}
	r.port, r.ports = ports[0], [3]int(ports)
	if err := r.writeFiles(); err != nil {
		return err
	}
	r.env = r.environ()
	// The node would start an epmd that stays behind on 0.0.0.0:4369: give it one of
	// our own, in the foreground.
	cmd := exec.Command(epmd, "-address", "127.0.0.1", "-port", strconv.Itoa(r.ports[2]))
	cmd.Dir, cmd.Env = r.st.dir, r.env
	if r.epmd, err = start(r.st, "epmd", cmd, childAttr(nil)); err != nil {
		return err
	}
	err = r.epmd.await(ctx, func(ctx context.Context) error {
		c, err := new(net.Dialer).DialContext(ctx, "tcp", addr(r.ports[2]))
		if err != nil {
			return err
		}
		return c.Close()
	})
	if err != nil {
		return err
	}
	return r.Start(ctx)
}

func (r *RabbitMQ) writeFiles() error {
	for _, d := range []string{"home", "mnesia", "log", "gen"} {
		if err := os.Mkdir(filepath.Join(r.st.dir, d), 0o700); err != nil {
			return err
		}
	}
	advanced := r.cfg.Advanced
	if advanced == "" {
		advanced = "[]."
	}
	files := map[string]string{
		"home/.erlang.cookie": "twiceproof" + filepath.Base(r.st.dir),
		"enabled_plugins":     "[" + strings.Join(r.cfg.Plugins, ",") + "].\n",
		"advanced.config":     advanced + "\n",
		"rabbitmq.conf": "loopback_users = none\n" +
			"vm_memory_high_watermark.absolute = 1GB\ndisk_free_limit.absolute = 50MB\n" +
			"management.tcp.ip = 127.0.0.1\n" + r.cfg.Conf + "\n",
	}
	if len(r.cfg.Plugins) == 0 { // the key belongs to the management plugin
		files["rabbitmq.conf"] = strings.Replace(files["rabbitmq.conf"], "management.tcp.ip = 127.0.0.1\n", "", 1)
	}
	for name, text := range files {
		// Erlang refuses a cookie that others may read.
		if err := os.WriteFile(filepath.Join(r.st.dir, name), []byte(text), 0o400); err != nil {
			return err
		}
	}
	return nil
}

func (r *RabbitMQ) environ() []string {
	d := r.st.dir
	env := make([]string, 0, len(os.Environ())+16)
	for _, kv := range os.Environ() {
		// A variable of the caller's own RabbitMQ must not lead ours astray.
		if !strings.HasPrefix(kv, "RABBITMQ_") && !strings.HasPrefix(kv, "ERL_") && !strings.HasPrefix(kv, "HOME=") {
			env = append(env, kv)
		}
	}
	return append(env,
		"HOME="+d+"/home", // decides the cookie of the server and of rabbitmqctl
		"ERL_EPMD_ADDRESS=127.0.0.1", "ERL_EPMD_PORT="+strconv.Itoa(r.ports[2]),
		"RABBITMQ_NODENAME=t"+strconv.Itoa(r.port)+"@localhost",
		"RABBITMQ_NODE_IP_ADDRESS=127.0.0.1", "RABBITMQ_NODE_PORT="+strconv.Itoa(r.port),
		"RABBITMQ_DIST_PORT="+strconv.Itoa(r.ports[1]),
		"RABBITMQ_MNESIA_BASE="+d+"/mnesia", "RABBITMQ_LOG_BASE="+d+"/log", "RABBITMQ_PID_FILE="+d+"/pid",
		"RABBITMQ_ENABLED_PLUGINS_FILE="+d+"/enabled_plugins", "RABBITMQ_CONFIG_FILE="+d+"/rabbitmq.conf",
		"RABBITMQ_ADVANCED_CONFIG_FILE="+d+"/advanced.config", "RABBITMQ_GENERATED_CONFIG_DIR="+d+"/gen",
		"RABBITMQ_CONF_ENV_FILE=/dev/null",
		// Else the script stays as the parent and a kill would hit it, not the node.
		"RUNNING_UNDER_SYSTEMD=true",
		"RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS=-kernel inet_dist_use_interface {127,0,0,1}",
	)
}

func addr(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }

// URL returns the URL of the vhost "/"; it is the same after a restart.
func (r *RabbitMQ) URL() string { return "amqp://guest:guest@" + addr(r.port) + "/" }

// Addr returns host:port, for a proxy in front of the node.
func (r *RabbitMQ) Addr() string { return addr(r.port) }

// PID returns the node's process id, or 0 while it is stopped.
func (r *RabbitMQ) PID() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.node.alive() {
		return 0
	}
	return r.node.pid()
}

// Start starts a stopped or killed node again, on the same port and data, and waits
// until it answers. On a running one it only waits.
func (r *RabbitMQ) Start(ctx context.Context) error {
	node, err := r.spawn()
	if err != nil {
		return err
	}
	if err = node.await(ctx, func(ctx context.Context) error { return pingRabbitMQ(ctx, r.URL()) }); err != nil {
		return errors.Join(err, node.end(os.Kill, 0))
	}
	return nil
}

func (r *RabbitMQ) spawn() (*process, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.node.alive() {
		return r.node, nil
	}
	cmd := exec.Command(filepath.Join(r.cfg.Bin, "rabbitmq-server"))
	cmd.Dir, cmd.Env = r.st.dir, r.env
	node, err := start(r.st, "rabbitmq", cmd, childAttr(nil))
	if err != nil {
		return nil, err
	}
	r.node = node
	return node, nil
}

// Ctl runs rabbitmqctl against the node, for example
// Ctl(ctx, "close_all_connections", "chaos"), and returns what it printed. A call
// takes about half a second. One that did not reach the node has done nothing, and is
// made again a few times: on a busy machine the command line gives up early.
func (r *RabbitMQ) Ctl(ctx context.Context, args ...string) (string, error) {
	const tries = 5
	for try := 1; ; try++ {
		cmd := exec.CommandContext(ctx, filepath.Join(r.cfg.Bin, "rabbitmqctl"), append([]string{"-q"}, args...)...)
		cmd.Env, cmd.Dir = r.env, r.st.dir
		out, err := cmd.CombinedOutput()
		if err == nil {
			return string(out), nil
		}
		err = fmt.Errorf("rabbitmqctl %s: %w: %s", strings.Join(args, " "), err, out)
		if cmd.ProcessState.ExitCode() != exitUnavailable || try == tries {
			return string(out), err
		}
		select {
		case <-time.After(time.Duration(try) * 200 * time.Millisecond):
		case <-ctx.Done():
			return string(out), errors.Join(err, ctx.Err())
		}
	}
}

// exitUnavailable is rabbitmqctl's exit code (EX_UNAVAILABLE of sysexits.h) when it
// could not contact the node.
const exitUnavailable = 69

// Stop stops the node (SIGTERM) and keeps its data. It returns once the process is gone.
func (r *RabbitMQ) Stop() error { return r.end(syscall.SIGTERM, 30*time.Second) }

// Kill kills the node (SIGKILL): a crash. It returns once the process is gone.
func (r *RabbitMQ) Kill() error { return r.end(os.Kill, 0) }

func (r *RabbitMQ) end(sig os.Signal, patience time.Duration) error {
	r.mu.Lock()
	node := r.node
	r.mu.Unlock()
	return node.end(sig, patience)
}

// Close stops the node and its epmd and removes the data. Nothing of it is worth
// an orderly stop. It may be called again.
func (r *RabbitMQ) Close() error {
	return errors.Join(r.Kill(), r.epmd.end(syscall.SIGTERM, 5*time.Second), r.st.close())
}

// pingRabbitMQ opens a connection and a channel: the port is open before the node
// can serve one.
func pingRabbitMQ(ctx context.Context, url string) error {
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(pingTimeout)
	}
	c, err := amqp.DialConfig(url, amqp.Config{
		Dial: func(network, addr string) (net.Conn, error) {
			c, err := (&net.Dialer{Deadline: deadline}).DialContext(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			return c, c.SetDeadline(deadline)
		},
	})
	if err != nil {
		return err
	}
	ch, err := c.Channel()
	if err == nil {
		err = ch.Close()
	}
	return errors.Join(err, c.CloseDeadline(deadline))
}

// rabbitBin returns the directory of the real rabbitmq-server, or "". Debian's
// /usr/sbin/rabbitmq-server is a wrapper that changes the user and the log.
func rabbitBin(given string) string {
	if given != "" {
		return given
	}
	var patterns []string
	if s := os.Getenv("RABBITMQ_SERVER"); s != "" {
		patterns = append(patterns, s)
	}
	patterns = append(patterns, "/usr/lib/rabbitmq/bin/rabbitmq-server",
		"/opt/homebrew/opt/rabbitmq/sbin/rabbitmq-server", "/usr/local/opt/rabbitmq/sbin/rabbitmq-server", "rabbitmq-server")
	for _, pattern := range patterns {
		found := firstExecutable(pattern)
		if real, err := filepath.EvalSymlinks(found); err == nil {
			found = real
		}
		if dir := filepath.Dir(found); found != "" && firstExecutable(filepath.Join(dir, "rabbitmqctl")) != "" {
			return dir
		}
	}
	return ""
}
