//go:build unix

package main

import (
	"os"
	"os/exec"
	"syscall"

	"golang.org/x/sys/unix"
)

// handled are the signals that devenv passes on to the command.
var handled = []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT}

// child is the running command.
type child struct {
	cmd *exec.Cmd
	// tty: devenv and the command share the terminal's foreground group, so that the
	// command can read from it and Ctrl-Z stops both. The terminal then sends Ctrl-C
	// to both by itself.
	tty  bool
	seen bool
}

// prepare gives the command a process group of its own unless it shares the terminal.
func prepare(cmd *exec.Cmd) *child {
	c := &child{cmd: cmd, tty: foreground()}
	if !c.tty {
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	}
	endWithUs(cmd)
	return c
}

func foreground() bool {
	pgrp, err := unix.IoctlGetInt(int(os.Stdin.Fd()), unix.TIOCGPGRP)
	return err == nil && pgrp == unix.Getpgrp()
}

// forward passes a signal on, except the first one of those that the terminal has
// sent to the command already: a second copy would read as impatience.
func (c *child) forward(sig os.Signal) {
	s, ok := sig.(syscall.Signal)
	if !ok {
		return
	}
	if c.tty && (s == syscall.SIGINT || s == syscall.SIGQUIT) && !c.seen {
		c.seen = true
		return
	}
	c.signal(s)
}

func (c *child) kill() { c.signal(syscall.SIGKILL) }

func (c *child) signal(s syscall.Signal) {
	pid := c.cmd.Process.Pid
	if !c.tty {
		pid = -pid // the whole group: `go test` does not pass every signal on
	}
	_ = syscall.Kill(pid, s) // it may have ended just now
}

func signalNumber(sig os.Signal) int {
	if s, ok := sig.(syscall.Signal); ok {
		return int(s)
	}
	return 0
}

func exitCode(ps *os.ProcessState) int {
	if ws, ok := ps.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		return exitSignalBase + int(ws.Signal())
	}
	return ps.ExitCode()
}
