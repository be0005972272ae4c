package memory

import (
	"context"
	"fmt"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
)

// Publisher returns a Publisher that stores each message in the queue, channel or
// topic that Message.Topic names. Publishers are numbered like Sources.
func (b *Broker) Publisher() brokers.Publisher {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.publishers++
	return &publisher{b: b, n: b.publishers}
}

type publisher struct {
	b      *Broker
	n      int
	closed bool  // guarded by b.mu
	sent   int64 // messages tried, for Chaos; guarded by b.mu
}

// Limits implements [brokers.Publisher].
func (p *publisher) Limits() brokers.PublishLimits {
	return brokers.PublishLimits{MessageBytes: p.b.cfg.MaxMessageBytes}
}

// Close implements [brokers.Publisher]: later calls answer NotSent.
func (p *publisher) Close(context.Context) error {
	p.b.mu.Lock()
	defer p.b.mu.Unlock()
	p.closed = true
	return nil
}

// Publish implements [brokers.Publisher].
func (p *publisher) Publish(ctx context.Context, ms ...*brokers.Message) []brokers.Result {
	rs := make([]brokers.Result, len(ms))
	if len(ms) == 0 {
		return rs
	}
	p.b.step(stepKey{op: "publish", name: ms[0].Topic, id: ms[0].ID, who: p.n, n: uint64(len(ms))})
	its := make([]*item, len(ms))
	for i, m := range ms {
		its[i] = newItem(m)
	}
	var stopped map[string]bool
	for i := 0; i < len(ms); {
		i = p.some(ctx, its, rs, i, &stopped)
		if i == len(ms) {
			break
		}
		if p.pass(ctx, its[i].m.Topic) {
			p.b.step(stepKey{op: "publish", name: ms[i].Topic, id: ms[i].ID, who: p.n, n: uint64(len(ms) - i)})
		} else {
			for ; i < len(ms); i++ {
				rs[i] = brokers.Result{Outcome: brokers.NotSent, Err: ctx.Err()}
			}
		}
	}
	return rs
}

// some stores messages from i on until one has to wait, and returns where it
// stopped.
func (p *publisher) some(ctx context.Context, its []*item, rs []brokers.Result, i int, stopped *map[string]bool) int {
	b := p.b
	b.mu.Lock()
	defer b.unlock()
	now := time.Now()
	for ; i < len(its); i++ {
		it := its[i]
		if err := ctx.Err(); err != nil {
			rs[i] = brokers.Result{Outcome: brokers.NotSent, Err: err}
			continue
		}
		if p.closed {
			rs[i] = brokers.Result{Outcome: brokers.NotSent, Err: brokers.ErrClosed}
			continue
		}
		if (*stopped)[it.m.Key] {
			rs[i] = brokers.Result{Outcome: brokers.NotSent, Err: brokers.ErrKeyStopped}
			continue
		}
		if len(b.blocked) > 0 && (b.blocked[""] || b.blocked[it.m.Topic]) {
			return i
		}
		if len(b.faults) > 0 {
			if f, ok := b.strike(faultSlowPublish, it.m.Topic, "", it.m.ID); ok {
				b.unlock()
				err := sleep(ctx, f.d)
				b.mu.Lock()
				now = time.Now()
				if err != nil {
					rs[i] = p.unknown(now, it, true, err)
					p.stop(it, stopped)
					continue
				}
			}
		}
		if rs[i] = p.one(now, it); rs[i].Outcome != brokers.Accepted {
			p.stop(it, stopped)
		}
	}
	return i
}

func (p *publisher) stop(it *item, stopped *map[string]bool) {
	if it.m.Key == "" {
		return
	}
	if *stopped == nil {
		*stopped = map[string]bool{}
	}
	(*stopped)[it.m.Key] = true
}

// one stores a message, or not.
func (p *publisher) one(now time.Time, it *item) brokers.Result {
	b, m := p.b, &it.m
	p.sent++
	if limit := b.cfg.MaxMessageBytes; limit > 0 && m.Size() > limit {
		return p.refused(now, it, &brokers.Error{Class: brokers.Permanent, Op: "publish",
			Err: fmt.Errorf("message of %d bytes: the limit is %d", m.Size(), limit)})
	}
	if len(b.faults) > 0 {
		if _, ok := b.strike(faultUnroutable, m.Topic, "", m.ID); ok {
			return p.refused(now, it, fmt.Errorf("publish to %q: %w", m.Topic, brokers.ErrNoRoute))
		}
		if f, ok := b.strike(faultThrottle, m.Topic, "", m.ID); ok {
			return p.refused(now, it, &brokers.Error{Class: brokers.Throttled, Op: "publish", After: f.d, Err: ErrInjected})
		}
		if f, ok := b.strike(faultPublishNack, m.Topic, "", m.ID); ok {
			return p.refused(now, it, f.err)
		}
		if f, ok := b.strike(faultPublishUnknown, m.Topic, "", m.ID); ok {
			return p.unknown(now, it, f.stored, ErrInjected)
		}
	}
	if b.chaos.on() {
		switch f, ok := b.chaos.publish(m, p.sent); {
		case ok && f.kind == faultPublishUnknown:
			return p.unknown(now, it, f.stored, ErrInjected)
		case ok:
			return p.refused(now, it, f.err)
		}
	}
	d, err := b.find(m.Topic)
	if err != nil {
		return p.refused(now, it, err)
	}
	d.append(now, it)
	p.note(now, it, "ok")
	return brokers.Result{Outcome: brokers.Accepted}
}

func (p *publisher) refused(now time.Time, it *item, err error) brokers.Result {
	p.note(now, it, "refused")
	return brokers.Result{Outcome: brokers.Refused, Err: err}
}

func (p *publisher) unknown(now time.Time, it *item, stored bool, cause error) brokers.Result {
	if stored {
		if d, err := p.b.find(it.m.Topic); err == nil {
			d.append(now, it)
		}
	}
	p.note(now, it, fmt.Sprintf("unknown, stored=%t", stored))
	return brokers.Result{Outcome: brokers.Unknown, Err: fmt.Errorf("%w: %w", brokers.ErrUnknownOutcome, cause)}
}

func (p *publisher) note(now time.Time, it *item, outcome string) {
	if p.b.cfg.Seed != 0 {
		p.b.record(now, Entry{Op: "publish", Name: it.m.Topic, ID: it.m.ID, Outcome: outcome})
	}
}

// pass waits until publishing to topic is not blocked and reports whether ctx let it.
func (p *publisher) pass(ctx context.Context, topic string) bool {
	for {
		p.b.mu.Lock()
		open := !p.b.blocked[""] && !p.b.blocked[topic]
		wait := p.b.unblocked
		p.b.mu.Unlock()
		if open {
			return true
		}
		select {
		case <-ctx.Done():
			return false
		case <-wait:
		}
	}
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}
