package kafka

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/segmentio/kafka-go"
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

// slabSize is how many records are allocated at once. A record that is kept keeps its
// neighbours.
const slabSize = 32

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
	req := newFetch(l.topic, l.num, pos, l.g.fetchBytes, !s.cfg.ReadUncommitted)
	// After an error somebody may still write to it.
	req.into, l.spare = l.spare, nil
	res, err := l.g.c.rt.RoundTrip(call, l.g.c.Addr, req)
	if err != nil {
		return causeOf(call, err)
	}
	p, ok := res.(*fetchedPartition)
	if !ok {
		return errAnswer
	}
	if code := kafka.Error(p.code); code == kafka.OffsetOutOfRange {
		return l.outOfRange(ctx, pos)
	} else if code != 0 {
		return code
	}
	end := p.end
	if !s.cfg.ReadUncommitted && p.stable >= 0 {
		end = p.stable
	}
	l.unpacker.kept = false
	rs, next, err := l.decode(p, pos)
	if err != nil {
		return err
	}
	if !l.unpacker.kept && len(p.body) <= 2*l.g.fetchBytes { // a single batch may be larger
		l.spare = p.body
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
func (l *lane) decode(p *fetchedPartition, pos int64) (rs []*record, next int64, err error) {
	s := l.g.s
	tx := transactions{open: p.aborted, aborting: map[int64]bool{}}
	slices.SortFunc(tx.open, func(a, b fetch.ResponseTransaction) int { return cmp.Compare(a.FirstOffset, b.FirstOffset) })
	next = pos
	var places []byte // the coordinates, in one piece
	for set := p.recordSet; ; {
		var b *batch
		if b, set, err = nextBatch(set, &l.unpacker); err != nil {
			return nil, pos, l.unreadable(err)
		}
		if b == nil {
			break
		}
		tx.reach(b.base)
		switch {
		case b.control:
			abort, err := b.aborts()
			if err != nil {
				return nil, pos, l.unreadable(err)
			}
			if abort {
				delete(tx.aborting, b.producer)
			}
		case b.tx && !s.cfg.ReadUncommitted && tx.aborting[b.producer]:
		default:
			slab := make([]record, min(b.count, slabSize))
			rs = slices.Grow(rs, min(b.count, len(b.data)))
			err := b.records(func(one *rec) error {
				if one.offset < next { // a batch begins before the position that was asked for
					return nil
				}
				if len(slab) == 0 {
					slab = make([]record, slabSize)
				}
				r := &slab[0]
				slab = slab[1:]
				r.l, r.off = l, one.offset
				r.d.Message, r.d.Defect = messageOf(l.topic, one)
				if r.d.Defect == nil {
					r.d.Defect = identify(&r.d.Message, s.cfg.ID)
				}
				places = l.prepare(r, places)
				rs, next = append(rs, r), one.offset+1
				return nil
			})
			if err != nil {
				return nil, pos, l.unreadable(err)
			}
		}
		// Compaction takes records, also the last ones, and aborted ones are passed over.
		next = max(next, b.last+1)
	}
	if next == pos && len(p.recordSet) > 0 {
		return nil, pos, fmt.Errorf("%w: it has no whole batch", errAnswer)
	}
	return rs, next, nil
}

// unreadable judges a batch that cannot be read: what the network did to it is gone at
// the next try, a limit is not.
func (l *lane) unreadable(err error) error {
	if !errors.Is(err, errTooBig) {
		return err
	}
	err = brokers.NewFatal("read "+l.name.Name, err, "raise SourceConfig.MaxBatchBytes, or move the group's offset behind the batch")
	l.g.s.fail(err)
	return err
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
