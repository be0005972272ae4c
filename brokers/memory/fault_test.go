package memory_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/brokers/memory"
)

var errBoom = errors.New("boom")

func TestDroppedSettleComesAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := memory.New(memory.Config{})
		b.Queue("q", memory.QueueConfig{})
		b.Channel("r", memory.ChannelConfig{ConsumerTimeout: time.Minute})
		for name, after := range map[string]time.Duration{"q": 30 * time.Second, "r": time.Minute} {
			src := open(t, b, name, 10)
			publish(t, b, name, 1)
			b.Inject(memory.Select{Name: name, ID: "m0"}, memory.DropSettle(nil))
			t0 := time.Now()
			d := receive(t, src, 1)[0]
			require.NoError(t, settle(src, d, brokers.Done), "the Source believes it")
			assert.ErrorIs(t, settle(src, d, brokers.Done), brokers.ErrAlreadySettled)
			d = receive(t, src, 1)[0]
			assert.Equal(t, after, time.Since(t0), name)
			assert.Equal(t, 2, d.Attempt)
			require.NoError(t, settle(src, d, brokers.Done))
			assert.Zero(t, b.Len(name))
		}
		assert.Empty(t, b.Pending())
		require.NoError(t, b.Check())
	})
}

func TestDroppedCommitIsMadeGoodByTheNext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := memory.New(memory.Config{Seed: 1})
		b.Topic("t", memory.TopicConfig{})
		src := open(t, b, "t", 10)
		publish(t, b, "t", 2)
		ds := receive(t, src, 2)
		b.Inject(memory.Select{ID: "m0"}, memory.DropSettle(nil))
		require.NoError(t, settle(src, ds[0], brokers.Done))
		assert.EqualValues(t, 0, b.Committed("t", "default", 0))
		require.NoError(t, settle(src, ds[1], brokers.Done))
		assert.EqualValues(t, 2, b.Committed("t", "default", 0))
		require.NoError(t, b.Check())
	})
}

func TestFailedSettleIsWorthAnotherTry(t *testing.T) {
	for _, applied := range []bool{false, true} {
		for _, name := range []string{"queue", "fifo", "chan", "single", "topic"} {
			t.Run(name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					b := memory.New(memory.Config{Seed: 1})
					profiles[name](b, name)
					src := open(t, b, name, 10)
					publish(t, b, name, 1)
					b.Inject(memory.Select{Name: name}, memory.FailSettle(errBoom, applied))
					d := receive(t, src, 1)[0]
					assert.ErrorIs(t, settle(src, d, brokers.Done), errBoom)
					require.NoError(t, settle(src, d, brokers.Done))
					assert.ErrorIs(t, settle(src, d, brokers.Done), brokers.ErrAlreadySettled)
					if name == "topic" {
						assert.EqualValues(t, 1, b.Committed(name, "default", 0)+b.Committed(name, "default", 1)+b.Committed(name, "default", 2))
					} else {
						assert.Zero(t, b.Len(name))
					}
					nothing(t, src, 10*time.Minute)
					require.NoError(t, b.Check())
				})
			})
		}
	}
}

// A settlement was applied, its answer was an error, and nobody tries again: the
// Source's heartbeat finds the message gone.
func TestAppliedSettleThatNobodyRepeats(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := memory.New(memory.Config{Seed: 1})
		src := open(t, b, "q", 1)
		publish(t, b, "q", 2)
		b.Inject(memory.Select{ID: "m0"}, memory.FailSettle(errBoom, true))
		d := receive(t, src, 1)[0]
		assert.ErrorIs(t, settle(src, d, brokers.Done), errBoom)
		assert.Equal(t, "m1", receive(t, src, 1)[0].ID, "the room is free again")
		assert.ErrorIs(t, cause(d), brokers.ErrOwnershipLost)
		require.NoError(t, b.Check())
	})
}

func TestOneFailedExtensionLosesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := memory.New(memory.Config{})
		b.Inject(memory.Select{Name: "q", Times: 3}, memory.FailExtend())
		src := open(t, b, "q", 10)
		publish(t, b, "q", 1)
		d := receive(t, src, 1)[0]
		nothing(t, src, 10*time.Minute)
		assert.NoError(t, cause(d))
		require.NoError(t, settle(src, d, brokers.Done))
		assert.Empty(t, b.Pending())
	})
}

