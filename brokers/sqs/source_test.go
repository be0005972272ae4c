package sqs

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/sqs"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/internal/sqsfake"
)

func minute(c *SourceConfig) { c.Visibility = time.Minute }

// A batch that waits in a buffer or in a slow handler stays hidden: JasperFx/wolverine#4019,
// Bogdanp/dramatiq_sqs#53, awspring/spring-cloud-aws#1554.
func TestVisibilityIsExtendedFromTheReceiveOn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r, srv := strict(t, false, nil)
		r.send("", numbered("m", 10)...)
		s, _ := r.open(10, minute)
		first := r.receive(s, 1) // nine stay in the buffer
		time.Sleep(3 * time.Minute)
		rest := r.receive(s, 9)
		for _, d := range append(first, rest...) {
			require.Equal(t, 1, d.Attempt)
			require.NoError(t, d.Context.Err())
			r.done(s, d)
		}
		// Three visibilities of one minute, extended every third of one, ten in a call.
		require.InDelta(t, 8, srv.Calls("ChangeMessageVisibilityBatch"), 1)
		require.Zero(t, srv.Len(r.queue))
		time.Sleep(3 * time.Minute)
		require.InDelta(t, 8, srv.Calls("ChangeMessageVisibilityBatch"), 1, "what is settled is not extended")
	})
}

func TestExtensionsThatFailPastTheDeadlineEndTheDeliveryInTime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r, srv := strict(t, false, nil)
		r.send("", "m")
		s, ev := r.open(10, minute)
		began := time.Now()
		d := r.receive(s, 1)[0]
		heal := srv.Fail(sqsfake.Fault{Op: "ChangeMessageVisibilityBatch", Times: -1, Unavailable: true})
		<-d.Context.Done()
		require.ErrorIs(t, context.Cause(d.Context), brokers.ErrOwnershipLost)
		require.InDelta(t, 58, time.Since(began).Seconds(), 0.1, "2 s before the message becomes visible")
		require.Equal(t, 1, srv.InFlight(r.queue), "it was still hidden when the context ended")
		heal()
		require.ErrorIs(t, r.settle(s, brokers.Done, d)[0], brokers.ErrOwnershipLost)
		require.Zero(t, srv.Calls("DeleteMessageBatch"), "nothing is sent for a lost delivery")
		again := r.receive(s, 1)[0]
		require.Equal(t, 2, again.Attempt)
		require.NotEqual(t, d.Lane, again.Lane)
		r.done(s, again)
		require.Zero(t, srv.Len(r.queue))
		require.Equal(t, 1, ev.of(brokers.EventLaneRevoked))
		require.Equal(t, 1, ev.of(brokers.EventSettleLost))
	})
}

// Bogdanp/dramatiq_sqs#59: what waits in the buffer for longer than it is ours must not
// run from there.
func TestWhatIsLostInTheBufferIsNotHandedOver(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r, srv := strict(t, false, nil)
		r.send("", numbered("m", 10)...)
		s, ev := r.open(10, minute)
		r.done(s, r.receive(s, 1)...)
		heal := srv.Fail(sqsfake.Fault{Op: "ChangeMessageVisibilityBatch", Times: -1, Unavailable: true})
		time.Sleep(59 * time.Second)
		require.Equal(t, 9, srv.InFlight(r.queue), "still hidden, but not ours for sure")
		heal()
		began := time.Now()
		for _, d := range r.receive(s, 9) {
			require.Equal(t, 2, d.Attempt)
			require.NoError(t, d.Context.Err())
			r.done(s, d)
		}
		require.Positive(t, time.Since(began), "they came when they were visible again")
		require.Equal(t, 9, ev.of(brokers.EventLaneRevoked))
		require.Zero(t, srv.Len(r.queue))
	})
}

// A reply with status 200 has failures in it: bbc/sqs-consumer#193, panther-labs/panther#1730,
// numaproj/numaflow#3615, apache/airflow#73423.
func TestEachEntryOfADeleteHasItsOwnAnswer(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r, srv := strict(t, false, nil)
		r.send("", numbered("m", 10)...)
		s, _ := r.open(10, minute)
		ds := r.receive(s, 10)
		srv.Fail(sqsfake.Fault{Op: "DeleteMessageBatch", Entries: map[int]string{3: "InternalError", 5: "ReceiptHandleIsInvalid", 7: "InternalError"}})
		for i, err := range r.settle(s, brokers.Done, ds...) {
			if i == 5 {
				require.ErrorIs(t, err, brokers.ErrOwnershipLost)
				require.ErrorIs(t, context.Cause(ds[i].Context), brokers.ErrOwnershipLost)
				continue
			}
			require.NoError(t, err, "entry %d", i)
		}
		require.Equal(t, 2, srv.Calls("DeleteMessageBatch"), "the two, and nothing else, were sent again")
		require.Equal(t, 1, srv.Len(r.queue))
	})
}

