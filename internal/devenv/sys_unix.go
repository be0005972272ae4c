//go:build linux || darwin

package devenv

import (
	"errors"
	"fmt"
	"os"
	"os/user"
	"strconv"
	"syscall"
)

const localSupported = true

type credential = syscall.Credential

// tryLock takes the file's lock if it is free. The kernel gives it back when its
// process ends, however it ends.
func tryLock(f *os.File) (bool, error) {
	err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return false, nil
	}
	return err == nil, err
}

// ownedByUs refuses a directory that somebody else could have prepared.
func ownedByUs(dir string) error {
	fi, err := os.Lstat(dir)
	if err != nil {
		return err
	}
	st, ok := fi.Sys().(*syscall.Stat_t)
	switch {
	case !fi.IsDir():
		return errors.New("not a directory")
	case ok && int(st.Uid) != os.Geteuid():
		return fmt.Errorf("it belongs to user %d", st.Uid)
	case fi.Mode().Perm()&0o022 != 0:
		return errors.New("others may write to it")
	}
	return nil
}

// killTree kills the process and the group it leads.
func killTree(pid int) {
	_ = syscall.Kill(-pid, syscall.SIGKILL)
	_ = syscall.Kill(pid, syscall.SIGKILL)
}

// childAttr returns the attributes of a server: a process group of its own, so that
// a terminal's Ctrl-C reaches it only through us, and another user where cred says so.
func childAttr(cred *credential) *syscall.SysProcAttr {
	attr := &syscall.SysProcAttr{Setpgid: true, Credential: cred}
	dieWithParent(attr, syscall.SIGKILL)
	return attr
}

// unprivileged returns the user that PostgreSQL, which refuses root, is run as: nil
// (the same user) unless we are root.
func unprivileged() (*credential, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, err1 := strconv.ParseUint(u.Uid, 10, 32)
		gid, err2 := strconv.ParseUint(u.Gid, 10, 32)
		if err := errors.Join(err1, err2); err != nil {
			return nil, err
		}
		return &credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
	}
	return nil, errors.New("PostgreSQL refuses to run as root, and there is neither a user postgres nor nobody to run it as")
}

func chown(path string, cred *credential) error {
	if cred == nil {
		return nil
	}
	return os.Chown(path, int(cred.Uid), int(cred.Gid))
}
