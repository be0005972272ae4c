package chaos

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"
)

// tally is what all workers of a run have reported.
type tally struct {
	mu                      sync.Mutex
	done, held, redelivered int
	dead                    []string
	places                  map[string]bool // where the broker does not count
}

func (c *tally) add(kind byte, id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch kind {
	case reportDone:
		c.done++
	case reportHeld:
		c.held++
	case reportRedelivered:
		c.redelivered++
	case reportDelivered:
		if c.places[id] {
			c.redelivered++
		}
		if c.places == nil {
			c.places = map[string]bool{}
		}
		c.places[id] = true
	case reportDead:
		c.dead = append(c.dead, id)
	}
}

func (c *tally) processed() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.done
}

// process is a worker.
type process struct {
	kind   string
	cmd    *exec.Cmd
	stdin  io.Closer
	read   chan struct{} // closed at the end of its reports
	stderr *strings.Builder

	mu   sync.Mutex
	open map[string]bool // messages whose transaction has begun and not ended
	in   bool            // the broker has taken it
}

func startProcess(kind string, c workerConfig, all *tally) (*process, error) {
	config, err := json.Marshal(c)
	if err != nil {
		return nil, err
	}
	p := &process{kind: kind, cmd: exec.Command(os.Args[0]), read: make(chan struct{}), stderr: &strings.Builder{}, open: map[string]bool{}}
	p.cmd.Env = append(os.Environ(), childEnv+"="+kind, childConfigEnv+"="+string(config))
	p.cmd.Stderr = p.stderr
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if p.stdin, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	go func() { // ends with the process; kill and stop wait for it
		defer close(p.read)
		for s := bufio.NewScanner(out); s.Scan(); {
			if line := s.Text(); len(line) > 2 {
				p.heard(line[0], line[2:])
				all.add(line[0], line[2:])
			}
		}
	}()
	return p, nil
}

func (p *process) heard(kind byte, id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch kind {
	case reportOpened:
		p.in = true
	case reportBegun:
		p.open[id] = true
	case reportEnded, reportDone:
		delete(p.open, id)
	}
}

// joined tells whether the broker has taken the consumer.
func (p *process) joined() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.in
}

// inWork is the number of messages whose transaction is open.
func (p *process) inWork() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.open)
}

// kill ends the process by SIGKILL and returns how many transactions it had open.
func (p *process) kill() (int, error) {
	if err := p.cmd.Process.Kill(); err != nil {
		return 0, fmt.Errorf("%s had ended before it was killed: %w: %s", p.kind, err, p.stderr)
	}
	<-p.read
	_ = p.cmd.Wait()
	if s := p.cmd.ProcessState.String(); s != "signal: killed" {
		return 0, fmt.Errorf("%s was to be killed, but: %s: %s", p.kind, s, p.stderr)
	}
	return p.inWork(), nil
}

// ended reports whether the process has ended by itself.
func (p *process) ended() bool {
	select {
	case <-p.read:
		return true
	default:
		return false
	}
}

// stop ends the process in good order.
func (p *process) stop() error {
	defer p.stdin.Close() //nolint:errcheck // it has ended
	err := p.cmd.Process.Signal(syscall.SIGTERM)
	late := time.AfterFunc(40*time.Second, func() { _ = p.cmd.Process.Kill() })
	defer late.Stop()
	<-p.read
	if err = errors.Join(err, p.cmd.Wait()); err != nil {
		return fmt.Errorf("%s: %w: %s", p.kind, err, p.stderr)
	}
	return nil
}
