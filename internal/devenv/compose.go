package devenv

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

const (
	dockerInfoTimeout = 2 * time.Second  // a client without an engine is common, and may hang
	composeUpTimeout  = 60 * time.Second // images may have to be pulled; else the next rung
	composeEndTimeout = 60 * time.Second
)

// compose runs this repository's docker-compose.yml.
type compose struct {
	file    string
	project string // empty: the one that docker compose derives itself
}

// findCompose returns the repository's compose file if there is one above the
// working directory and a Docker engine answers.
func findCompose(ctx context.Context) (compose, error) {
	file := composeFile()
	if file == "" {
		return compose{}, errors.New("no docker-compose.yml beside a go.mod above the working directory")
	}
	if _, err := exec.LookPath("docker"); err != nil {
		return compose{}, errors.New("no docker in PATH")
	}
	ctx, cancel := context.WithTimeout(ctx, dockerInfoTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, "docker", "info", "--format", "{{.ServerVersion}}")
	cmd.WaitDelay = 100 * time.Millisecond
	// The exit code tells, not the program: a client without an engine fails here.
	if err := cmd.Run(); err != nil {
		return compose{}, fmt.Errorf("no Docker engine answers `docker info`: %w", err)
	}
	return compose{file: file}, nil
}

func composeFile() string {
	dir, err := os.Getwd()
	if err != nil {
		return ""
	}
	for ; ; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			file := filepath.Join(dir, "docker-compose.yml")
			if _, err := os.Stat(file); err == nil {
				return file
			}
		}
		if dir == filepath.Dir(dir) {
			return ""
		}
	}
}

func (c compose) run(ctx context.Context, env []string, args ...string) (string, error) {
	all := []string{"compose", "-f", c.file}
	if c.project != "" {
		all = append(all, "-p", c.project)
	}
	cmd := exec.CommandContext(ctx, "docker", append(all, args...)...)
	cmd.Env = append(os.Environ(), env...)
	cmd.WaitDelay = time.Second
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		if cause := context.Cause(ctx); cause != nil {
			err = cause
		}
		return "", fmt.Errorf("docker compose %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return strings.TrimSpace(string(out)), nil
}

// address returns where the service's port is published; an error if it does not run.
func (c compose) address(ctx context.Context, service, port string) (string, error) {
	out, err := c.run(ctx, nil, "port", service, port)
	if err != nil {
		return "", err
	}
	line, _, _ := strings.Cut(out, "\n")
	host, p, err := net.SplitHostPort(strings.TrimSpace(line))
	if err != nil || p == "0" {
		return "", fmt.Errorf("compose service %s is not running", service)
	}
	if host == "" || host == "0.0.0.0" || host == "::" {
		host = "127.0.0.1"
	}
	return net.JoinHostPort(host, p), nil
}

// composeServer is one service of a project that we started.
type composeServer struct {
	c   compose
	st  *state
	url string
}

func (s *composeServer) URL() string { return s.url }

func (s *composeServer) Close() error {
	return errors.Join(composeDown(s.c.project, s.c.file), s.st.close())
}

func composeDown(project, file string) error {
	ctx, cancel := context.WithTimeout(context.Background(), composeEndTimeout)
	defer cancel()
	_, err := compose{file: file, project: project}.run(ctx, nil, "down", "--volumes", "--timeout", "2")
	return err
}

// up starts one service as a project of its own, on random ports, so that neither a
// project that somebody runs nor a second devenv is touched.
func (c compose) up(ctx context.Context, o Options, s Service) (server, error) {
	st, err := newState(o, "compose-"+s.Name)
	if err != nil {
		return nil, err
	}
	c.project = "twiceproof-" + filepath.Base(st.dir)
	srv := &composeServer{c: c, st: st}
	if err := st.add(record{What: "compose project", Compose: c.project, File: c.file}); err != nil {
		return nil, errors.Join(err, st.close())
	}
	ctx, cancel := context.WithTimeoutCause(ctx, composeUpTimeout, fmt.Errorf("not up within %s", composeUpTimeout))
	defer cancel()
	var ports []string // 0: any free one
	for _, name := range s.composePortEnv {
		ports = append(ports, name+"=0")
	}
	_, err = c.run(ctx, ports, "up", "--detach", "--wait", "--quiet-pull", s.composeName)
	if err != nil {
		return nil, errors.Join(err, srv.Close())
	}
	hostPort, err := c.address(ctx, s.composeName, s.composePort)
	if err != nil {
		return nil, errors.Join(err, srv.Close())
	}
	srv.url = s.composeURL(hostPort)
	return srv, nil
}
