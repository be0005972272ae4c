// Package examples holds runnable programs. This file checks what they compile.
package examples

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// sdks are the modules that belong to one adapter each.
var sdks = map[string]string{
	"kafka":    "github.com/segmentio/kafka-go",
	"rabbitmq": "github.com/rabbitmq/amqp091-go",
	"sqs":      "github.com/aws/",
	"sqlite":   "modernc.org/sqlite",
}

// Who uses one broker compiles no SDK of another one, nor a database driver of the
// demo's; and nobody compiles what only tests use.
func TestAnExampleCompilesItsOwnSDKAlone(t *testing.T) {
	t.Parallel()
	for path, want := range map[string][]string{
		"./quickstart":      {"sqlite"},
		"./prices":          {"sqlite"},
		"./wallet/memory":   nil,
		"./wallet/kafka":    {"kafka"},
		"./wallet/rabbitmq": {"rabbitmq"},
		"./wallet/sqs":      {"sqs"},
	} {
		t.Run(path, func(t *testing.T) {
			t.Parallel()
			out, err := exec.Command("go", "list", "-deps", path).Output()
			require.NoError(t, err)
			var got []string
			for name, module := range sdks {
				if strings.Contains(string(out), module) {
					got = append(got, name)
				}
			}
			assert.ElementsMatch(t, want, got)
			for _, module := range []string{"github.com/stretchr/", "github.com/twmb/", "go.uber.org/goleak", "pgregory.net/rapid"} {
				assert.NotContains(t, string(out), module, "used by tests only")
			}
		})
	}
}

// The adapters never import each other, and each brings its own SDK only.
func TestAdaptersAreApart(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"kafka", "rabbitmq", "sqs", "memory"} {
		out, err := exec.Command("go", "list", "-deps", "../brokers/"+name).Output()
		require.NoError(t, err)
		for other, module := range sdks {
			if other != name {
				assert.NotContains(t, string(out), module, "brokers/%s compiles the SDK of %s", name, other)
				assert.NotContains(t, string(out), "/brokers/"+other+"\n", "brokers/%s imports brokers/%s", name, other)
			}
		}
	}
}
