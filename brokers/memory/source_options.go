package memory

import "time"

// SourceOption configures one Source.
type SourceOption func(*sourceOptions)

type sourceOptions struct {
	group    string
	span     int
	drain    time.Duration
	gapFails bool
	atEnd    bool
}

// Group is the consumer group of a topic's Source; "default" by default. Queues and
// channels have no groups: their Sources share the messages.
func Group(name string) SourceOption { return func(o *sourceOptions) { o.group = name } }

// MaxLaneSpan bounds how many messages of one partition are handed over from the
// oldest unfinished one on, finished or not: what a crash delivers again. Topics
// only; 0 means 1,000.
func MaxLaneSpan(n int) SourceOption { return func(o *sourceOptions) { o.span = n } }

// DrainFor is how long a topic's Source lets started messages finish when a
// rebalance takes its partitions. 0 means 10 s.
func DrainFor(d time.Duration) SourceOption { return func(o *sourceOptions) { o.drain = d } }

// FailOnGap makes Receive of a topic's Source fail with class Fatal when messages
// are gone that it has not read. By default it reports an EventGap and goes on at
// the oldest message there is.
func FailOnGap() SourceOption { return func(o *sourceOptions) { o.gapFails = true } }

// StartAtEnd makes a group that has no committed offset start with the messages
// that come, instead of the oldest there are. The place is committed when the
// partition is assigned, so that nothing is lost between.
func StartAtEnd() SourceOption { return func(o *sourceOptions) { o.atEnd = true } }
