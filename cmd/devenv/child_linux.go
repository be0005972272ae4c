package main

import (
	"os/exec"
	"syscall"
)

// endWithUs asks the kernel to end the command when devenv is killed: its services
// are gone then.
func endWithUs(cmd *exec.Cmd) {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Pdeathsig = syscall.SIGTERM
}