// A delete that fails keeps the old handle: zarusz/SlimMessageBus#473.
func TestRedeliveryIsDeletedByItsOwnHandle(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r, srv := strict(t, false, nil)
		r.send("", "m")
		s, _ := r.open(10, minute)
		d := r.receive(s, 1)[0]
		heal := srv.Fail(sqsfake.Fault{Op: "DeleteMessageBatch", Times: -1, Unavailable: true})
		err := r.settle(s, brokers.Done, d)[0]
		require.Error(t, err)
		require.Equal(t, brokers.Retryable, brokers.ClassOf(err))
		require.NoError(t, d.Context.Err(), "a failed delete takes nothing away")
		stop := srv.Fail(sqsfake.Fault{Op: "ChangeMessageVisibilityBatch", Times: -1, Unavailable: true})
		again := r.receive(s, 1)[0]
		stop()
		heal()
		require.ErrorIs(t, r.settle(s, brokers.Done, d)[0], brokers.ErrOwnershipLost)
		require.Equal(t, 1, srv.Len(r.queue))
		r.done(s, again)
		require.Zero(t, srv.Len(r.queue))
	})
}

// The handle has expired when the work is done: bbc/sqs-consumer#83, aws/aws-sdk-js#1279,
// BrighterCommand/Brighter#4040.
func TestDeleteWhoseHandleIsInvalidIsLostAndTheSourceGoesOn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r, srv := strict(t, true, nil)
		r.send("a", "a0", "a1")
		s, _ := r.open(10, minute)
		ds := r.receive(s, 2)
		// Somebody else makes the first visible and takes it.
		srv.Fail(sqsfake.Fault{Op: "DeleteMessageBatch", Entries: map[int]string{0: "InvalidParameterValue"}, SenderFault: true})
		require.ErrorIs(t, r.settle(s, brokers.Done, ds[0])[0], brokers.ErrOwnershipLost)
		require.Error(t, ds[1].Context.Err(), "the next of the group must not run in its place")
		again := r.receive(s, 2)
		require.Equal(t, []string{"a0", "a1"}, idsOf(again))
		r.done(s, again...)
		require.Zero(t, srv.Len(r.queue))
	})
}

func TestRetryComesAfterItsDelayInWholeSeconds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r, _ := strict(t, false, nil)
		r.send("", "m")
		s, _ := r.open(10, minute)
		d := r.receive(s, 1)[0]
		began := time.Now()
		require.NoError(t, s.Settle(t.Context(), brokers.Settlement{Delivery: d, Verb: brokers.Retry, After: 2300 * time.Millisecond})[0])
		again := r.receive(s, 1)[0]
		require.InDelta(t, 3, time.Since(began).Seconds(), 0.01)
		require.Equal(t, 2, again.Attempt)
		r.done(s, again)
	})
}

func TestCloseGivesBackAtOnceWhatWasNotStarted(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r, srv := strict(t, false, nil)
		r.send("", numbered("m", 50)...)
		s, _ := r.open(50, minute)
		started := r.receive(s, 30)
		synctest.Wait() // the rest is in the buffer
		r.done(s, started...)
		require.Equal(t, 20, srv.InFlight(r.queue))
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		require.NoError(t, s.Close(ctx))
		require.Zero(t, srv.InFlight(r.queue))
		require.Equal(t, 20, srv.Len(r.queue))
		polls := srv.Calls("ReceiveMessage")
		time.Sleep(time.Minute)
		require.Equal(t, polls, srv.Calls("ReceiveMessage"), "no receive after Close")
		next, _ := r.open(20, minute)
		r.done(next, r.receive(next, 20)...)
	})
}

