package sqs

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/sqs"
	"github.com/aws/aws-sdk-go-v2/service/sqs/types"
	"github.com/google/uuid"

	"github.com/twiceproof/twiceproof/brokers"
)

const (
	minBackoff = 100 * time.Millisecond
	maxBackoff = 20 * time.Second
	// pollPatience is how much longer than its wait a receive may take.
	pollPatience = 15 * time.Second
)

// startPoller starts a poller. The caller holds the lock, and the Source is open.
func (s *Source) startPoller() {
	s.pollers++
	s.polls.Go(s.poll)
}

// poll receives until the Source closes or there are more pollers than work.
func (s *Source) poll() {
	for failures := 0; ; {
		n, ok := s.reserve()
		if !ok {
			return
		}
		ms, received, err := s.receive(n)
		s.arrive(n, ms, received)
		if err == nil {
			failures = 0
			s.healthy()
			if !s.adapt(n, len(ms)) {
				return
			}
			continue
		}
		failures++
		if !s.unhealthy(err) {
			return
		}
		if brokers.ClassOf(err) == brokers.Throttled {
			failures++
			if !s.fewer() {
				return
			}
		}
		if !s.pause(backoff(failures)) {
			return
		}
	}
}

// reserve takes the room of one receive, and waits until there is some.
func (s *Source) reserve() (n int, ok bool) {
	for {
		s.mu.Lock()
		if s.state != sourceOpen || s.fatal != nil {
			s.pollers--
			s.mu.Unlock()
			return 0, false
		}
		if n = s.worth(); n > 0 {
			s.credit -= n
			s.mu.Unlock()
			return n, true
		}
		change := s.change
		s.mu.Unlock()
		select {
		case <-change:
		case <-s.stopPolls:
		}
	}
}

// worth returns how many messages are worth a receive now. The caller holds the lock.
func (s *Source) worth() int {
	if s.bytes >= s.roomBytes {
		return 0
	}
	n := min(maxBatch, s.credit)
	if s.fifo {
		// What only lies in a buffer has been counted as received, and its group waits for
		// it: take what somebody waits for.
		return max(min(n, s.wanted-len(s.buf)), 0)
	}
	// A few free places are no receive's worth as long as nobody starves.
	if n < min(maxBatch, s.room) && (s.wanted == 0 || len(s.buf) > 0) && len(s.leases) > s.room/2 {
		return 0
	}
	return n
}

// receive makes one receive. On a FIFO queue an answer that is lost is asked for again
// by the same attempt ID: SQS then returns the same messages, whose groups would be
// locked otherwise. received is when the visibility began at the earliest.
func (s *Source) receive(n int) (ms []types.Message, received time.Time, err error) {
	in := &sqs.ReceiveMessageInput{
		QueueUrl: &s.url, MaxNumberOfMessages: int32(n),
		WaitTimeSeconds: int32(s.cfg.Wait / time.Second), VisibilityTimeout: int32(s.cfg.Visibility / time.Second),
		MessageSystemAttributeNames: []types.MessageSystemAttributeName{types.MessageSystemAttributeNameAll},
		MessageAttributeNames:       []string{"All"},
	}
	tries := 1
	if s.fifo {
		in.ReceiveRequestAttemptId, tries = aws.String(uuid.NewString()), 3
	}
	first := time.Now()
	for try := 1; ; try++ {
		ms, err = s.receiveOnce(in)
		if err == nil {
			received = time.Now()
			if try > 1 {
				received = first // the lost answer may have hidden them then
			}
			return ms, received, nil
		}
		if try >= tries || code(err) != "" || s.pollCtx.Err() != nil || time.Since(first) > s.cfg.Visibility/2 {
			return nil, first, classify(fmt.Sprintf("receive from %q", nameOf(s.cfg.Queue)), err)
		}
	}
}

func (s *Source) receiveOnce(in *sqs.ReceiveMessageInput) ([]types.Message, error) {
	patience := s.cfg.Wait + pollPatience
	ctx, cancel := context.WithTimeoutCause(s.pollCtx, patience, fmt.Errorf("no answer within %s", patience))
	defer cancel()
	out, err := s.client.ReceiveMessage(ctx, in, once, unchecked)
	if err != nil {
		return nil, causeOf(ctx, err)
	}
	return out.Messages, nil
}

// arrive makes deliveries of what came and gives back the reserved room that is left.
func (s *Source) arrive(n int, ms []types.Message, received time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.serial++
	batch := s.serial
	for i := range ms {
		s.register(&ms[i], received, batch)
	}
	s.credit += n - len(ms)
	s.changed()
	if len(ms) > 0 {
		s.signal()
	}
}

