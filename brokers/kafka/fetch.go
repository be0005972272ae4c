package kafka

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"
	"github.com/segmentio/kafka-go/protocol/fetch"

	"github.com/twiceproof/twiceproof/brokers"
)

const (
	// fetchWait is how long the broker waits for the first message.
	fetchWait = 500 * time.Millisecond
	// minBackoff and maxBackoff bound the pauses after failures.
	minBackoff = 100 * time.Millisecond
	maxBackoff = 5 * time.Second
)

// abortMarker is the type of the control record that ends an aborted transaction.
const abortMarker = 0

// errRestart: what is known about the partition is not true any more.
var errRestart = errors.New("the partition's log is another one")

// run reads the partition until ctx ends, and never gives up by itself. at is the
// committed offset, negative if there is none.
func (l *lane) run(ctx context.Context, at int64) {
	for try := 0; ; try++ {
		err := l.resolve(ctx, at)
		if err == nil {
			break
		}
		if !l.failed(ctx, err, try) {
			return
		}
	}
	suspect := false // the topic was missing: it may be another one when it is back
	for try := 0; ctx.Err() == nil; {
		if l.full() {
			select {
			case <-l.wake:
			case <-ctx.Done():
			}
			continue
		}
		err := l.fetch(ctx)
		if err == nil {
			if suspect {
				l.g.restart("a topic was missing")
				return
			}
			try = 0
			continue
		}
		if errors.Is(err, errRestart) {
			l.g.restart("an offset is out of range")
			return
		}
		if isCode(err, kafka.UnknownTopicOrPartition) {
			suspect = true
			l.g.s.look()
		}
		if !l.failed(ctx, err, try) {
			return
		}
		try++
	}
}

// failed notes an error and waits; false when ctx ended.
func (l *lane) failed(ctx context.Context, err error, try int) bool {
	if ctx.Err() != nil {
		return false
	}
	s := l.g.s
	s.mu.Lock()
	l.fetchErr = err
	s.mu.Unlock()
	if brokers.ClassOf(classify("", err)) == brokers.Fatal {
		s.refused(classify("read "+l.name.Name, err))
	}
	s.log.Warn("cannot read; trying again", "lane", l.name.Name, "try", try+1, "error", err)
	return sleep(ctx, backoff(try))
}

// backoff is full jitter over a delay that doubles, never quite nothing.
func backoff(n int) time.Duration {
	d := maxBackoff
	if n < 6 {
		d = min(minBackoff<<n, maxBackoff)
	}
	return max(rand.N(d), minBackoff/2)
}

// sleep returns false when ctx ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// resolve decides where to begin, and commits a position that was not the group's own:
// resolved anew in each generation, Latest would skip what comes between.
func (l *lane) resolve(ctx context.Context, at int64) error {
	s := l.g.s
	first, last, err := l.bounds(ctx)
	if err != nil {
		return err
	}
	pos, committed := at, at
	switch {
	case at < 0:
		committed = none
		if pos = first; s.cfg.Start == Latest {
			pos = last
		}
		s.log.Info("the group has no offset for the partition", "lane", l.name.Name, "start", pos)
	case at < first:
		pos = first
		if l.gap(at, first); s.cfg.OnGap == GapFail {
			return s.gapFails(l, at, first)
		}
	case at > last:
		committed = none
		if pos = first; s.cfg.OnReset == ResetLatest {
			pos = last
		}
		if l.gap(at, pos); s.cfg.OnReset == ResetFail {
			return s.gapFails(l, at, pos)
		}
	}
	s.mu.Lock()
	l.start(pos, committed)
	l.end = last
	s.mu.Unlock()
	if pos == committed {
		return nil
	}
	for try := 0; ; try++ {
		err := l.g.commit(ctx, false)
		if err == nil || errors.Is(err, brokers.ErrOwnershipLost) {
			return nil
		}
		if !l.failed(ctx, err, try) {
			return nil
		}
	}
}

// bounds asks for the first offset there is and for the next one to be written.
func (l *lane) bounds(ctx context.Context) (first, last int64, err error) {
	res, err := l.g.c.ListOffsets(ctx, &kafka.ListOffsetsRequest{Topics: map[string][]kafka.OffsetRequest{
		l.topic: {kafka.FirstOffsetOf(l.num), kafka.LastOffsetOf(l.num)},
	}})
	if err != nil {
		return 0, 0, err
	}
	for _, p := range res.Topics[l.topic] {
		if p.Partition == l.num {
			return p.FirstOffset, p.LastOffset, p.Error
		}
	}
	return 0, 0, fmt.Errorf("no answer for partition %s", l.name.Name)
}

// gap reports messages that are gone.
func (l *lane) gap(from, to int64) {
	s := l.g.s
	s.log.Error("messages are gone before they were read", "lane", l.name.Name, "from", from, "to", to)
	s.emit(brokers.Event{Kind: brokers.EventGap, Lane: l.name, From: from, To: to})
}

