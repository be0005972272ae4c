package devenv

import (
	"os/exec"
	"strconv"
	"strings"
	"syscall"
)

// dieWithParent does nothing: there is no such service on macOS. The next start
// ends what a killed owner left.
func dieWithParent(*syscall.SysProcAttr, syscall.Signal) {}

// identify returns what tells a process from a later one with its pid.
func identify(pid int) (record, bool) {
	out, err := exec.Command("ps", "-o", "stat=,lstart=", "-p", strconv.Itoa(pid)).Output()
	stat, start, ok := strings.Cut(strings.TrimSpace(string(out)), " ")
	if err != nil || !ok || strings.HasPrefix(stat, "Z") {
		return record{}, false
	}
	boot, _ := exec.Command("sysctl", "-n", "kern.boottime").Output()
	return record{PID: pid, Start: strings.TrimSpace(start), Boot: strings.TrimSpace(string(boot))}, true
}