func TestLongestHold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := memory.New(memory.Config{})
		src := open(t, b, "q", 10)
		publish(t, b, "q", 1)
		t0 := time.Now()
		first := receive(t, src, 1)[0]
		ctx, cancel := context.WithTimeout(t.Context(), 13*time.Hour)
		defer cancel()
		ds, err := src.Receive(ctx, 1)
		require.NoError(t, err)
		assert.Equal(t, 12*time.Hour, time.Since(t0), "no extension goes beyond 12 h")
		assert.ErrorIs(t, cause(first), brokers.ErrOwnershipLost)
		require.NoError(t, settle(src, ds[0], brokers.Done))
	})
}

func TestDuplicateAndDelayedDelivery(t *testing.T) {
	for _, name := range []string{"queue", "fifo", "chan", "single", "topic"} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := memory.New(memory.Config{Seed: 5})
				profiles[name](b, name)
				src := open(t, b, name, 10)
				b.Inject(memory.Select{Name: name, ID: "m1"}, memory.DuplicateDelivery())
				b.Inject(memory.Select{Name: name, ID: "m0"}, memory.DelayDelivery(5*time.Second))
				t0 := time.Now()
				publish(t, b, name, 3, "k")
				got := map[string]int{}
				for len(got) < 3 || got["m1"] < 2 {
					d := receive(t, src, 1)[0]
					got[d.ID]++
					if d.ID == "m0" {
						assert.InDelta(t, 5, time.Since(t0).Seconds(), 0.1)
					}
					require.NoError(t, settle(src, d, brokers.Done))
				}
				assert.Equal(t, map[string]int{"m0": 1, "m1": 2, "m2": 1}, got)
				assert.Empty(t, b.Pending())
				require.NoError(t, b.Check()) // in order, where lanes are ordered
			})
		})
	}
}

func TestSelectors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := memory.New(memory.Config{})
		b.Inject(memory.Select{Name: "q", Nth: 3, Times: 2}, memory.PublishNack(errBoom))
		b.Inject(memory.Select{Name: "other"}, memory.PublishNack(errBoom))
		pub := b.Publisher()
		var got []brokers.Outcome
		for range 6 {
			got = append(got, pub.Publish(t.Context(), &brokers.Message{ID: "x", Topic: "q"})[0].Outcome)
		}
		a, r := brokers.Accepted, brokers.Refused
		assert.Equal(t, []brokers.Outcome{a, a, r, r, a, a}, got)
		assert.Len(t, b.Pending(), 1, "the one that nothing met")
		assert.Equal(t, 4, b.Len("q"))
	})
}

func TestPublishFaults(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := memory.New(memory.Config{})
		b.Queue("q", memory.QueueConfig{})
		pub := b.Publisher()
		one := func(id string, f memory.Fault) brokers.Result {
			b.Inject(memory.Select{ID: id}, f)
			return pub.Publish(t.Context(), &brokers.Message{ID: id, Topic: "q"})[0]
		}
		r := one("lost", memory.PublishUnknown(false))
		assert.Equal(t, brokers.Unknown, r.Outcome)
		assert.ErrorIs(t, r.Err, brokers.ErrUnknownOutcome)
		assert.Zero(t, b.Len("q"))
		for range 3 { // a relay sends it again each time
			assert.Equal(t, brokers.Unknown, one("stored", memory.PublishUnknown(true)).Outcome)
		}
		assert.Equal(t, 3, b.Len("q"))
		r = one("nowhere", memory.Unroutable())
		assert.Equal(t, brokers.Refused, r.Outcome)
		assert.ErrorIs(t, r.Err, brokers.ErrNoRoute)
		r = one("fast", memory.Throttle(2*time.Second))
		assert.Equal(t, brokers.Throttled, brokers.ClassOf(r.Err))
		assert.Equal(t, 2*time.Second, brokers.RetryAfterOf(r.Err))
		t0 := time.Now()
		assert.Equal(t, brokers.Accepted, one("slow", memory.SlowPublish(time.Minute)).Outcome)
		assert.Equal(t, time.Minute, time.Since(t0))

		b.Inject(memory.Select{ID: "b"}, memory.SlowPublish(time.Hour))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		rs := pub.Publish(ctx, &brokers.Message{ID: "a", Topic: "q"}, &brokers.Message{ID: "b", Topic: "q"}, &brokers.Message{ID: "c", Topic: "q"})
		assert.Equal(t, []brokers.Outcome{brokers.Accepted, brokers.Unknown, brokers.NotSent}, []brokers.Outcome{rs[0].Outcome, rs[1].Outcome, rs[2].Outcome})
		require.NoError(t, b.Check())
	})
}

