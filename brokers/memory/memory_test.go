package memory_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/brokers/memory"
)

// open opens a Source of name and closes it at the end of the bubble.
func open(t *testing.T, b *memory.Broker, name string, room int, opts ...memory.SourceOption) brokers.Source {
	t.Helper()
	return openWith(t, b, name, brokers.OpenOptions{Room: room}, opts...)
}

func openWith(t *testing.T, b *memory.Broker, name string, o brokers.OpenOptions, opts ...memory.SourceOption) brokers.Source {
	t.Helper()
	src := b.Source(name, opts...)
	_, err := src.Open(t.Context(), o)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, src.Close(context.Background())) })
	return src
}

// publish publishes n messages m0, m1, … with keys in turn.
func publish(t *testing.T, b *memory.Broker, name string, n int, keys ...string) {
	t.Helper()
	for i := range n {
		m := &brokers.Message{ID: fmt.Sprintf("m%d", i), Topic: name, Payload: []byte{byte(i)}}
		if len(keys) > 0 {
			m.Key = keys[i%len(keys)]
		}
		accept(t, b, m)
	}
}

func accept(t *testing.T, b *memory.Broker, ms ...*brokers.Message) {
	t.Helper()
	for _, r := range b.Publisher().Publish(t.Context(), ms...) {
		require.Equal(t, brokers.Accepted, r.Outcome, r.Err)
	}
}

// receive receives exactly n deliveries.
func receive(t *testing.T, src brokers.Source, n int) []*brokers.Delivery {
	t.Helper()
	var ds []*brokers.Delivery
	for len(ds) < n {
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		more, err := src.Receive(ctx, n-len(ds))
		cancel()
		require.NoError(t, err, "after %d of %d", len(ds), n)
		ds = append(ds, more...)
	}
	return ds
}

// nothing asserts that nothing is handed over for d.
func nothing(t *testing.T, src brokers.Source, d time.Duration) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	ds, err := src.Receive(ctx, 1)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Empty(t, ds)
}

func ids(ds []*brokers.Delivery) (s []string) {
	for _, d := range ds {
		s = append(s, d.ID)
	}
	return s
}

// settle settles one delivery and returns its error.
func settle(src brokers.Source, d *brokers.Delivery, v brokers.Verb, after ...time.Duration) error {
	st := brokers.Settlement{Delivery: d, Verb: v}
	if len(after) > 0 {
		st.After = after[0]
	}
	if errs := src.Settle(context.Background(), st); errs != nil {
		return errs[0]
	}
	return nil
}

func cause(d *brokers.Delivery) error { return context.Cause(d.Context) }

func TestShortestUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := memory.New(memory.Config{})
		src := open(t, b, "orders", 0)
		publish(t, b, "orders", 1)
		d := receive(t, src, 1)[0]
		assert.Equal(t, "m0", d.ID)
		assert.Equal(t, "orders", d.Lane.Name)
		assert.NoError(t, settle(src, d, brokers.Done))
		assert.ErrorIs(t, settle(src, d, brokers.Done), brokers.ErrAlreadySettled)
		assert.Zero(t, b.Len("orders"))
		require.NoError(t, b.Check())
	})
}

func TestStaleReceiptHandle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := memory.New(memory.Config{})
		b.Queue("q", memory.QueueConfig{Visibility: 30 * time.Second})
		b.Inject(memory.Select{Name: "q", Times: memory.Always}, memory.FailExtend())
		src := open(t, b, "q", 10)
		publish(t, b, "q", 1)
		t0 := time.Now()
		first := receive(t, src, 1)[0]
		second := receive(t, src, 1)[0]
		assert.Equal(t, 30*time.Second, time.Since(t0), "the lease ends exactly at its visibility timeout")
		assert.Equal(t, 2, second.Attempt)
		assert.ErrorIs(t, cause(first), brokers.ErrOwnershipLost)
		assert.NoError(t, cause(second))
		assert.ErrorIs(t, settle(src, first, brokers.Done), brokers.ErrOwnershipLost)
		assert.Equal(t, 1, b.Len("q"), "a stale settlement deleted it")
		assert.NoError(t, settle(src, second, brokers.Done))
		assert.Zero(t, b.Len("q"))
		require.NoError(t, b.Check())
	})
}

func TestHeartbeatForAnHour(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := memory.New(memory.Config{Seed: 1})
		src := open(t, b, "q", 10)
		publish(t, b, "q", 3)
		ds := receive(t, src, 3)
		nothing(t, src, time.Hour)
		for _, d := range ds {
			assert.NoError(t, cause(d))
			assert.NoError(t, settle(src, d, brokers.Done))
		}
		extends := 0
		for _, e := range b.History() {
			if e.Op == "extend" {
				extends++
			}
		}
		assert.InDelta(t, 3*360, extends, 6, "one extension of each every 10 s")
		require.NoError(t, b.Check())
	})
}

func TestPoisonMessageGoesToTheDeadLetters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := memory.New(memory.Config{})
		b.Queue("q", memory.QueueConfig{MaxReceives: 3})
		src, dead := open(t, b, "q", 10), open(t, b, "q.dead", 10)
		publish(t, b, "q", 1)
		for i := range 3 {
			d := receive(t, src, 1)[0]
			assert.Equal(t, i+1, d.Attempt)
			require.NoError(t, settle(src, d, brokers.Retry, 2300*time.Millisecond))
		}
		nothing(t, src, time.Minute)
		d := receive(t, dead, 1)[0]
		assert.Equal(t, "m0", d.ID)
		assert.Equal(t, 1, d.Attempt)
		require.NoError(t, settle(dead, d, brokers.Done))
		require.NoError(t, b.Check())
	})
}