// A server that does not notice a receive that was cut off gives it the next message,
// which is hidden then for its visibility.
func TestCloseLetsTheLastReceiveEndSoThatItHidesNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r, srv := strict(t, false, nil)
		srv.SwallowCancelled = true
		s, _ := r.open(10, func(c *SourceConfig) { c.Visibility, c.Wait = time.Minute, 5*time.Second })
		synctest.Wait() // it waits at the server
		closed := make(chan error, 1)
		go func() { closed <- s.Close(t.Context()) }()
		synctest.Wait()
		r.send("", "m") // taken by the receive that Close waits for
		require.NoError(t, <-closed)
		require.Equal(t, 1, srv.Len(r.queue))
		require.Zero(t, srv.InFlight(r.queue), "and given back")
	})
}

func TestCloseCutsTheLastReceiveOffWhenItsContextEnds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r, srv := strict(t, false, nil)
		r.send("", "m")
		s, _ := r.open(10, func(c *SourceConfig) { c.Visibility, c.Wait = time.Minute, 20*time.Second })
		r.receive(s, 1)
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		began := time.Now()
		_ = s.Close(ctx)
		require.LessOrEqual(t, time.Since(began), 3*time.Second)
		require.Zero(t, srv.InFlight(r.queue), "there was time left to give back")
	})
}

// A late extension hides again what was given back.
func TestExtensionOnItsWayDoesNotHideWhatIsReleased(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r, srv := strict(t, false, nil)
		r.send("", "m")
		held := make(chan struct{})
		slow := &slowTransport{base: srv, hold: held, op: "AmazonSQS.ChangeMessageVisibilityBatch"}
		s, _ := r.open(10, func(c *SourceConfig) { c.Visibility = time.Minute; c.Client = clientOn("http://sqsfake", slow) })
		d := r.receive(s, 1)[0]
		time.Sleep(21 * time.Second) // the first extension is under way
		settled := make(chan error, 1)
		go func() { settled <- r.settle(s, brokers.Release, d)[0] }()
		synctest.Wait()
		close(held)
		require.NoError(t, <-settled)
		again := r.receive(s, 1)
		require.Less(t, slow.waited(), 22*time.Second)
		r.done(s, again...)
	})
}

// slowTransport holds the first call of one operation until hold is closed.
type slowTransport struct {
	base interface {
		RoundTrip(*http.Request) (*http.Response, error)
	}
	hold  chan struct{}
	op    string
	once  sync.Once
	start time.Time
}

func (s *slowTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Header.Get("X-Amz-Target") == s.op {
		s.once.Do(func() { s.start = time.Now(); <-s.hold })
	}
	return s.base.RoundTrip(r)
}

func (s *slowTransport) waited() time.Duration { return time.Since(s.start) }

// The connection breaks after the server has picked its messages.
func TestLostReceiveAnswerOnAStandardQueueComesBackAfterTheVisibility(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r, srv := strict(t, false, nil)
		r.send("", numbered("m", 10)...)
		srv.Fail(sqsfake.Fault{Op: "ReceiveMessage", LoseAnswer: true})
		began := time.Now()
		s, ev := r.open(10, minute)
		ds := r.receive(s, 10)
		require.InDelta(t, 60, time.Since(began).Seconds(), 2)
		for _, d := range ds {
			require.Equal(t, 2, d.Attempt)
		}
		r.done(s, ds...)
		require.Equal(t, 1, ev.of(brokers.EventDisconnected))
		require.Equal(t, 2, ev.of(brokers.EventConnected))
	})
}

func TestLostReceiveAnswerOnAFIFOQueueIsAskedForAgainAndLocksNoGroup(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r, srv := strict(t, true, nil)
		r.send("a", numbered("a", 5)...)
		srv.Fail(sqsfake.Fault{Op: "ReceiveMessage", LoseAnswer: true, Times: 2})
		began := time.Now()
		s, _ := r.open(10, minute)
		ds := r.receive(s, 5)
		require.Less(t, time.Since(began), time.Second)
		require.Equal(t, numbered("a", 5), idsOf(ds))
		for _, d := range ds {
			require.Equal(t, 1, d.Attempt, "the same hand-over, not another one")
		}
		time.Sleep(2 * time.Minute) // extended as if nothing had happened
		r.done(s, ds...)
		require.Zero(t, srv.Len(r.queue))
	})
}

