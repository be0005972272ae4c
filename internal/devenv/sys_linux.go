package devenv

import (
	"bytes"
	"os"
	"strconv"
	"strings"
	"syscall"
)

// dieWithParent lets the kernel send sig to the child when the thread that started
// it ends. Go's threads live as long as the process unless a goroutine that is
// locked to one returns, so never start a child from such a goroutine.
func dieWithParent(attr *syscall.SysProcAttr, sig syscall.Signal) { attr.Pdeathsig = sig }

// identify returns what tells a process from a later one with its pid.
func identify(pid int) (record, bool) {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return record{}, false
	}
	// The second field is the program's name in parentheses and may hold anything.
	at := bytes.LastIndexByte(stat, ')')
	fields := strings.Fields(string(stat[at+1:]))
	if len(fields) < 20 || fields[0] == "Z" {
		return record{}, false
	}
	boot, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return record{PID: pid, Start: fields[19], Boot: strings.TrimSpace(string(boot))}, true
}
