package sqs

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/brokers/brokertest"
	"github.com/twiceproof/twiceproof/internal/sqsfake"
)

var exempt = map[string]string{
	"message/payload-nil-is-no-empty-payload": "SQS cannot tell a nil payload from an empty one",
}

// Both kinds of queue have other capabilities, and each of them is verified on a server
// that is not ours.
func TestConformanceOnElasticMQ(t *testing.T) {
	t.Parallel()
	for name, fifo := range map[string]bool{"standard": false, "fifo": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			brokertest.Run(t, brokertest.Config{
				Expected: "testdata/conformance-" + name + ".txt",
				Parallel: true, Exempt: exempt, Lease: 3 * time.Second, Wait: 30 * time.Second,
				New: func(t *testing.T) brokertest.Fixture { return fixtureOf(elastic(t, fifo, nil)) },
			})
		})
	}
}

func fixtureOf(r *rig) brokertest.Fixture {
	source, publisher := r.fixture()
	missing := strings.Replace(r.queue, "t_", "missing_", 1)
	return brokertest.Fixture{
		Destination: r.queue, Source: source, Publisher: publisher, Missing: missing,
		MissingSource: func() brokers.Source { return r.source(func(c *SourceConfig) { c.Queue = missing }) },
		Disconnect:    func(s brokers.Source) { r.disconnect(s.(*Source)) },
	}
}

// The same on the strict server in the process, whose clock is the bubble's.
func TestConformanceOnTheStrictServer(t *testing.T) {
	t.Parallel()
	for name, fifo := range map[string]bool{"standard": false, "fifo": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			brokertest.Run(t, brokertest.Config{
				Expected: "testdata/conformance-" + name + ".txt",
				Bubble:   synctest.Test,
				Parallel: true, Exempt: exempt, Lease: 3 * time.Second, Wait: 30 * time.Second,
				New: func(t *testing.T) brokertest.Fixture {
					return fixtureOf(newRig(t, "http://sqsfake", sqsfake.New(), fifo, nil))
				},
			})
		})
	}
}
