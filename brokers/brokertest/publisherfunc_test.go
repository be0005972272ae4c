package brokertest_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
)

func TestPublisherFuncContract(t *testing.T) {
	t.Parallel()
	smtp := errors.New("421 try later")
	answers := map[string]error{
		"plain":     smtp,
		"permanent": &brokers.Error{Class: brokers.Permanent, Err: smtp},
		"throttled": &brokers.Error{Class: brokers.Throttled, After: time.Second, Err: smtp},
		"unknown":   fmt.Errorf("%w: %w", brokers.ErrUnknownOutcome, smtp),
	}
	var sent []string
	p := brokers.PublisherFunc(func(_ context.Context, m *brokers.Message) error {
		sent = append(sent, m.ID)
		return answers[m.ID]
	})
	rs := p.Publish(t.Context(),
		&brokers.Message{ID: "ok", Key: "a"}, &brokers.Message{ID: "plain", Key: "a"}, &brokers.Message{ID: "behind", Key: "a"},
		&brokers.Message{ID: "permanent"}, &brokers.Message{ID: "throttled"}, &brokers.Message{ID: "unknown", Key: "b"},
		&brokers.Message{ID: "behind too", Key: "b"}, &brokers.Message{ID: "free"})
	require.Len(t, rs, 8)
	want := []brokers.Outcome{brokers.Accepted, brokers.Refused, brokers.NotSent, brokers.Refused, brokers.Refused, brokers.Unknown, brokers.NotSent, brokers.Accepted}
	for i, r := range rs {
		assert.Equal(t, want[i], r.Outcome, i)
		assert.Equal(t, r.Outcome == brokers.Accepted, r.Err == nil, i)
	}
	assert.Equal(t, []string{"ok", "plain", "permanent", "throttled", "unknown", "free"}, sent)
	assert.Equal(t, brokers.Retryable, brokers.ClassOf(rs[1].Err))
	assert.ErrorIs(t, rs[1].Err, smtp)
	assert.ErrorIs(t, rs[2].Err, brokers.ErrKeyStopped)
	assert.Equal(t, brokers.Permanent, brokers.ClassOf(rs[3].Err))
	assert.Equal(t, time.Second, brokers.RetryAfterOf(rs[4].Err))
	assert.Equal(t, brokers.PublishLimits{}, p.Limits())
	assert.NoError(t, p.Close(t.Context()))
}

func TestPublisherFuncWhenItsContextEnds(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	p := brokers.PublisherFunc(func(ctx context.Context, m *brokers.Message) error {
		if m.ID == "last" {
			cancel() // during the call: it may have been sent
			return ctx.Err()
		}
		return nil
	})
	rs := p.Publish(ctx, &brokers.Message{ID: "first"}, &brokers.Message{ID: "last"}, &brokers.Message{ID: "never"})
	assert.Equal(t, brokers.Accepted, rs[0].Outcome)
	assert.Equal(t, brokers.Unknown, rs[1].Outcome)
	assert.Equal(t, brokers.NotSent, rs[2].Outcome)
	assert.ErrorIs(t, rs[2].Err, context.Canceled)
}