func TestGroupIsLockedAndGivenBackWhole(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := memory.New(memory.Config{})
		b.Queue("q", memory.QueueConfig{FIFO: true})
		src := open(t, b, "q", 10)
		for _, id := range []string{"A1", "A2", "A3", "B1", "A4"} {
			accept(t, b, &brokers.Message{ID: id, Topic: "q", Key: id[:1]})
		}
		ds := receive(t, src, 3)
		require.Equal(t, []string{"A1", "A2", "A3"}, ids(ds))
		b1 := receive(t, src, 1)[0]
		require.Equal(t, "B1", b1.ID)
		nothing(t, src, time.Minute) // A4 waits: its group is locked
		t0 := time.Now()
		require.NoError(t, settle(src, ds[0], brokers.Retry, 5*time.Second))
		for _, d := range ds {
			assert.ErrorIs(t, cause(d), brokers.ErrOwnershipLost, d.ID)
		}
		assert.ErrorIs(t, settle(src, ds[1], brokers.Done), brokers.ErrOwnershipLost)
		assert.NoError(t, cause(b1), "another group is not touched")
		again := receive(t, src, 4)
		assert.Equal(t, 5*time.Second, time.Since(t0))
		assert.Equal(t, []string{"A1", "A2", "A3", "A4"}, ids(again))
		assert.Equal(t, 2, again[1].Attempt, "the neighbours' counters rise too")
		for _, d := range append(again, b1) {
			assert.NoError(t, settle(src, d, brokers.Done))
		}
		assert.Zero(t, b.Len("q"))
		require.NoError(t, b.Check())
	})
}

func TestWholeGroupReleasedInOneCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := memory.New(memory.Config{})
		b.Queue("q", memory.QueueConfig{FIFO: true})
		src := open(t, b, "q", 10)
		publish(t, b, "q", 3, "k")
		ds := receive(t, src, 3)
		var ss []brokers.Settlement
		for _, d := range ds {
			ss = append(ss, brokers.Settlement{Delivery: d, Verb: brokers.Release})
		}
		for _, err := range src.Settle(t.Context(), ss...) {
			assert.NoError(t, err)
		}
		assert.Equal(t, []string{"m0", "m1", "m2"}, ids(receive(t, src, 3)))
	})
}

func TestLateAcksAfterADisconnect(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := memory.New(memory.Config{})
		b.Channel("r", memory.ChannelConfig{Quorum: true})
		src := open(t, b, "r", 100)
		publish(t, b, "r", 10)
		ds := receive(t, src, 10)
		b.Disconnect(src, errors.New("connection reset"), 200*time.Millisecond)
		for _, d := range ds {
			assert.ErrorIs(t, cause(d), brokers.ErrOwnershipLost)
			assert.ErrorIs(t, settle(src, d, brokers.Done), brokers.ErrOwnershipLost)
		}
		assert.Equal(t, 10, b.Len("r"), "a late ack reached the broker")
		t0 := time.Now()
		again := receive(t, src, 10)
		assert.Equal(t, 200*time.Millisecond, time.Since(t0))
		assert.Equal(t, ids(ds), ids(again))
		for _, d := range again {
			assert.Equal(t, 2, d.Attempt)
			assert.NotEqual(t, ds[0].Lane.Epoch, d.Lane.Epoch)
			assert.NoError(t, settle(src, d, brokers.Done))
		}
		assert.Zero(t, b.Len("r"))
		require.NoError(t, b.Check())
	})
}

func TestRebalanceDrainsAndFences(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := memory.New(memory.Config{Seed: 3})
		b.Topic("t", memory.TopicConfig{Partitions: 2})
		a := open(t, b, "t", 100)
		for i := range 20 {
			accept(t, b, &brokers.Message{ID: fmt.Sprintf("m%d", i), Topic: "t", Key: fmt.Sprint(i)})
		}
		ds := receive(t, a, 20)
		require.NoError(t, settle(a, ds[0], brokers.Done))
		c := open(t, b, "t", 100)

		select { // noticed at the next heartbeat
		case <-ds[1].Draining:
		case <-time.After(4 * time.Second):
			t.Fatal("Draining was not closed")
		}
		assert.NoError(t, cause(ds[1]))
		require.NoError(t, settle(a, ds[1], brokers.Done), "what has started may settle while it drains")
		require.NoError(t, settle(a, ds[2], brokers.Release))
		stuck := ds[19]
		for _, d := range ds[3:19] {
			require.NoError(t, settle(a, d, brokers.Done))
		}
		t0 := time.Now()
		<-stuck.Context.Done()
		assert.InDelta(t, 10, time.Since(t0).Seconds(), 0.1, "the drain ends at its deadline")
		assert.ErrorIs(t, cause(stuck), brokers.ErrOwnershipLost)
		before := b.Committed("t", "default", 0) + b.Committed("t", "default", 1)
		assert.ErrorIs(t, settle(a, stuck, brokers.Done), brokers.ErrOwnershipLost)
		assert.Equal(t, before, b.Committed("t", "default", 0)+b.Committed("t", "default", 1))

		lanes := map[string]bool{}
		for _, src := range []brokers.Source{a, c} {
			st, err := src.Status(t.Context())
			require.NoError(t, err)
			for _, l := range st.Lanes {
				lanes[l.Name] = true
			}
			require.Len(t, st.Lanes, 1)
		}
		assert.Len(t, lanes, 2)
		require.NoError(t, b.Check())
	})
}
