package devenv

import (
	"fmt"
	"os"
	"testing"
)

// skip is devtest's, which imports this package.
func skip(t *testing.T, why string) {
	t.Helper()
	fmt.Fprintf(os.Stderr, "SKIP %s: %s\n", t.Name(), why)
	t.Skip(why)
}