// fetch reads once. It returns nil also when there is nothing new.
func (l *lane) fetch(ctx context.Context) error {
	s := l.g.s
	pos := l.position()
	call, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	isolation := int8(1)
	if s.cfg.ReadUncommitted {
		isolation = 0
	}
	res, err := l.g.c.rt.RoundTrip(call, l.g.c.Addr, &fetch.Request{
		ReplicaID: -1, MaxWaitTime: int32(fetchWait.Milliseconds()), MinBytes: 1, MaxBytes: int32(l.g.fetchBytes),
		IsolationLevel: isolation, SessionID: -1, SessionEpoch: -1,
		Topics: []fetch.RequestTopic{{Topic: l.topic, Partitions: []fetch.RequestPartition{{
			Partition: int32(l.num), CurrentLeaderEpoch: -1, FetchOffset: pos, LogStartOffset: -1, PartitionMaxBytes: int32(l.g.fetchBytes),
		}}}},
	})
	if err != nil {
		return causeOf(call, err)
	}
	r, ok := res.(*fetch.Response)
	switch {
	case !ok || len(r.Topics) != 1 || len(r.Topics[0].Partitions) != 1:
		if ok && r.ErrorCode != 0 {
			return kafka.Error(r.ErrorCode)
		}
		return errors.New("the broker's answer lacks the partition")
	case r.ErrorCode != 0:
		return kafka.Error(r.ErrorCode)
	}
	p := &r.Topics[0].Partitions[0]
	if code := kafka.Error(p.ErrorCode); code == kafka.OffsetOutOfRange {
		return l.outOfRange(ctx, pos)
	} else if code != 0 {
		return code
	}
	end := p.HighWatermark
	if isolation == 1 && p.LastStableOffset >= 0 {
		end = p.LastStableOffset
	}
	rs, next, err := l.decode(p, pos, isolation == 1)
	if err != nil {
		return err
	}
	if l.add(rs, next, end) {
		// Markers and holes at the end of the log: the group's lag shall reach 0.
		_ = l.g.commit(ctx, false) // the next commit says the same
	}
	return nil
}

func (l *lane) position() int64 {
	s := l.g.s
	s.mu.Lock()
	defer s.mu.Unlock()
	return l.upTo
}

// outOfRange finds out what is gone. The broker's error carries no offsets.
func (l *lane) outOfRange(ctx context.Context, pos int64) error {
	first, last, err := l.bounds(ctx)
	switch {
	case err != nil:
		return err
	case pos > last:
		return errRestart // resolve reports it, with nothing of the old log in hand
	case pos >= first:
		return kafka.OffsetOutOfRange // a new leader that lags; later
	}
	s := l.g.s
	if l.gap(pos, first); s.cfg.OnGap == GapFail {
		return s.gapFails(l, pos, first)
	}
	l.add(nil, first, last)
	return nil
}

// decode makes records of a fetch and returns the next position to read.
func (l *lane) decode(p *fetch.ResponsePartition, pos int64, committedOnly bool) (rs []*record, next int64, err error) {
	batches := batchesOf(p.RecordSet.Records)
	next = pos
	tx := transactions{open: p.AbortedTransactions, aborting: map[int64]bool{}}
	slices.SortFunc(tx.open, func(a, b fetch.ResponseTransaction) int { return int(min(max(a.FirstOffset-b.FirstOffset, -1), 1)) })
	for _, b := range batches {
		if c, ok := b.(*protocol.ControlBatch); ok {
			if next, err = tx.marker(c, next); err != nil {
				return nil, pos, err
			}
			continue
		}
		skip := false
		if rb, ok := b.(*protocol.RecordBatch); ok && committedOnly && rb.Attributes.Transactional() {
			skip = tx.aborted(rb.ProducerID, rb.BaseOffset)
		}
		for {
			rec, err := b.ReadRecord()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				return nil, pos, err
			}
			// A batch begins before the position that was asked for.
			if rec.Offset < next || skip {
				next = max(next, rec.Offset+1)
				discard(rec)
				continue
			}
			r := &record{l: l, off: rec.Offset}
			if r.d.Message, err = messageOf(l.topic, rec); err != nil && brokers.ClassOf(err) != brokers.Permanent {
				return nil, pos, err
			}
			r.d.Defect = err
			if err == nil {
				r.d.Defect = identify(&r.d.Message, l.g.s.cfg.ID)
			}
			l.prepare(r)
			rs, next = append(rs, r), rec.Offset+1
		}
	}
	if next == pos && len(batches) > 0 {
		// The broker returned the batch that covers pos, and pos is not in it: a hole of
		// compaction. How long it is, kafka-go does not tell.
		next++
	}
	return rs, next, nil
}

func batchesOf(r protocol.RecordReader) []protocol.RecordReader {
	switch r := r.(type) {
	case nil:
		return nil
	case *protocol.RecordStream:
		return r.Records
	}
	return []protocol.RecordReader{r}
}

// transactions tells which batches of a fetch belong to aborted transactions: those of
// a producer from the transaction's first offset up to its next marker.
type transactions struct {
	open     []fetch.ResponseTransaction // sorted, those not reached yet
	aborting map[int64]bool              // producers
}

func (t *transactions) reach(base int64) {
	for len(t.open) > 0 && t.open[0].FirstOffset <= base {
		t.aborting[t.open[0].ProducerID] = true
		t.open = t.open[1:]
	}
}

func (t *transactions) aborted(producer, base int64) bool {
	t.reach(base)
	return t.aborting[producer]
}

// marker passes over a control batch, which is never handed over.
func (t *transactions) marker(c *protocol.ControlBatch, next int64) (int64, error) {
	t.reach(c.BaseOffset)
	for {
		rec, err := c.ReadControlRecord()
		if errors.Is(err, io.EOF) {
			return next, nil
		}
		if err != nil {
			return next, err
		}
		if rec.Type == abortMarker {
			delete(t.aborting, c.ProducerID)
		}
		next = max(next, rec.Offset+1)
	}
}

func discard(r *protocol.Record) {
	for _, b := range []protocol.Bytes{r.Key, r.Value} {
		if b != nil {
			_ = b.Close() // it only gives memory back
		}
	}
}