// awspring/spring-cloud-aws#124, dashbitco/broadway_sqs#78: after A1 fails, A2 runs.
func TestRetryOnAFIFOQueueHidesItsGroupAndKeepsItsOrder(t *testing.T) {
	t.Parallel()
	check := func(t *testing.T, r *rig) {
		r.send("A", "A1", "A2", "A3")
		s, _ := r.open(20, func(c *SourceConfig) { c.Visibility = 20 * time.Second })
		ds := r.receive(s, 3)
		require.Equal(t, []string{"A1", "A2", "A3"}, idsOf(ds))
		began := time.Now()
		require.NoError(t, s.Settle(t.Context(), brokers.Settlement{Delivery: ds[0], Verb: brokers.Retry, After: 3 * time.Second})[0])
		for _, d := range ds {
			require.ErrorIs(t, context.Cause(d.Context), brokers.ErrOwnershipLost)
		}
		r.send("B", "B1")
		b := r.receive(s, 1)
		require.Equal(t, []string{"B1"}, idsOf(b), "another group is not its business")
		r.done(s, b...)
		again := r.receive(s, 3)
		require.GreaterOrEqual(t, time.Since(began), 2900*time.Millisecond)
		require.Equal(t, []string{"A1", "A2", "A3"}, idsOf(again))
		require.Equal(t, 2, again[0].Attempt)
		r.done(s, again...)
	}
	t.Run("strict", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) { r, _ := strict(t, true, nil); check(t, r) })
	})
	t.Run("ElasticMQ", func(t *testing.T) { t.Parallel(); check(t, elastic(t, true, nil)) })
}

// Nothing lies in a buffer that nobody asked for, where it would only be counted as
// received: JaidenAshmore/java-dynamic-sqs-listener#369.
func TestFIFOReceivesNoMoreThanIsAskedFor(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r, srv := strict(t, true, nil)
		r.send("a", numbered("a", 20)...)
		s, _ := r.open(64, minute)
		time.Sleep(10 * time.Second)
		require.Zero(t, srv.InFlight(r.queue))
		ds := r.receive(s, 2)
		require.Equal(t, 2, srv.InFlight(r.queue))
		r.done(s, ds...)
	})
}

// In-place retries leave the neighbours' counts alone; a lane that is given back does
// not, and the redrive policy counts.
func TestGivingBackAGroupCountsForAllOfIt(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r, _ := strict(t, true, nil)
		r.send("a", "a1", "a2")
		s, _ := r.open(64, minute)
		for range 2 {
			ds := r.receive(s, 2)
			require.NoError(t, r.settle(s, brokers.Release, ds[0])[0])
		}
		ds := r.receive(s, 2)
		require.Equal(t, 3, ds[1].Attempt)
		r.done(s, ds...)
	})
}

