//go:build !linux && !darwin

package devenv

import (
	"os"
	"syscall"
)

// localSupported is false: starting and surely ending local servers is written for
// Linux and macOS. URLs and Docker work everywhere.
const localSupported = false

type credential struct{}

func tryLock(*os.File) (bool, error)             { return true, nil }
func ownedByUs(string) error                     { return nil }
func killTree(int)                               {}
func childAttr(*credential) *syscall.SysProcAttr { return nil }
func unprivileged() (*credential, error)         { return nil, errNoLocal }
func chown(string, *credential) error            { return nil }
func identify(int) (record, bool)                { return record{}, false }