// register makes the lease and the delivery of a message. The caller holds the lock.
func (s *Source) register(in *types.Message, received time.Time, batch uint64) {
	m, defect := s.cfg.decode(in, s.fifo)
	l := &lease{
		handle: aws.ToString(in.ReceiptHandle), size: m.Size(), received: received,
		until: received.Add(s.cfg.Visibility - s.margin), beat: received.Add(s.cfg.Visibility / 3),
	}
	s.serial++
	l.serial = s.serial
	lane := brokers.Lane{Name: nameOf(s.cfg.Queue), Epoch: s.epoch}
	if s.fifo {
		l.group = in.Attributes["MessageGroupId"]
		lane = brokers.Lane{Name: l.group, Epoch: batch}
		s.groups[l.group] = append(s.groups[l.group], l)
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	l.cancel = cancel
	attempt, _ := strconv.Atoi(in.Attributes["ApproximateReceiveCount"])
	l.d = &brokers.Delivery{
		Message: m, Lane: lane, Attempt: max(attempt, 1), Coordinates: nameOf(s.cfg.Queue) + "@" + aws.ToString(in.MessageId),
		Defect: defect, Context: ctx, Handle: l,
	}
	l.s = s
	s.leases[l] = struct{}{}
	s.bytes += l.size
	if s.state != sourceOpen { // it came after Close, which gives it back
		cancel(brokers.ErrClosed)
		return
	}
	s.buf = append(s.buf, l)
}

// adapt has one more poller after two full answers, and one less after an empty one.
// It returns false to the one that is to end.
func (s *Source) adapt(asked, got int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case got == 0:
		s.fulls = 0
		if s.pollers > 1 {
			s.pollers--
			return false
		}
	case got < asked || asked < maxBatch:
		s.fulls = 0
	default:
		s.fulls++
		if s.fulls >= 2 && s.pollers < s.cfg.MaxPollers && s.credit >= maxBatch && s.state == sourceOpen {
			s.fulls = 0
			s.startPoller()
		}
	}
	return true
}

// fewer ends the poller unless it is the last one.
func (s *Source) fewer() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pollers > 1 {
		s.pollers--
		return false
	}
	return true
}

func (s *Source) healthy() {
	s.mu.Lock()
	was := s.connected
	s.connected, s.failing = true, time.Time{}
	s.mu.Unlock()
	if !was {
		s.log.Info("receiving again")
		s.emit(brokers.Event{Kind: brokers.EventConnected})
	}
}

// unhealthy notes a failed receive; false means that the poller is to end.
func (s *Source) unhealthy(err error) bool {
	class := brokers.ClassOf(err)
	s.mu.Lock()
	if s.state != sourceOpen {
		s.pollers--
		s.mu.Unlock()
		return false
	}
	first := s.failing.IsZero()
	if first {
		s.failing = time.Now()
	}
	down := s.connected && class != brokers.Throttled
	if down {
		s.connected = false
	}
	believed := class == brokers.Fatal && time.Since(s.failing) >= s.cfg.MissingFor
	if believed {
		s.fatal = err
		s.pollers--
		s.changed()
	}
	s.mu.Unlock()
	switch {
	case class == brokers.Throttled:
		s.log.Warn("SQS asks to slow down", "error", err)
		s.emit(brokers.Event{Kind: brokers.EventThrottled, Err: err})
	case down:
		s.log.Warn("cannot receive; trying again", "error", err)
		s.emit(brokers.Event{Kind: brokers.EventDisconnected, Err: err})
	}
	if believed {
		s.log.Error("giving up", "error", err)
		s.signal()
	}
	return !believed
}

// pause waits; false when the Source closes.
func (s *Source) pause(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-s.stopPolls:
		s.mu.Lock()
		s.pollers--
		s.mu.Unlock()
		return false
	}
}

// backoff is full jitter over a delay that doubles, never quite nothing.
func backoff(n int) time.Duration {
	d := maxBackoff
	if n < 8 {
		d = min(minBackoff<<max(n-1, 0), maxBackoff)
	}
	return max(rand.N(d), minBackoff/2)
}

// maxReceives reads maxReceiveCount of a redrive policy, a number or a text of one; 0
// if there is none.
func maxReceives(policy string) int {
	var p struct {
		Max json.RawMessage `json:"maxReceiveCount"`
	}
	if json.Unmarshal([]byte(policy), &p) != nil {
		return 0
	}
	var n int
	if json.Unmarshal(p.Max, &n) == nil {
		return n
	}
	var t string
	_ = json.Unmarshal(p.Max, &t)
	n, _ = strconv.Atoi(t)
	return n
}
