package devenv

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// process is one running child.
type process struct {
	name string
	cmd  *exec.Cmd
	log  string
	st   *state
	done chan struct{} // closed once the child is reaped
	err  error         // set before done is closed
}

// start runs cmd as a direct child whose output goes to a file in the state's
// directory, and writes it down.
func start(st *state, name string, cmd *exec.Cmd, attr *syscall.SysProcAttr) (*process, error) {
	p := &process{name: name, cmd: cmd, st: st, log: filepath.Join(st.dir, name+".log"), done: make(chan struct{})}
	out, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	defer out.Close() //nolint:errcheck // the child has its own descriptor
	cmd.Stdout, cmd.Stderr, cmd.SysProcAttr = out, out, attr
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	go func() {
		p.err = cmd.Wait()
		close(p.done)
	}()
	id, _ := identify(cmd.Process.Pid)
	id.What, id.PID = name, cmd.Process.Pid
	if err := st.add(id); err != nil {
		return nil, errors.Join(err, p.end(os.Kill, 0))
	}
	return p, nil
}

// alive tells whether the child runs. A nil process does not.
func (p *process) alive() bool {
	if p == nil {
		return false
	}
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

func (p *process) pid() int {
	if p == nil {
		return 0
	}
	return p.cmd.Process.Pid
}

// end sends sig, and after patience a kill, and waits until the child is reaped.
func (p *process) end(sig os.Signal, patience time.Duration) error {
	if p == nil {
		return nil
	}
	if p.alive() {
		if err := p.cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
			return fmt.Errorf("signal %s: %w", p.name, err)
		}
		if sig != os.Kill {
			select {
			case <-p.done:
			case <-time.After(patience):
				_ = p.cmd.Process.Kill()
			}
		}
	}
	<-p.done
	return p.st.remove(p.pid())
}

// await pings until the child answers. It returns early, with the end of the
// child's log, when the child ends.
func (p *process) await(ctx context.Context, ping func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, bootTimeout)
	defer cancel()
	tick := time.NewTicker(pingEvery)
	defer tick.Stop()
	for {
		pctx, cancel := context.WithTimeout(ctx, pingTimeout)
		err := ping(pctx)
		cancel()
		if err == nil {
			return nil
		}
		select {
		case <-p.done:
			return fmt.Errorf("%s ended while it started: %w%s", p.name, orExit0(p.err), p.tail())
		case <-ctx.Done():
			return fmt.Errorf("%s does not answer: %w: %w%s", p.name, context.Cause(ctx), err, p.tail())
		case <-tick.C:
		}
	}
}

func orExit0(err error) error {
	if err == nil {
		return errors.New("exit status 0")
	}
	return err
}

// tail returns the last lines of the child's log.
func (p *process) tail() string {
	if lines := tailOf(p.log); lines != "" {
		return "\nthe last lines of its log:" + lines
	}
	return ""
}

// tailOf returns the last lines of a file, indented, each after a line break.
func tailOf(file string) string {
	b, err := os.ReadFile(file)
	if err != nil || len(b) == 0 {
		return ""
	}
	lines := bytes.Split(bytes.TrimSpace(b), []byte("\n"))
	if len(lines) > 15 {
		lines = lines[len(lines)-15:]
	}
	return "\n  " + strings.ToValidUTF8(string(bytes.Join(lines, []byte("\n  "))), "?")
}

// freePorts returns n ports of 127.0.0.1 that nobody listens on at the moment.
func freePorts(n int) ([]int, error) {
	ports := make([]int, n)
	for i := range ports {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer l.Close() //nolint:errcheck // held until all are drawn, so that they differ
		ports[i] = l.Addr().(*net.TCPAddr).Port
	}
	return ports, nil
}

// firstExecutable returns the first path that can be run. A path without a slash is
// looked up in PATH; patterns take the highest version that matches.
func firstExecutable(patterns ...string) string {
	for _, p := range patterns {
		if p == "" {
			continue
		}
		if !strings.ContainsRune(p, filepath.Separator) {
			if found, err := exec.LookPath(p); err == nil {
				return found
			}
			continue
		}
		found, _ := filepath.Glob(p) // the patterns are ours
		best := ""
		for _, f := range found {
			if fi, err := os.Stat(f); err != nil || fi.IsDir() || fi.Mode()&0o111 == 0 {
				continue
			}
			if best == "" || compareVersions(f, best) > 0 {
				best = f
			}
		}
		if best != "" {
			return best
		}
	}
	return ""
}

// compareVersions compares two paths with their numbers as numbers, as `sort -V`
// does: /usr/lib/postgresql/17 is more than /usr/lib/postgresql/9.
func compareVersions(a, b string) int {
	for a != "" && b != "" {
		na, ra := leadingNumber(a)
		nb, rb := leadingNumber(b)
		if na >= 0 && nb >= 0 {
			if na != nb {
				return na - nb
			}
			a, b = ra, rb
			continue
		}
		if a[0] != b[0] {
			return int(a[0]) - int(b[0])
		}
		a, b = a[1:], b[1:]
	}
	return len(a) - len(b)
}

// leadingNumber cuts the digits off s; -1 if it starts with none.
func leadingNumber(s string) (n int, rest string) {
	end := 0
	for end < len(s) && s[end] >= '0' && s[end] <= '9' {
		end++
	}
	n, err := strconv.Atoi(s[:end])
	if err != nil {
		return -1, s
	}
	return n, s[end:]
}
