package kafka

import (
	"testing"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/brokers/brokertest"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
)

func TestConformance(t *testing.T) {
	t.Parallel()
	for name, partitions := range map[string]int{"one-partition": 1, "four-partitions": 4} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			brokertest.Run(t, brokertest.Config{
				Expected: "testdata/conformance.txt",
				Parallel: true, Wait: 30 * time.Second, Lease: 3 * time.Second,
				New: func(t *testing.T) brokertest.Fixture { return newRig(t, partitions).fixture() },
			})
		})
	}
}

func (r *rig) fixture() brokertest.Fixture {
	missing := devtest.Name("missing")
	return brokertest.Fixture{
		Destination: r.topic,
		Source:      func() brokers.Source { return r.make() },
		Publisher: func() brokers.Publisher {
			p, err := NewPublisher(PublisherConfig{Brokers: r.brokers})
			if err != nil {
				r.t.Fatal(err)
			}
			return p
		},
		Missing:       missing,
		MissingSource: func() brokers.Source { return r.make(func(c *SourceConfig) { c.Topics = []string{missing} }) },
		Disconnect:    func(s brokers.Source) { r.evict(s.(*Source)) },
		PublishIDs:    r.publishIDs,
	}
}