func TestBlockedPublisher(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := memory.New(memory.Config{})
		pub := b.Publisher()
		b.Block()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		r := pub.Publish(ctx, &brokers.Message{ID: "a", Topic: "q"})[0]
		assert.Equal(t, brokers.NotSent, r.Outcome)
		time.AfterFunc(10*time.Second, b.Unblock)
		t0 := time.Now()
		for _, r := range pub.Publish(t.Context(), &brokers.Message{ID: "a", Topic: "q"}, &brokers.Message{ID: "b", Topic: "q"}) {
			assert.Equal(t, brokers.Accepted, r.Outcome)
		}
		assert.Equal(t, 10*time.Second, time.Since(t0))
		assert.Equal(t, 2, b.Len("q"))
	})
}

func TestDeliveryLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := memory.New(memory.Config{})
		b.Channel("r", memory.ChannelConfig{Quorum: true, DeliveryLimit: 3, DeadLetter: "dlx"})
		src, dead := open(t, b, "r", 10), open(t, b, "dlx", 10)
		publish(t, b, "r", 1)
		for i := range 4 { // a limit of n is n+1 deliveries
			d := receive(t, src, 1)[0]
			assert.Equal(t, i+1, d.Attempt)
			require.NoError(t, settle(src, d, brokers.Retry))
		}
		nothing(t, src, time.Minute)
		assert.Equal(t, "m0", receive(t, dead, 1)[0].ID)
		require.NoError(t, b.Check())
	})
}

func TestConsumerTimeoutEndsTheSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := memory.New(memory.Config{})
		b.Channel("r", memory.ChannelConfig{Quorum: true, ConsumerTimeout: 4 * time.Second})
		var heard events
		src := openWith(t, b, "r", brokers.OpenOptions{Observer: heard.observe})
		publish(t, b, "r", 3)
		ds := receive(t, src, 3)
		require.NoError(t, settle(src, ds[1], brokers.Done))
		t0 := time.Now()
		<-ds[0].Context.Done()
		assert.Equal(t, 4*time.Second, time.Since(t0))
		again := receive(t, src, 2)
		assert.Equal(t, []string{"m0", "m2"}, ids(again))
		assert.Equal(t, 2, again[0].Attempt)
		require.Len(t, heard.of(brokers.EventDisconnected), 1)
		assert.ErrorContains(t, heard.of(brokers.EventDisconnected)[0].Err, "timed out")
		assert.Len(t, heard.of(brokers.EventConnected), 2)
	})
}

func TestSingleActiveConsumerHandsOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := memory.New(memory.Config{Seed: 2})
		b.Channel("r", memory.ChannelConfig{Quorum: true, SingleActive: true})
		a, c := open(t, b, "r", 10), open(t, b, "r", 10)
		publish(t, b, "r", 4, "k")
		ds := receive(t, a, 2)
		nothing(t, c, time.Minute)
		require.NoError(t, settle(a, ds[0], brokers.Done))
		b.Cancel(a)
		assert.ErrorIs(t, cause(ds[1]), brokers.ErrOwnershipLost)
		assert.Equal(t, []string{"m1", "m2", "m3"}, ids(receive(t, c, 3)))
		nothing(t, a, time.Minute)
		require.NoError(t, b.Check())
	})
}

func TestExpireNow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := memory.New(memory.Config{})
		src := open(t, b, "q", 10)
		publish(t, b, "q", 3)
		ds := receive(t, src, 3)
		assert.Equal(t, 1, b.ExpireNow(memory.Select{Name: "q", ID: "m1"}))
		assert.ErrorIs(t, cause(ds[1]), brokers.ErrOwnershipLost)
		assert.NoError(t, cause(ds[0]))
		assert.Equal(t, "m1", receive(t, src, 1)[0].ID)
	})
}

