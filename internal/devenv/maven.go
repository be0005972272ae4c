package devenv

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// jars is a server that comes as a set of Maven artifacts and runs on Java.
type jars struct {
	// name is the directory in the user's cache, with the version in it, so that
	// another version is another set.
	name string
	// dependencies is the inside of the pom's <dependencies>.
	dependencies string
}

// dir returns where the jars are or will be.
func (j jars) dir() string {
	base, err := os.UserCacheDir()
	if err != nil {
		base = "/var/cache"
	}
	return filepath.Join(base, "twiceproof", j.name)
}

// classpath returns the cached jars as an argument of java's -cp, or an error that
// wraps [ErrUnavailable].
func (j jars) classpath() (string, error) {
	found, err := filepath.Glob(filepath.Join(j.dir(), "*.jar"))
	if err != nil || len(found) == 0 {
		return "", fmt.Errorf("no jars in %s: %w", j.dir(), ErrUnavailable)
	}
	return filepath.Join(j.dir(), "*"), nil
}

// java returns the Java launcher of JAVA_HOME or PATH, or an error that wraps
// [ErrUnavailable].
func java() (string, error) {
	var home string
	if h := os.Getenv("JAVA_HOME"); h != "" {
		home = filepath.Join(h, "bin", "java")
	}
	if bin := firstExecutable(home, "java"); bin != "" {
		return bin, nil
	}
	return "", fmt.Errorf("no java in JAVA_HOME or PATH: %w", ErrUnavailable)
}

// installer downloads the jars with Maven into the user's cache; no root needed.
func (j jars) installer() installer {
	return installer{
		name: "mvn",
		usable: func() error {
			if _, err := java(); err != nil {
				return err
			}
			_, err := exec.LookPath("mvn")
			return err
		},
		install: func(ctx context.Context, o Options) error { return j.download(ctx, o) },
	}
}

// download fills a directory beside the final one and renames it: a half of the jars
// must not be taken for all.
func (j jars) download(ctx context.Context, o Options) (err error) {
	o.log().Info("downloading jars with Maven", "server", j.name, "into", j.dir())
	if err := os.MkdirAll(filepath.Dir(j.dir()), 0o755); err != nil {
		return err
	}
	tmp, err := os.MkdirTemp(filepath.Dir(j.dir()), j.name+".new-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	pom := filepath.Join(tmp, "pom.xml")
	text := `<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>` +
		`<groupId>twiceproof</groupId><artifactId>devenv</artifactId><version>1</version><dependencies>` +
		strings.TrimSpace(j.dependencies) + `</dependencies></project>`
	if err := os.WriteFile(pom, []byte(text), 0o644); err != nil {
		return err
	}
	lib := filepath.Join(tmp, "lib")
	if err := runInstaller(ctx, "mvn", "-q", "-B", "-f", pom, "dependency:copy-dependencies",
		"-DoutputDirectory="+lib, "-DincludeScope=runtime"); err != nil {
		return err
	}
	if err := os.Rename(lib, j.dir()); err != nil {
		if _, have := j.classpath(); have == nil {
			return nil // somebody else was faster
		}
		return err
	}
	return nil
}
