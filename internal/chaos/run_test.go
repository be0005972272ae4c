package chaos

import (
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
)

// Environment variables of the runs; docs/chaos.md tells of them.
const (
	envForm = "TWICEPROOF_CHAOS"      // "long"
	envSeed = "TWICEPROOF_CHAOS_SEED" // repeats the faults of a run, in their order
)

// planOf returns the short or the long form.
func planOf(t *testing.T) plan {
	t.Helper()
	if runtime.GOOS == "windows" {
		devtest.Skip(t, "no signals here")
	}
	seed := rand.Uint64N(1_000_000)
	if s := os.Getenv(envSeed); s != "" {
		var err error
		seed, err = strconv.ParseUint(s, 10, 64)
		require.NoError(t, err, envSeed)
	}
	p := plan{messages: 5_000, keys: 50, consumers: 2, relays: 2, seed: seed, ahead: 400,
		consumerKills: 3, cuts: 3, databaseStops: 1, relayKills: 1}
	if os.Getenv(envForm) == "long" {
		p = plan{messages: 100_000, keys: 500, consumers: 3, relays: 2, seed: seed, ahead: 1_000,
			consumerKills: 24, cuts: 24, databaseStops: 6, relayKills: 6, brokerKills: 2}
	}
	return p
}

// Consumers of one quorum queue: nobody promises an order, but every message has one
// effect.
func TestChaosOnRabbitMQ(t *testing.T) { runChaos(t, planOf(t), &rabbit{}) }

// With a single active consumer the first effects of every key are in the order in
// which its messages were enqueued.
func TestChaosOnRabbitMQInOrder(t *testing.T) { runChaos(t, planOf(t), &rabbit{single: true}) }
