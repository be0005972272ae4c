package devenv

import (
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestCtlCallsAgainOnlyWhenTheNodeWasNotReached(t *testing.T) {
	t.Parallel()
	if runtime.GOOS == "windows" {
		skip(t, "the stand-in for rabbitmqctl is a shell script")
	}
	dir := t.TempDir()
	script := `#!/bin/sh
echo call >> calls
case "$2" in
busy) [ "$(wc -l < calls)" -ge 3 ] && { echo done; exit 0; }; exit 69 ;;
esac
exit 64
`
	require.NoError(t, os.WriteFile(filepath.Join(dir, "rabbitmqctl"), []byte(script), 0o700))
	r := &RabbitMQ{st: &state{dir: dir}, cfg: RabbitMQConfig{Bin: dir}, env: os.Environ()}
	calls := func() int {
		b, err := os.ReadFile(filepath.Join(dir, "calls"))
		require.NoError(t, err)
		return strings.Count(string(b), "call")
	}
	out, err := r.Ctl(t.Context(), "busy")
	require.NoError(t, err)
	require.Equal(t, "done\n", out)
	require.Equal(t, 3, calls())
	_, err = r.Ctl(t.Context(), "wrong usage")
	require.ErrorContains(t, err, "exit status 64")
	require.Equal(t, 4, calls(), "a call that reached the node is not made again")
}
