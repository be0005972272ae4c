package kafka

import (
	"context"
	"fmt"
	"maps"
	"strconv"
	"time"

	"github.com/segmentio/kafka-go"

	"github.com/twiceproof/twiceproof/brokers"
)

// watch looks for new partitions and for topics that are gone. Every member watches:
// the group assigns anew only when its leader joins again.
func (s *Source) watch(ctx context.Context, counts map[string]int) {
	var missingSince time.Time
	for {
		pause := s.cfg.WatchInterval
		if !missingSince.IsZero() {
			pause = min(pause, time.Second)
		}
		t := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			t.Stop()
			return
		case <-t.C:
		case <-s.lookNow:
			t.Stop()
		}
		s.mu.Lock()
		c, g := s.c, s.gen
		s.mu.Unlock()
		now, err := c.partitions(ctx, s.cfg.Topics)
		if err != nil {
			if brokers.ClassOf(classify("", err)) == brokers.Fatal {
				s.refused(classify("look at the topics", err))
			}
			continue
		}
		if missing := s.missing(now); len(missing) > 0 {
			if missingSince.IsZero() {
				missingSince = time.Now()
				s.log.Error("a topic is missing", "topics", missing)
			}
			if time.Since(missingSince) >= s.cfg.MissingFor {
				s.fail(missingTopic(brokers.Fatal, fmt.Sprintf("consume as group %q", s.cfg.Group), missing...))
				return
			}
			continue
		}
		back := !missingSince.IsZero()
		missingSince = time.Time{}
		if back || !maps.Equal(now, counts) {
			counts = now
			if g != nil {
				g.restart("the topics' partitions have changed")
			}
		}
	}
}

// look asks watch to look soon.
func (s *Source) look() {
	select {
	case s.lookNow <- struct{}{}:
	default:
	}
}

// horizon returns how long the topics keep messages: their retention, and a segment
// that is written to before it can go. 0 when the broker does not tell.
func (c *client) horizon(ctx context.Context, topics []string) time.Duration {
	req := &kafka.DescribeConfigsRequest{}
	for _, t := range topics {
		req.Resources = append(req.Resources, kafka.DescribeConfigRequestResource{
			ResourceType: kafka.ResourceTypeTopic, ResourceName: t,
			ConfigNames: []string{"cleanup.policy", "retention.ms", "segment.ms"},
		})
	}
	res, err := c.DescribeConfigs(ctx, req)
	if err != nil || len(res.Resources) != len(topics) {
		return 0
	}
	var longest time.Duration
	for _, r := range res.Resources {
		if r.Error != nil {
			return 0
		}
		v := map[string]string{}
		for _, e := range r.ConfigEntries {
			v[e.ConfigName] = e.ConfigValue
		}
		retention, err1 := strconv.ParseInt(v["retention.ms"], 10, 64)
		segment, err2 := strconv.ParseInt(v["segment.ms"], 10, 64)
		switch {
		case err1 != nil || err2 != nil:
			return 0
		case v["cleanup.policy"] == "compact" || retention < 0:
			return brokers.Unlimited
		}
		const most = int64(100 * 365 * 24 * time.Hour / time.Millisecond)
		longest = max(longest, time.Duration(min(retention, most)+min(segment, most))*time.Millisecond)
	}
	return longest
}
