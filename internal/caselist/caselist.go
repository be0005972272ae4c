// Package caselist keeps the list of what a conformance suite ran, and of what did
// not apply with the reason, and compares it with a file that is checked in and read
// in review: nothing is skipped silently.
package caselist

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// List is the list of one run of a suite. The zero value is empty.
type List struct {
	lines []string
	ran   int
}

// Run adds a case that runs.
func (l *List) Run(name string) {
	l.lines = append(l.lines, "run  "+name)
	l.ran++
}

// NotApplicable adds a case that does not apply.
func (l *List) NotApplicable(name, why string) {
	l.lines = append(l.lines, fmt.Sprintf("n/a  %s: %s", name, why))
}

// Check prints how many cases ran and fails t if the list is not that of the file.
// With TWICEPROOF_UPDATE set it writes the file instead. Without a file the list is
// printed.
func (l *List) Check(t testing.TB, suite, file string) {
	t.Helper()
	t.Logf("%s: %d cases apply, %d do not", suite, l.ran, len(l.lines)-l.ran)
	if file == "" {
		t.Logf("%s: no file to compare with; the list is\n%s", suite, strings.Join(l.lines, "\n"))
		return
	}
	got := strings.Join(l.lines, "\n") + "\n"
	if os.Getenv("TWICEPROOF_UPDATE") != "" {
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatalf("%s: %v; write it with TWICEPROOF_UPDATE=1", suite, err)
	}
	if string(want) == got {
		return
	}
	was := strings.Split(strings.TrimSuffix(string(want), "\n"), "\n")
	t.Errorf("%s: the cases differ from %s (if that is meant: TWICEPROOF_UPDATE=1):\n%s", suite, file, diff(was, l.lines))
}

func diff(was, is []string) string {
	var d []string
	for _, s := range was {
		if !slices.Contains(is, s) {
			d = append(d, "- "+s)
		}
	}
	for _, s := range is {
		if !slices.Contains(was, s) {
			d = append(d, "+ "+s)
		}
	}
	return strings.Join(d, "\n")
}
