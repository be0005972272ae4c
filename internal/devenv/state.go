package devenv

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
)

// record identifies a process beyond its pid, which is used again.
type record struct {
	What  string `json:"what"`
	PID   int    `json:"pid"`
	Start string `json:"start"`
	Boot  string `json:"boot"`
	// Compose is the name of a compose project instead of a process.
	Compose string `json:"compose,omitempty"`
	File    string `json:"file,omitempty"`
}

// state is what one running server keeps on disk: a directory, and beside it a
// file with the processes of the server, locked for as long as its owner lives.
type state struct {
	dir  string
	path string

	mu      sync.Mutex
	file    *os.File
	records []record
}

// newState sweeps away what dead owners left behind and makes a state of its own.
func newState(o Options, service string) (*state, error) {
	root, err := o.stateDir()
	if err != nil {
		return nil, err
	}
	sweep(root, o)
	var b [4]byte
	_, _ = rand.Read(b[:]) // never fails
	id := service + "-" + hex.EncodeToString(b[:])
	s := &state{dir: filepath.Join(root, id), path: filepath.Join(root, id+".lock")}
	// Locked before it has the name that sweepers look for: none can take it first.
	young := s.path + ".new"
	if s.file, err = os.OpenFile(young, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600); err != nil {
		return nil, err
	}
	ok, err := tryLock(s.file)
	if err == nil && !ok {
		err = errors.New("locked by another process")
	}
	if err == nil {
		err = os.Rename(young, s.path)
	}
	if err == nil {
		err = os.Mkdir(s.dir, 0o711)
	}
	if err != nil {
		_ = os.Remove(young)
		return nil, errors.Join(fmt.Errorf("make the state %s: %w", id, err), s.close())
	}
	return s, nil
}

// add writes a record down, so that a later start can end its process.
func (s *state) add(r record) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.records = append(s.records, r)
	return s.write()
}

// remove forgets the process.
func (s *state) remove(pid int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.records = slices.DeleteFunc(s.records, func(r record) bool { return r.PID == pid && r.Compose == "" })
	return s.write()
}

func (s *state) write() error {
	if s.file == nil {
		return nil
	}
	var buf []byte
	for _, r := range s.records {
		line, err := json.Marshal(r)
		if err != nil {
			return err
		}
		buf = append(append(buf, line...), '\n')
	}
	if err := s.file.Truncate(0); err != nil {
		return err
	}
	_, err := s.file.WriteAt(buf, 0)
	return err
}

// close removes everything. Its processes must have ended.
func (s *state) close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.file == nil {
		return nil
	}
	err := errors.Join(removeAll(s.dir), os.Remove(s.path), s.file.Close())
	s.file = nil
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// removeAll retries for a moment: a killed server's children may still write.
func removeAll(dir string) error {
	var err error
	for range 20 {
		if err = os.RemoveAll(dir); err == nil {
			return nil
		}
		time.Sleep(50 * time.Millisecond)
	}
	return err
}

// sweep ends the processes of owners that are gone and removes their states. What
// it cannot remove it leaves to the next sweep.
func sweep(root string, o Options) {
	if !localSupported {
		return // no locks, so nobody can tell whose owner is gone
	}
	locks, _ := filepath.Glob(filepath.Join(root, "*.lock")) // the pattern is well formed
	for _, path := range locks {
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			continue
		}
		if ok, err := tryLock(f); err != nil || !ok {
			_ = f.Close()
			continue
		}
		for _, r := range readRecords(f) {
			o.log().Info("ending a leftover of a devenv that was killed", "what", r.What, "pid", r.PID)
			endLeftover(r)
		}
		if err := removeAll(strings.TrimSuffix(path, ".lock")); err == nil {
			_ = os.Remove(path)
		}
		_ = f.Close()
	}
}

func readRecords(f io.Reader) []record {
	var rs []record
	for dec := json.NewDecoder(f); ; {
		var r record
		if dec.Decode(&r) != nil {
			return rs
		}
		rs = append(rs, r)
	}
}

func endLeftover(r record) {
	if r.Compose != "" {
		composeDown(r.Compose, r.File)
		return
	}
	id, ok := identify(r.PID)
	if !ok || id.Start != r.Start || id.Boot != r.Boot {
		return // the pid is somebody else's now
	}
	killTree(r.PID)
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		if now, ok := identify(r.PID); !ok || now.Start != r.Start {
			return
		}
	}
}

// logs returns the last lines of all logs in the directory.
func (s *state) logs() string {
	files, err := filepath.Glob(filepath.Join(s.dir, "*.log"))
	if err != nil {
		return err.Error()
	}
	var text strings.Builder
	for _, f := range files {
		if tail := tailOf(f); tail != "" {
			text.WriteString(filepath.Base(f) + ":" + tail + "\n")
		}
	}
	return text.String()
}

// Logs returns the last lines of the server's logs.
func (p *Postgres) Logs() string { return p.st.logs() }

// Logs returns the last lines of the server's logs.
func (r *RabbitMQ) Logs() string { return r.st.logs() }

// Logs returns the last lines of the server's logs.
func (k *Kafka) Logs() string { return k.st.logs() }

// Logs returns the last lines of the server's logs.
func (s *SQS) Logs() string { return s.st.logs() }
