package kafka

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
)

const (
	defaultDrainFor   = 10 * time.Second
	defaultSession    = 30 * time.Second
	defaultRebalance  = 60 * time.Second
	defaultHeartbeat  = 2 * time.Second
	defaultWatch      = 30 * time.Second
	defaultSpan       = 1000
	defaultFetchBytes = 1 << 20
	defaultMissingFor = 60 * time.Second
	defaultStallAfter = 60 * time.Second
	defaultRoom       = 64
	defaultRoomBytes  = 64 << 20
	drainMargin       = 5 * time.Second // by which a drain ends before the rebalance timeout
)

// Start says where a group begins to read a partition that it has no offset for.
type Start uint8

const (
	// Earliest: at the oldest message there is.
	Earliest Start = iota
	// Latest: behind the newest message at that moment. The position is committed at
	// once, so that what comes later is not skipped by a rebalance.
	Latest
)

// GapPolicy says what to do when messages that were not read yet are gone.
type GapPolicy uint8

const (
	// GapSkip: report an EventGap and go on with the oldest message there is.
	GapSkip GapPolicy = iota
	// GapFail: report an EventGap and stop with an error of class Fatal.
	GapFail
)

// ResetPolicy says what to do when the committed offset lies beyond the end of the
// partition: the topic was made anew, or its log lost its end.
type ResetPolicy uint8

const (
	// ResetEarliest: report an EventGap and read from the start. What was processed
	// before is a duplicate.
	ResetEarliest ResetPolicy = iota
	// ResetLatest: report an EventGap and go on at the end.
	ResetLatest
	// ResetFail: report an EventGap and stop with an error of class Fatal.
	ResetFail
)

// SourceConfig configures a [Source]. Brokers, Group and Topics are required; every
// other zero value is ready.
type SourceConfig struct {
	// Brokers are the addresses (host:port) to start from. Those that answer tell the
	// others.
	Brokers []string
	// Security says how to connect: TLS, SASL, an own dialer or transport.
	Security Security

	// Group is the consumer group.
	Group string
	// Topics are the topics to consume. They must exist.
	Topics []string
	// Start is where the group begins on a partition without a committed offset. The
	// zero value is Earliest.
	Start Start
	// ReadUncommitted hands over messages of transactions that are open or aborted.
	ReadUncommitted bool
	// OnGap is what happens when the committed offset is older than the oldest message.
	// The zero value is GapSkip.
	OnGap GapPolicy
	// OnReset is what happens when the committed offset lies beyond the end. The zero
	// value is ResetEarliest.
	OnReset ResetPolicy

	// MaxLaneSpan bounds how many messages of a partition are handed over since the
	// oldest unfinished one, itself included: what a crash delivers again. 0 means 1000.
	MaxLaneSpan int
	// FetchBytes is the most that one fetch of one partition brings, compressed, and at
	// least one record batch. Where many partitions are assigned it is less, by
	// OpenOptions.RoomBytes. 0 means 1 MiB.
	FetchBytes int
	// MaxBatchBytes is the largest record batch that is read, decompressed: a few bytes
	// on the wire can be gigabytes in memory. A larger one is an error of class Fatal,
	// since nothing of its partition can come before it. 0 means 128 MiB.
	MaxBatchBytes int
	// DrainFor is how long started messages may still settle when partitions are about
	// to move. It must end 5 s before RebalanceTimeout does. 0 means 10 s.
	DrainFor time.Duration
	// SessionTimeout is how long the group waits for a member that is silent before it
	// gives its partitions to others. 0 means 30 s.
	SessionTimeout time.Duration
	// RebalanceTimeout is how long the group waits for its members in a rebalance. 0
	// means 60 s.
	RebalanceTimeout time.Duration
	// HeartbeatInterval is how often a member says that it lives; a rebalance is noticed
	// by it. 0 means 2 s, or a third of SessionTimeout if that is less.
	HeartbeatInterval time.Duration
	// WatchInterval is how often the topics are looked at for new partitions. 0 means
	// 30 s.
	WatchInterval time.Duration
	// StallAfter is how long a partition may be without a successful fetch before it is
	// an EventStalled and the Source starts afresh. 0 means 60 s.
	StallAfter time.Duration
	// MissingFor is how long a topic may be missing, or access denied, after Open before
	// Receive returns an error of class Fatal. 0 means 60 s.
	MissingFor time.Duration

	// ID tells a message's ID. Nil means the header "message-id". An error marks the
	// delivery as defective: it is kept as dead and never processed. It is called once
	// for each delivery and must be fast. [CloudEventsID] is one.
	ID func(m *brokers.Message) (string, error)
}