func TestRestart(t *testing.T) {
	for _, name := range []string{"queue", "fifo", "chan", "single", "topic"} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := memory.New(memory.Config{Seed: 1})
				profiles[name](b, name)
				src := open(t, b, name, 10)
				publish(t, b, name, 3, "k")
				ds := receive(t, src, 2)
				b.Restart()
				for _, d := range ds {
					assert.ErrorIs(t, cause(d), brokers.ErrOwnershipLost)
				}
				for _, d := range receive(t, src, 3) {
					require.NoError(t, settle(src, d, brokers.Done))
				}
				require.NoError(t, b.Check())
			})
		})
	}
}

func TestRetention(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := memory.New(memory.Config{})
		b.Queue("q", memory.QueueConfig{Retention: time.Hour})
		b.Topic("t", memory.TopicConfig{Retention: time.Hour})
		publish(t, b, "q", 2)
		publish(t, b, "t", 2)
		<-time.After(time.Hour)
		publish(t, b, "q", 1)
		publish(t, b, "t", 1)
		q, l := open(t, b, "q", 10), open(t, b, "t", 10)
		assert.Len(t, receive(t, q, 1), 1)
		nothing(t, q, time.Second)
		assert.Equal(t, "t/0@2", receive(t, l, 1)[0].Coordinates)
		require.NoError(t, b.Check())
	})
}

// Close at any moment gives everything back and leaves no goroutine behind: the
// bubble would not end.
func TestCloseAtEveryStep(t *testing.T) {
	for _, name := range []string{"queue", "fifo", "chan", "single", "topic"} {
		t.Run(name, func(t *testing.T) {
			for at := range 40 {
				synctest.Test(t, func(t *testing.T) {
					b := memory.New(memory.Config{Seed: uint64(at + 1)})
					profiles[name](b, name)
					src := b.Source(name)
					_, err := src.Open(t.Context(), brokers.OpenOptions{Room: 4})
					require.NoError(t, err)
					publish(t, b, name, 6, "a", "b")
					stopped := make(chan struct{})
					settled := map[string]bool{}
					go func() {
						defer close(stopped)
						for {
							ds, err := src.Receive(context.Background(), 2)
							if err != nil {
								assert.ErrorIs(t, err, brokers.ErrClosed)
								return
							}
							for _, d := range ds {
								if settle(src, d, brokers.Done) == nil {
									settled[d.ID] = true
								}
							}
						}
					}()
					<-time.After(time.Duration(at) * 150 * time.Microsecond)
					require.NoError(t, src.Close(context.Background()))
					<-stopped
					next := open(t, b, name, 10)
					for _, d := range receive(t, next, 6-len(settled)) {
						assert.False(t, settled[d.ID], "%s was settled", d.ID)
					}
					nothing(t, next, time.Minute)
					require.NoError(t, b.Check())
				})
			}
		})
	}
}

func TestRoomInBytes(t *testing.T) {
	for _, name := range []string{"queue", "chan", "topic"} {
		synctest.Test(t, func(t *testing.T) {
			b := memory.New(memory.Config{})
			profiles[name](b, name)
			src := openWith(t, b, name, brokers.OpenOptions{Room: 100, RoomBytes: 2500})
			for range 5 {
				accept(t, b, &brokers.Message{ID: "x", Topic: name, Key: "k", Payload: make([]byte, 1000)})
			}
			ds := receive(t, src, 3) // the third begins within the bound
			nothing(t, src, time.Second)
			for _, d := range ds {
				require.NoError(t, settle(src, d, brokers.Done))
			}
			assert.Len(t, receive(t, src, 2), 2)
		})
	}
}

func TestStrictBrokerKnowsNoStrangers(t *testing.T) {
	b := memory.New(memory.Config{Strict: true})
	_, err := b.Source("typo").Open(t.Context(), brokers.OpenOptions{})
	assert.ErrorIs(t, err, brokers.ErrNoRoute)
	assert.Equal(t, brokers.Fatal, brokers.ClassOf(err))
	r := b.Publisher().Publish(t.Context(), &brokers.Message{ID: "x", Topic: "typo"})[0]
	assert.Equal(t, brokers.Refused, r.Outcome)
	assert.ErrorIs(t, r.Err, brokers.ErrNoRoute)
	assert.Panics(t, func() {
		b.Queue("q", memory.QueueConfig{})
		b.Topic("q", memory.TopicConfig{})
	})
}
