package main

import (
	"os"
	"os/exec"
)

var handled = []os.Signal{os.Interrupt}

type child struct{ cmd *exec.Cmd }

func prepare(cmd *exec.Cmd) *child { return &child{cmd} }

// forward does nothing: the console sends Ctrl-C to the command by itself.
func (c *child) forward(os.Signal)     {}
func (c *child) kill()                 { _ = c.cmd.Process.Kill() }
func signalNumber(os.Signal) int       { return 2 }
func exitCode(ps *os.ProcessState) int { return ps.ExitCode() }
