package chaos

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"testing"
)

// childEnv makes the test binary another program: "crash", "consumer" or "relay".
// childConfigEnv is that program's configuration, as JSON.
const (
	childEnv       = "TWICEPROOF_CHAOS_CHILD"
	childConfigEnv = "TWICEPROOF_CHAOS_CONFIG"
)

func TestMain(m *testing.M) {
	kind := os.Getenv(childEnv)
	if kind == "" {
		os.Exit(m.Run())
	}
	if err := runChild(kind, []byte(os.Getenv(childConfigEnv))); err != nil {
		fmt.Fprintln(os.Stderr, "child:", err)
		os.Exit(3)
	}
}

func runChild(kind string, config []byte) error {
	switch kind {
	case "crash":
		var c crashConfig
		if err := json.Unmarshal(config, &c); err != nil {
			return err
		}
		return crashMain(context.Background(), c)
	case "poison":
		var c poisonConfig
		if err := json.Unmarshal(config, &c); err != nil {
			return err
		}
		return poisonMain(context.Background(), c)
	case "consumer", "relay":
		var c workerConfig
		if err := json.Unmarshal(config, &c); err != nil {
			return err
		}
		return workerMain(kind, c)
	}
	return fmt.Errorf("unknown kind of child %q", kind)
}
