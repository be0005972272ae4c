// Package docs holds the documents. This file checks what they name.
package docs

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var (
	aTest   = regexp.MustCompile(`(?:Test|Benchmark|Fuzz)[A-Z][A-Za-z0-9]+`)
	declare = regexp.MustCompile(`(?m)^func ((?:Test|Benchmark|Fuzz)[A-Z][A-Za-z0-9]+)\(`)
	aCase   = regexp.MustCompile("`((?:claim|hold|retry|race|commit|tx)/[^`…]+)`")
	// aTestLink is a link whose text is a test.
	aTestLink = regexp.MustCompile("\\[`(Test[A-Za-z0-9]+)`\\]\\(([^)]+)\\)")
	aLink     = regexp.MustCompile(`\]\(([^)#]+)[^)]*\)`)
)

// A guarantee is worth its test: every test, every case of a suite and every file that
// a document names is there.
func TestWhatTheDocumentsNameExists(t *testing.T) {
	t.Parallel()
	tests, suites := map[string][]string{}, ""
	require.NoError(t, filepath.WalkDir("..", func(path string, e fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, ".go") {
			return err
		}
		src, err := os.ReadFile(path)
		for _, m := range declare.FindAllStringSubmatch(string(src), -1) {
			tests[m[1]] = append(tests[m[1]], filepath.Clean(path))
		}
		if strings.Contains(path, "inboxtest") {
			suites += string(src)
		}
		return err
	}))
	files, err := filepath.Glob("*.md")
	require.NoError(t, err)
	more, err := filepath.Glob("../*.md")
	require.NoError(t, err)
	named := 0
	for _, file := range append(files, more...) {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		for _, name := range aTest.FindAllString(string(text), -1) {
			found := len(tests[name]) > 0
			for full := range tests { // a pattern of -run
				found = found || strings.HasPrefix(full, name) && strings.Contains(string(text), "-run "+name)
			}
			if !found {
				t.Errorf("%s names %s, which does not exist", file, name)
			}
			named++
		}
		for _, m := range aCase.FindAllStringSubmatch(string(text), -1) {
			if !strings.Contains(suites, `"`+m[1]) {
				t.Errorf("%s names the case %q, which does not exist", file, m[1])
			}
			named++
		}
		for _, m := range aLink.FindAllStringSubmatch(string(text), -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			path := filepath.Join(filepath.Dir(file), m[1])
			if _, err := os.Stat(path); err != nil {
				t.Errorf("%s links to %s: %v", file, m[1], err)
			}
		}
		// A test that is linked is in the file that the link names.
		for _, m := range aTestLink.FindAllStringSubmatch(string(text), -1) {
			if path := filepath.Join(filepath.Dir(file), m[2]); !slices.Contains(tests[m[1]], path) {
				t.Errorf("%s links %s to %s; it is in %v", file, m[1], m[2], tests[m[1]])
			}
		}
	}
	require.Greater(t, named, 100)
}