// Order of the first effects of a group over failures, lost ownership and lost answers.
func TestFIFOKeepsTheOrderOfEveryGroupOverFailures(t *testing.T) {
	t.Parallel()
	check := func(t *testing.T, r *rig, groups, each int, chaos func(n int)) {
		p := r.publisher(nil)
		var ms []*brokers.Message
		for i := range each {
			for g := range groups {
				ms = append(ms, &brokers.Message{ID: fmt.Sprintf("%02d/%04d", g, i), Key: fmt.Sprintf("g%02d", g), Topic: r.queue, Payload: []byte("x")})
			}
		}
		for _, res := range p.Publish(t.Context(), ms...) {
			require.Equal(t, brokers.Accepted, res.Outcome, "%v", res.Err)
		}
		r.close(p)
		var mu sync.Mutex
		first := map[string][]string{}
		seen := map[string]bool{}
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		var wg sync.WaitGroup
		var rounds int
		settle := func(s *Source, v brokers.Verb, d *brokers.Delivery) { // as a runner does: as long as it is ours
			for {
				err := r.settle(s, v, d)[0]
				if err == nil || errors.Is(err, brokers.ErrOwnershipLost) || !sleep(ctx, 100*time.Millisecond) {
					return
				}
			}
		}
		for range 2 {
			s, _ := r.open(40, func(c *SourceConfig) { c.Visibility = 5 * time.Second })
			wg.Go(func() {
				for ctx.Err() == nil {
					ds, err := s.Receive(ctx, 20)
					if err != nil {
						continue
					}
					mu.Lock()
					rounds++
					n := rounds
					mu.Unlock()
					if chaos != nil {
						chaos(n)
					}
					for i, d := range ds {
						if d.Context.Err() != nil {
							continue
						}
						if (n+i)%13 == 0 { // it fails, and goes back with its group
							settle(s, brokers.Release, d)
							continue
						}
						mu.Lock()
						if !seen[d.ID] {
							seen[d.ID] = true
							first[d.Key] = append(first[d.Key], d.ID)
						}
						all := len(seen)
						mu.Unlock()
						settle(s, brokers.Done, d)
						if all == groups*each {
							cancel()
						}
					}
				}
			})
		}
		wg.Wait()
		require.Equal(t, groups*each, len(seen))
		for key, ids := range first {
			assert.True(t, slices.IsSorted(ids), "%s: %v", key, ids)
		}
	}
	t.Run("strict", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			r, srv := strict(t, true, nil)
			check(t, r, 50, 100, func(n int) {
				switch n % 7 {
				case 1:
					srv.Fail(sqsfake.Fault{Op: "ReceiveMessage", LoseAnswer: true})
				case 3:
					srv.Fail(sqsfake.Fault{Op: "DeleteMessageBatch", LoseAnswer: true})
				case 5:
					srv.Fail(sqsfake.Fault{Op: "DeleteMessageBatch", Entries: map[int]string{0: "InternalError"}})
				}
				if n%40 == 0 { // a stall in which everything in hand is lost
					stop := srv.Fail(sqsfake.Fault{Op: "ChangeMessageVisibilityBatch", Times: -1, Unavailable: true})
					time.Sleep(6 * time.Second)
					stop()
				}
			})
		})
	})
	t.Run("ElasticMQ", func(t *testing.T) { t.Parallel(); check(t, elastic(t, true, nil), 20, 30, nil) })
}

// The quota of messages in flight: bbc/sqs-consumer#69, softwaremill/elasticmq#160.
func TestOverLimitIsThrottlingAndSettlingGoesOn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r, srv := strict(t, false, nil)
		srv.InFlightLimit = 100
		r.send("", numbered("m", 150)...)
		s, ev := r.open(200, minute)
		ds := r.receive(s, 100)
		time.Sleep(30 * time.Second)
		require.Positive(t, ev.of(brokers.EventThrottled))
		require.Zero(t, ev.of(brokers.EventDisconnected))
		require.LessOrEqual(t, srv.InFlight(r.queue), 100)
		r.done(s, ds...)
		r.done(s, r.receive(s, 50)...)
		require.Zero(t, srv.Len(r.queue))
	})
}

// boto/boto3#2898: 12 hours are the end, whatever is extended.
func TestHoldOfTwelveHoursEndsTheDelivery(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r, srv := strict(t, false, nil)
		r.send("", "m")
		s, ev := r.open(10, func(c *SourceConfig) { c.Visibility = 30 * time.Minute })
		began := time.Now()
		d := r.receive(s, 1)[0]
		<-d.Context.Done()
		require.InDelta(t, (12*time.Hour - 2*time.Second).Seconds(), time.Since(began).Seconds(), 2)
		require.ErrorIs(t, context.Cause(d.Context), brokers.ErrOwnershipLost)
		synctest.Wait()
		require.Equal(t, 1, ev.of(brokers.EventLaneRevoked))
		calls := srv.Calls("ChangeMessageVisibilityBatch")
		require.InDelta(t, 70, calls, 3, "every ten minutes, and none refused and repeated")
		again := r.receive(s, 1)[0]
		r.done(s, again)
	})
}

// A redriven message is another one to SQS: awsdocs/amazon-sqs-developer-guide#52.
func TestRedriveKeepsTheProducersID(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r, srv := strict(t, true, nil)
		dead := newRig(t, "http://sqsfake", srv, true, nil)
		_, err := r.client.SetQueueAttributes(t.Context(), &sqs.SetQueueAttributesInput{QueueUrl: &r.url, Attributes: map[string]string{
			"RedrivePolicy": `{"deadLetterTargetArn":"arn:aws:sqs:eu-central-1:000000000000:` + dead.queue + `","maxReceiveCount":"2"}`}})
		require.NoError(t, err)
		r.send("a", "order-1")
		s, _ := r.open(10, minute)
		for range 2 {
			require.NoError(t, r.settle(s, brokers.Release, r.receive(s, 1)[0])[0])
		}
		r.nothing(s, 3*time.Second)
		byID, _ := dead.open(10, minute)
		d := dead.receive(byID, 1)[0]
		require.Equal(t, "order-1", d.ID)
		require.NoError(t, dead.settle(byID, brokers.Release, d)[0])
		r.close(byID)
		byDedup, _ := dead.open(10, func(c *SourceConfig) {
			c.ID = func(m *brokers.Message) (string, error) {
				v, _ := m.Headers.Get("sqs-deduplication-id")
				return string(v), nil
			}
		})
		other := dead.receive(byDedup, 1)[0]
		require.NotEqual(t, "order-1", other.ID, "SQS replaced it on the way")
		dead.done(byDedup, other)
	})
}