func (c SourceConfig) withDefaults() (SourceConfig, error) {
	var p problems
	c.Brokers = p.brokers(c.Brokers)
	p.check(c.Security)
	if c.Group == "" {
		p.add("Group is empty: set the name of the consumer group")
	}
	c.Topics = slices.Clone(c.Topics)
	slices.Sort(c.Topics)
	c.Topics = slices.Compact(c.Topics)
	if len(c.Topics) == 0 {
		p.add("Topics is empty: set the topics to consume")
	}
	for _, t := range c.Topics {
		p.topic(t)
	}
	if c.Start > Latest {
		p.add("Start %d is unknown: use Earliest or Latest", c.Start)
	}
	if c.OnGap > GapFail {
		p.add("OnGap %d is unknown: use GapSkip or GapFail", c.OnGap)
	}
	if c.OnReset > ResetFail {
		p.add("OnReset %d is unknown: use ResetEarliest, ResetLatest or ResetFail", c.OnReset)
	}
	c.MaxLaneSpan = count(&p, "MaxLaneSpan", c.MaxLaneSpan, defaultSpan)
	c.FetchBytes = count(&p, "FetchBytes", c.FetchBytes, defaultFetchBytes)
	c.MaxBatchBytes = count(&p, "MaxBatchBytes", c.MaxBatchBytes, 128<<20)
	c.SessionTimeout = count(&p, "SessionTimeout", c.SessionTimeout, defaultSession)
	c.RebalanceTimeout = count(&p, "RebalanceTimeout", c.RebalanceTimeout, defaultRebalance)
	c.HeartbeatInterval = count(&p, "HeartbeatInterval", c.HeartbeatInterval, min(defaultHeartbeat, c.SessionTimeout/3))
	c.DrainFor = count(&p, "DrainFor", c.DrainFor, min(defaultDrainFor, c.RebalanceTimeout/2))
	c.WatchInterval = count(&p, "WatchInterval", c.WatchInterval, defaultWatch)
	c.StallAfter = count(&p, "StallAfter", c.StallAfter, defaultStallAfter)
	c.MissingFor = count(&p, "MissingFor", c.MissingFor, defaultMissingFor)
	if c.HeartbeatInterval > c.SessionTimeout/2 {
		p.add("HeartbeatInterval is %s: it must be at most half of SessionTimeout (%s)", c.HeartbeatInterval, c.SessionTimeout)
	}
	if limit := max(c.RebalanceTimeout-drainMargin, c.RebalanceTimeout/2); c.DrainFor > limit {
		p.add("DrainFor is %s: it must be at most %s, before RebalanceTimeout (%s) ends", c.DrainFor, limit, c.RebalanceTimeout)
	}
	return c, p.err("kafka.SourceConfig")
}

// Compression names a codec for what is published.
type Compression string

// The codecs of Kafka. The zero Compression is Snappy.
const (
	NoCompression Compression = "none"
	Gzip          Compression = "gzip"
	Snappy        Compression = "snappy"
	LZ4           Compression = "lz4"
	Zstd          Compression = "zstd"
)

// PublisherConfig configures a [Publisher]. Brokers is required; every other zero
// value is ready.
type PublisherConfig struct {
	// Brokers are the addresses (host:port) to start from.
	Brokers []string
	// Security says how to connect: TLS, SASL, an own dialer or transport.
	Security Security
	// Timeout bounds one request. The broker gets half of it to reach all replicas. 0
	// means 10 s.
	Timeout time.Duration
	// Compression is the codec of record batches; the zero value is Snappy.
	Compression Compression
	// BatchMessages and BatchBytes bound one request to one partition. 0 means 500
	// messages and 900,000 bytes, both before compression.
	BatchMessages int
	BatchBytes    int
	// MaxMessageBytes is the largest message taken, its headers and key included and
	// before compression. The broker's own limit is message.max.bytes. 0 means 1,000,000.
	MaxMessageBytes int
	// MissingFor is how long a topic may be missing before messages to it are refused
	// with class Fatal instead of Retryable. 0 means 30 s.
	MissingFor time.Duration
	// Logger is where the Publisher logs. Nil means nowhere.
	Logger *slog.Logger
}

func (c PublisherConfig) withDefaults() (PublisherConfig, error) {
	var p problems
	c.Brokers = p.brokers(c.Brokers)
	p.check(c.Security)
	c.Timeout = count(&p, "Timeout", c.Timeout, 10*time.Second)
	c.Compression = cmp.Or(c.Compression, Snappy)
	if _, ok := codecs[c.Compression]; !ok {
		p.add("Compression %q is unknown: use none, gzip, snappy, lz4 or zstd", c.Compression)
	}
	c.BatchMessages = count(&p, "BatchMessages", c.BatchMessages, 500)
	c.BatchBytes = count(&p, "BatchBytes", c.BatchBytes, 900_000)
	c.MaxMessageBytes = count(&p, "MaxMessageBytes", c.MaxMessageBytes, 1_000_000)
	c.MissingFor = count(&p, "MissingFor", c.MissingFor, 30*time.Second)
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c, p.err("kafka.PublisherConfig")
}

// problems collects all mistakes of a configuration.
type problems []error

func (p *problems) add(format string, args ...any) { *p = append(*p, fmt.Errorf(format, args...)) }

func (p *problems) err(op string) error {
	if len(*p) == 0 {
		return nil
	}
	return brokers.NewFatal(op, errors.Join(*p...), "")
}

// count replaces zero by a default and takes nothing below it.
func count[N int | time.Duration](p *problems, name string, n, zero N) N {
	if n < 0 {
		p.add("%s is negative: %v", name, n)
	}
	return cmp.Or(n, zero)
}

func (p *problems) brokers(list []string) []string {
	if len(list) == 0 {
		p.add("Brokers is empty: set at least one host:port")
	}
	for _, b := range list {
		if !strings.Contains(b, ":") || strings.Contains(b, "://") || strings.ContainsAny(b, ", ") {
			p.add("broker %q is no host:port", b)
		}
	}
	return slices.Clone(list)
}

// topic checks a name by Kafka's own rule.
func (p *problems) topic(name string) {
	legal := func(r rune) bool {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '.' || r == '_' || r == '-'
	}
	if name == "" || len(name) > 249 || strings.ContainsFunc(name, func(r rune) bool { return !legal(r) }) {
		p.add("topic %q is no legal name: use 1 to 249 of a-z, A-Z, 0-9, '.', '_' and '-'", name)
	}
}