func TestMistakesComeOutOfOpen(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r, srv := strict(t, false, nil)
		srv.Fail(sqsfake.Fault{Op: "GetQueueAttributes", Code: "AccessDeniedException"})
		s := r.source(nil)
		_, err := s.Open(t.Context(), brokers.OpenOptions{})
		require.Equal(t, brokers.Fatal, brokers.ClassOf(err))
		require.ErrorContains(t, err, "sqs:ReceiveMessage")
		_, err = NewSource(SourceConfig{Visibility: 1500 * time.Millisecond, Wait: time.Minute})
		require.ErrorContains(t, err, "Queue is empty")
		require.ErrorContains(t, err, "Visibility is 1.5s")
		require.ErrorContains(t, err, "Wait is 1m0s")
		require.ErrorContains(t, err, "LoadDefaultConfig")
	})
}

func TestQueueThatIsDeletedIsFatalOnlyAfterAWhile(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r, srv := strict(t, false, nil)
		s, ev := r.open(10, nil)
		began := time.Now()
		_, err := r.client.DeleteQueue(t.Context(), &sqs.DeleteQueueInput{QueueUrl: &r.url})
		require.NoError(t, err)
		_, err = s.Receive(t.Context(), 1)
		require.ErrorIs(t, err, brokers.ErrNoRoute)
		require.Equal(t, brokers.Fatal, brokers.ClassOf(err))
		require.GreaterOrEqual(t, time.Since(began), 30*time.Second)
		require.Equal(t, 1, ev.of(brokers.EventDisconnected))
		require.Positive(t, srv.Calls("ReceiveMessage"))
	})
}

func TestPollersFollowTheLoad(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r, _ := strict(t, false, nil)
		s, _ := r.open(500, nil)
		pollers := func() int { s.mu.Lock(); defer s.mu.Unlock(); return s.pollers }
		time.Sleep(time.Minute)
		require.Equal(t, 1, pollers())
		r.send("", numbered("m", 300)...)
		synctest.Wait()
		require.Greater(t, pollers(), 1)
		r.done(s, r.receive(s, 300)...)
		time.Sleep(time.Minute)
		require.Equal(t, 1, pollers())
	})
}

// All attributes are asked for: aws/aws-sdk-go-v2#2005, softwaremill/elasticmq#106.
func TestMessageWithoutAnIDHasNoneAndNoneIsMadeUp(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r, _ := strict(t, false, nil)
		_, err := r.client.SendMessage(t.Context(), &sqs.SendMessageInput{QueueUrl: &r.url, MessageBody: aws.String("plain")})
		require.NoError(t, err)
		s, _ := r.open(10, nil)
		d := r.receive(s, 1)[0]
		require.Empty(t, d.ID)
		require.NoError(t, d.Defect)
		require.NotEmpty(t, d.Coordinates)
		r.done(s, d)
	})
}

func TestManyMessagesAreDeletedTenAtATime(t *testing.T) {
	t.Parallel()
	const n = 2000
	r := elastic(t, false, nil)
	r.send("", numbered("m", n)...)
	s, _ := r.open(200, func(c *SourceConfig) { c.Visibility = 30 * time.Second })
	seen := map[string]int{}
	for got := 0; got < n; {
		ds := r.receive(s, min(100, n-got))
		got += len(ds)
		for _, d := range ds {
			seen[d.ID]++
		}
		r.done(s, ds...)
	}
	require.Len(t, seen, n)
	require.LessOrEqual(t, r.wire.counted("DeleteMessageBatch"), n/10*12/10)
	st, err := s.Status(t.Context())
	require.NoError(t, err)
	require.Zero(t, st.Lag())
}
