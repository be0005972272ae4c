package rabbitmq

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
)

func TestEveryMessageIsDeliveredOnceWhenNothingFails(t *testing.T) {
	t.Parallel()
	const n = 10_000
	r := newRig(t)
	r.declare(nil)
	r.put(0, n)
	s, caps, _ := r.source(100)
	assert.Equal(t, brokers.CountsDeliveries, caps.Counting)
	assert.Equal(t, brokers.GiveBackMessage, caps.GiveBack)
	assert.False(t, caps.LaneOrdered)

	// 32 workers settle out of order, each some at a time.
	var mu sync.Mutex
	seen := map[string]int{}
	work := make(chan *brokers.Delivery)
	var wg sync.WaitGroup
	for range 32 {
		wg.Go(func() {
			var batch []*brokers.Delivery
			for d := range work {
				mu.Lock()
				seen[d.ID]++
				mu.Unlock()
				batch = append(batch, d)
				if len(batch) > rand.N(3) {
					rand.Shuffle(len(batch), func(i, j int) { batch[i], batch[j] = batch[j], batch[i] })
					for _, err := range s.Settle(t.Context(), settlements(brokers.Done, batch...)...) {
						assert.NoError(t, err)
					}
					batch = nil
				}
			}
			s.Settle(t.Context(), settlements(brokers.Done, batch...)...)
		})
	}
	for range n {
		work <- receive(t, s, 1)[0]
	}
	close(work)
	wg.Wait()
	assert.Len(t, seen, n)
	closeWithin(t, s.Close)
	r.ready(r.queue, 0)
}

func TestPrefetchIsTheRoom(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.declare(nil)
	r.put(0, 50)
	s, _, _ := r.source(10)
	r.ready(r.queue, 40)
	ds := receive(t, s, 10)
	assert.Equal(t, id(0), ds[0].ID)
	settle(t, s, brokers.Done, ds[:4]...)
	r.ready(r.queue, 36)
	st, err := s.Status(t.Context())
	require.NoError(t, err)
	assert.True(t, st.Connected)
	assert.EqualValues(t, 36, st.Lag())
}

func TestSecondSettlementNeverReachesTheWire(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.declare(nil)
	r.put(0, 3)
	p := newProxy(t, r.addr())
	s, _, _ := r.source(10, func(c *SourceConfig) { c.URL = p.url() })
	ds := receive(t, s, 3)
	settle(t, s, brokers.Done, ds[0])
	errs := s.Settle(t.Context(), settlements(brokers.Done, ds[0], ds[0])...)
	require.ErrorIs(t, errs[0], brokers.ErrAlreadySettled)
	require.ErrorIs(t, errs[1], brokers.ErrAlreadySettled)
	// In one call too.
	errs = s.Settle(t.Context(), settlements(brokers.Done, ds[1], ds[1])...)
	require.NoError(t, errs[0])
	require.ErrorIs(t, errs[1], brokers.ErrAlreadySettled)

	settle(t, s, brokers.Done, ds[2]) // the channel lives
	assert.Equal(t, uint64(1), ds[2].Lane.Epoch)
	require.Eventually(t, func() bool { return len(p.methods(idAck)) == 3 }, patience, 10*time.Millisecond)

	closeWithin(t, s.Close)
	require.ErrorIs(t, s.Settle(t.Context(), settlements(brokers.Done, ds[0])...)[0], brokers.ErrAlreadySettled)
	assert.Len(t, p.methods(idAck, idNack, idReject), 3)
	_, err := s.Receive(t.Context(), 1)
	require.ErrorIs(t, err, brokers.ErrClosed)
	_, err = s.Receive(t.Context(), 1)
	require.ErrorIs(t, err, brokers.ErrClosed)
}

func TestSettleAfterCloseSendsNothing(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.declare(nil)
	r.put(0, 2)
	s, _, _ := r.source(10)
	ds := receive(t, s, 2)
	closeWithin(t, s.Close)
	closeWithin(t, s.Close) // again is nothing
	for _, d := range ds {
		require.ErrorIs(t, context.Cause(d.Context), brokers.ErrClosed)
	}
	errs := s.Settle(t.Context(), settlements(brokers.Done, ds...)...)
	require.ErrorIs(t, errs[0], brokers.ErrClosed)
	require.ErrorIs(t, errs[1], brokers.ErrClosed)
	r.ready(r.queue, 2)
}

func TestCloseGivesBackWhatWasNotSettledAtOnce(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"quorum", "classic"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.declare(amqp.Table{"x-queue-type": kind})
			r.put(0, 100)
			s, _, _ := r.source(100)
			started := receive(t, s, 30)
			r.ready(r.queue, 0)
			settle(t, s, brokers.Done, started...)
			closeWithin(t, s.Close)
			require.Eventually(t, func() bool { n, _ := r.count(r.queue); return n == 70 }, time.Second, 10*time.Millisecond)
			again, _, _ := r.source(100)
			for _, d := range receive(t, again, 70) {
				assert.Equal(t, 2, d.Attempt, "the redelivered flag is lost")
			}
		})
	}
}

// The broker passes only so many acknowledgements on at a time, and forgets the
// others with their channel.
func TestBurstOfAcknowledgementsSurvivesClose(t *testing.T) {
	t.Parallel()
	const n = 1000
	r := newRig(t)
	r.declare(nil)
	r.put(0, n)
	for from := 0; from < n; from += 250 {
		s, _, _ := r.source(250)
		settle(t, s, brokers.Done, receive(t, s, 250)...)
		closeWithin(t, s.Close)
		r.ready(r.queue, n-from-250)
	}
}

func TestReceiveThatIsCancelledLosesNothing(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.declare(nil)
	s, _, _ := r.source(10)
	for i := range 30 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(rand.N(3000))*time.Microsecond)
		if i%2 == 0 {
			r.put(i, i+1)
		}
		ds, err := s.Receive(ctx, 10)
		cancel()
		if err == nil {
			settle(t, s, brokers.Done, ds...)
			continue
		}
		require.ErrorIs(t, err, context.DeadlineExceeded)
	}
	r.ready(r.queue, 0)
}

func TestReleaseAndRetryComeAgainAndCount(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.declare(nil)
	r.put(0, 1)
	s, _, _ := r.source(10)
	d := receive(t, s, 1)[0]
	assert.Equal(t, 1, d.Attempt)
	settle(t, s, brokers.Release, d)
	d = receive(t, s, 1)[0]
	assert.GreaterOrEqual(t, d.Attempt, 2)
	settle(t, s, brokers.Retry, d)
	d = receive(t, s, 1)[0]
	assert.GreaterOrEqual(t, d.Attempt, 2)
	err := s.Settle(t.Context(), brokers.Settlement{Delivery: d, Verb: brokers.Retry, After: time.Second})[0]
	require.ErrorIs(t, err, brokers.ErrUnsupported)
	settle(t, s, brokers.Done, d) // an unsupported verb has not used it up
}

func TestRejectWithoutDeadLettersIsUnsupported(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.declare(nil)
	r.put(0, 1)
	s, caps, _ := r.source(10)
	assert.False(t, caps.Reject)
	d := receive(t, s, 1)[0]
	require.ErrorIs(t, s.Settle(t.Context(), settlements(brokers.Reject, d)...)[0], brokers.ErrUnsupported)
	settle(t, s, brokers.Done, d)
}

func TestDeliveryOfAnotherSourceIsNotSettled(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.declare(nil)
	r.put(0, 2)
	one, _, _ := r.source(1)
	two, _, _ := r.source(1)
	d := receive(t, one, 1)[0]
	receive(t, two, 1)
	errs := two.Settle(t.Context(), brokers.Settlement{}, brokers.Settlement{Delivery: d, Verb: brokers.Done})
	assert.Equal(t, brokers.Permanent, brokers.ClassOf(errs[0]))
	require.ErrorIs(t, errs[1], brokers.ErrOwnershipLost)
	settle(t, one, brokers.Done, d)
}

// A late answer under an old channel would acknowledge whatever has its number
// on the new one: EasyNetQ/EasyNetQ#1329, rabbitmq/rabbitmq-dotnet-client#200,
// ruby-amqp/bunny#142, rabbitmq/amqp091-go#379.
func TestStaleDeliveryTagIsNeverSentAfterAReconnect(t *testing.T) {
	t.Parallel()
	const n = 50
	r := newRig(t)
	r.declare(nil)
	r.put(0, n)
	p := newProxy(t, r.addr())
	s, _, ev := r.source(n, func(c *SourceConfig) { c.URL = p.url() })
	old := receive(t, s, n)

	p.cut()
	ev.wait(t, brokers.EventConnected, 2)
	for _, d := range old {
		<-d.Context.Done()
		require.ErrorIs(t, context.Cause(d.Context), brokers.ErrOwnershipLost)
	}
	fresh := receive(t, s, n) // the same numbers, on a new channel
	assert.Greater(t, fresh[0].Lane.Epoch, old[0].Lane.Epoch)

	for _, err := range s.Settle(t.Context(), settlements(brokers.Done, old...)...) {
		require.ErrorIs(t, err, brokers.ErrOwnershipLost)
		assert.Equal(t, brokers.Lost, brokers.ClassOf(err))
	}
	assert.Empty(t, p.methods(idAck, idNack, idReject), "an old tag went out")
	lost := ev.of(brokers.EventSettleLost)
	require.Len(t, lost, 1)
	assert.Equal(t, n, lost[0].Count)

	// Nothing was acknowledged by mistake: a crash now brings back everything.
	p.accepting(false)
	p.cut()
	r.ready(r.queue, n)
	p.accepting(true)
	last := receive(t, s, n)
	settle(t, s, brokers.Done, last...)
	got := ids(last)
	slices.Sort(got)
	assert.Equal(t, id(0), got[0])
	assert.Len(t, slices.Compact(got), n)
	closeWithin(t, s.Close)
	r.ready(r.queue, 0)
}

// rabbitmq/amqp091-go#32, #18, #11, #225,
// knative-extensions/eventing-rabbitmq#1369, ThreeDotsLabs/watermill-amqp#14.
func TestConnectionLostDuringHandlersIsHealedEveryTime(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.declare(nil)
	p := newProxy(t, r.addr())
	s, _, ev := r.source(10, func(c *SourceConfig) { c.URL = p.url() })
	for round := range 20 {
		r.put(round*5, round*5+5)
		running := receive(t, s, 5)
		if round%3 == 1 { // also while the next subscription is being made
			p.pass(true, false)
			p.cut()
			p.pass(true, true)
		}
		p.cut()
		<-running[0].Context.Done()
		for _, err := range s.Settle(t.Context(), settlements(brokers.Done, running...)...) {
			require.ErrorIs(t, err, brokers.ErrOwnershipLost)
		}
		began := time.Now()
		again := receive(t, s, 5)
		assert.Less(t, time.Since(began), 15*time.Second)
		settle(t, s, brokers.Done, again...)
	}
	assert.GreaterOrEqual(t, len(ev.of(brokers.EventDisconnected)), 20)
	r.ready(r.queue, 0)
}

func TestHalfOpenConnectionIsNoticed(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.declare(nil)
	r.put(0, 1)
	p := newProxy(t, r.addr())
	s, _, ev := r.source(10, func(c *SourceConfig) { c.URL, c.Heartbeat = p.url(), 2*time.Second })
	d := receive(t, s, 1)[0]
	p.pass(false, false)
	began := time.Now()
	<-d.Context.Done()
	assert.Less(t, time.Since(began), 3*2*time.Second+time.Second)
	require.ErrorIs(t, context.Cause(d.Context), brokers.ErrOwnershipLost)
	p.cut()
	p.pass(true, true)
	ev.wait(t, brokers.EventConnected, 2)
	again := receive(t, s, 1)[0]
	assert.Greater(t, again.Lane.Epoch, d.Lane.Epoch)
	settle(t, s, brokers.Done, again)
}

// rascal#52 of guidesmiths, php-amqplib/php-amqplib#95, EasyNetQ/EasyNetQ#101,
// streadway/amqp#134.
func TestConsumerCancelledByTheServerSubscribesAgain(t *testing.T) {
	t.Parallel()
	for _, topology := range []Topology{Verify, None} {
		t.Run(topology.String(), func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.declare(nil)
			r.put(0, 1)
			s, _, ev := r.source(10, func(c *SourceConfig) { c.Topology = topology })
			d := receive(t, s, 1)[0]
			r.do(func(ch *amqp.Channel) error { _, err := ch.QueueDelete(r.queue, false, false, false); return err })
			<-d.Context.Done()
			gone := ev.wait(t, brokers.EventDisconnected, 1)
			require.Error(t, gone[0].Err)
			st, err := s.Status(t.Context())
			assert.False(t, st.Connected)
			_ = err // the count of a missing queue is an error, or not known yet
			require.ErrorIs(t, s.Settle(t.Context(), settlements(brokers.Done, d)...)[0], brokers.ErrOwnershipLost)

			r.declare(nil)
			began := time.Now()
			ev.wait(t, brokers.EventConnected, 2)
			assert.Less(t, time.Since(began), time.Second)
			r.put(1, 2)
			got := receive(t, s, 1)
			assert.Equal(t, id(1), got[0].ID)
			settle(t, s, brokers.Done, got...)
		})
	}
}

func TestQueueMissingForTooLongIsFatal(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.declare(nil)
	s, _, _ := r.source(10, func(c *SourceConfig) { c.MissingFor = time.Second })
	r.do(func(ch *amqp.Channel) error { _, err := ch.QueueDelete(r.queue, false, false, false); return err })
	began := time.Now()
	_, err := s.Receive(t.Context(), 1)
	require.ErrorIs(t, err, brokers.ErrNoRoute)
	assert.Equal(t, brokers.Fatal, brokers.ClassOf(err))
	assert.ErrorContains(t, err, r.queue)
	assert.GreaterOrEqual(t, time.Since(began), 900*time.Millisecond)
	_, err = s.Receive(t.Context(), 1)
	require.ErrorIs(t, err, brokers.ErrNoRoute)
}

func TestMissingQueueIsFatalAtOpenAndSaysWhatToDo(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	s, err := NewSource(SourceConfig{URL: r.url, Queue: r.queue})
	require.NoError(t, err)
	began := time.Now()
	_, err = s.Open(t.Context(), brokers.OpenOptions{Consumer: "c"})
	require.ErrorIs(t, err, brokers.ErrNoRoute)
	assert.Equal(t, brokers.Fatal, brokers.ClassOf(err))
	assert.Less(t, time.Since(began), 5*time.Second)
	assert.ErrorContains(t, err, r.queue)
	assert.ErrorContains(t, err, "Topology")
	var ae *amqp.Error
	require.ErrorAs(t, err, &ae, "the vendor's error is out of reach")
	assert.Equal(t, amqp.NotFound, ae.Code)
	closeWithin(t, s.Close)
}

func TestRedeclareWithOtherArgumentsIsFatalAndNamesBothValues(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	declare := func(c *SourceConfig) { c.Topology = Declare }
	s, caps, _ := r.source(10, declare)
	assert.True(t, caps.Reject)
	closeWithin(t, s.Close)

	other, err := NewSource(SourceConfig{URL: r.url, Queue: r.queue, Topology: Declare, DeliveryLimit: 7})
	require.NoError(t, err)
	_, err = other.Open(t.Context(), brokers.OpenOptions{Consumer: "c"})
	assert.Equal(t, brokers.Fatal, brokers.ClassOf(err))
	require.ErrorContains(t, err, "x-delivery-limit")
	assert.ErrorContains(t, err, "'7'")
	assert.ErrorContains(t, err, "'1000'")
	closeWithin(t, other.Close)

	// Equal arguments are no redeclaration.
	again, _, _ := r.source(10, declare)
	closeWithin(t, again.Close)
}

// The declarations run on channels of their own: a refusal while consuming must
// not close the consuming one.
func TestRefusedStatusDoesNotDisturbTheSubscription(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.declare(nil)
	s, _, ev := r.source(10)
	_, err := s.connection().readyCount(t.Context(), "no-such-queue")
	require.ErrorIs(t, err, brokers.ErrNoRoute)
	r.put(0, 1)
	settle(t, s, brokers.Done, receive(t, s, 1)...)
	assert.Empty(t, ev.of(brokers.EventDisconnected))
}

// The broker's limit alone: n+1 deliveries, then the dead-letter queue. It counts
// neighbours too, hence the high default: rabbitmq/rabbitmq-server#11937.
func TestDeliveryLimitDeadLettersAfterOneMore(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	s, _, _ := r.source(10, func(c *SourceConfig) { c.Topology, c.DeliveryLimit = Declare, 3 })
	r.put(0, 1)
	for n := 1; n <= 4; n++ {
		d := receive(t, s, 1)[0]
		assert.Equal(t, n, d.Attempt)
		settle(t, s, brokers.Retry, d)
	}
	r.ready(r.queue+".dead", 1)
	assert.Equal(t, []string{id(0)}, r.get(r.queue+".dead"))
}

func TestRejectGoesToTheDeadLetterQueue(t *testing.T) {
	t.Parallel()
	for _, kind := range []QueueType{Quorum, Classic} {
		t.Run(kind.String(), func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			s, caps, _ := r.source(10, func(c *SourceConfig) { c.Topology, c.QueueType = Declare, kind })
			require.True(t, caps.Reject)
			if kind == Classic {
				assert.Equal(t, brokers.CountsRedelivered, caps.Counting)
			}
			r.put(0, 2)
			ds := receive(t, s, 2)
			settle(t, s, brokers.Reject, ds[0])
			settle(t, s, brokers.Done, ds[1])
			r.ready(r.queue+".dead", 1)
			assert.Equal(t, []string{id(0)}, r.get(r.queue+".dead"))
		})
	}
}

func TestDeclareBindsToExchanges(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	exchange := r.queue + ".x"
	s, _, _ := r.source(10, func(c *SourceConfig) {
		c.Topology = Declare
		c.DeadLetterQueue = NoDeadLetters
		c.Bindings = []Binding{{Exchange: exchange, Kind: "topic", Key: "order.*"}}
	})
	t.Cleanup(func() { r.do(func(ch *amqp.Channel) error { return ch.ExchangeDelete(exchange, false, false) }) })
	p, _ := r.publisher(func(c *PublisherConfig) { c.Exchange = exchange })
	rs := p.Publish(t.Context(), &brokers.Message{ID: "a", Topic: "order.placed"}, &brokers.Message{ID: "b", Topic: "invoice.placed"})
	require.Equal(t, brokers.Accepted, rs[0].Outcome, rs[0].Err)
	require.ErrorIs(t, rs[1].Err, brokers.ErrNoRoute)
	d := receive(t, s, 1)[0]
	assert.Equal(t, "order.placed", d.Topic)
	x, _ := d.Headers.Get(HeaderExchange)
	assert.Equal(t, exchange, string(x))
	settle(t, s, brokers.Done, d)

	missing, err := NewSource(SourceConfig{URL: r.url, Queue: r.queue + "2", Topology: Declare, Bindings: []Binding{{Exchange: "no-such-exchange", Key: "k"}}})
	require.NoError(t, err)
	_, err = missing.Open(t.Context(), brokers.OpenOptions{Consumer: "c"})
	require.ErrorIs(t, err, brokers.ErrNoRoute)
	assert.ErrorContains(t, err, "no-such-exchange")
	for _, q := range []string{"2", "2.dead"} {
		r.do(func(ch *amqp.Channel) error { _, err := ch.QueueDelete(r.queue+q, false, false, false); return err })
	}
}

// A wrong password is said within seconds, and without the password.
func TestWrongCredentialsAreFatalWithinSeconds(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.declare(nil)
	bad := strings.Replace(r.url, "guest:guest@", "guest:hunter2@", 1)
	require.NotEqual(t, r.url, bad)
	s, err := NewSource(SourceConfig{URL: bad, Queue: r.queue})
	require.NoError(t, err)
	began := time.Now()
	_, err = s.Open(t.Context(), brokers.OpenOptions{Consumer: "c"})
	assert.Less(t, time.Since(began), 10*time.Second)
	assert.Equal(t, brokers.Fatal, brokers.ClassOf(err), err)
	require.ErrorContains(t, err, "check user name and password")
	assert.ErrorContains(t, err, `user "guest"`)
	assert.NotContains(t, err.Error(), "hunter2")

	p, _ := r.publisher(func(c *PublisherConfig) { c.URL = bad })
	err = p.Open(t.Context())
	assert.Equal(t, brokers.Fatal, brokers.ClassOf(err), err)
	assert.NotContains(t, err.Error(), "hunter2")
	rs := p.Publish(t.Context(), r.message(0, ""))
	assert.Equal(t, brokers.NotSent, rs[0].Outcome)
	assert.Equal(t, brokers.Fatal, brokers.ClassOf(rs[0].Err))
}

func TestMissingVhostIsFatal(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	s, err := NewSource(SourceConfig{URL: "amqp://guest:guest@" + r.addr() + "/no-such-vhost", Queue: r.queue})
	require.NoError(t, err)
	_, err = s.Open(t.Context(), brokers.OpenOptions{Consumer: "c"})
	assert.Equal(t, brokers.Fatal, brokers.ClassOf(err))
	require.ErrorContains(t, err, "check that the vhost exists")
}

// A connection that breaks in the handshake looks like bad credentials to the
// library; it must not end the Source.
func TestHandshakeThatBreaksIsNotTakenForWrongCredentials(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.declare(nil)
	p := newProxy(t, r.addr())
	p.pass(false, true)
	s, err := NewSource(SourceConfig{URL: p.url(), Queue: r.queue})
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	_, err = s.Open(ctx, brokers.OpenOptions{Consumer: "c"})
	require.ErrorIs(t, err, context.DeadlineExceeded)
	assert.Equal(t, brokers.Retryable, brokers.ClassOf(err), err)
}

func TestOpenWaitsForABrokerThatIsDown(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.declare(nil)
	p := newProxy(t, r.addr())
	p.accepting(false)
	s, err := NewSource(SourceConfig{URL: p.url(), Queue: r.queue})
	require.NoError(t, err)
	opened := make(chan error, 1)
	go func() {
		_, err := s.Open(t.Context(), brokers.OpenOptions{Consumer: "c"})
		opened <- err
	}()
	require.Eventually(t, func() bool { p.mu.Lock(); defer p.mu.Unlock(); return p.accepts >= 4 }, patience, 10*time.Millisecond)
	p.accepting(true)
	require.NoError(t, <-opened)
	closeWithin(t, s.Close)
}

// The next node is tried when one is gone.
func TestNodesAreTriedInTurn(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.declare(nil)
	dead := newProxy(t, r.addr())
	dead.accepting(false)
	s, _, _ := r.source(10, func(c *SourceConfig) { c.URL, c.MoreURLs = dead.url(), []string{r.url} })
	r.put(0, 1)
	settle(t, s, brokers.Done, receive(t, s, 1)...)
	p, _ := r.publisher(func(c *PublisherConfig) { c.URL, c.MoreURLs = dead.url(), []string{r.url} })
	require.Error(t, p.Open(t.Context()))
	require.NoError(t, p.Open(t.Context()))
}

// A consumer that is cancelled lets the next one start
// while its messages are still being handled: spring-projects/spring-integration#8668,
// spring-projects/spring-amqp#2482.
func TestSingleActiveConsumerKeepsOrderOverHandOvers(t *testing.T) {
	t.Parallel()
	for _, kind := range []QueueType{Quorum, Classic} {
		t.Run(kind.String(), func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			sac := func(c *SourceConfig) { c.Topology, c.QueueType, c.SingleActiveConsumer = Declare, kind, true }
			const n = 60
			var order []string
			first, caps, _ := r.source(5, sac)
			assert.True(t, caps.LaneOrdered)
			assert.Equal(t, brokers.GiveBackLane, caps.GiveBack)
			assert.Zero(t, caps.MaxRetryDelay)
			r.put(0, n)
			current := first
			for i := range 3 {
				next, _, _ := r.source(5, sac)
				for range n / 4 {
					d := receive(t, current, 1)[0]
					order = append(order, d.ID)
					settle(t, current, brokers.Done, d)
				}
				if i < 2 { // a graceful stop with others in hand and in the buffer
					receive(t, current, 2)
				}
				closeWithin(t, current.Close)
				current = next
			}
			for range n - 3*(n/4) {
				d := receive(t, current, 1)[0]
				order = append(order, d.ID)
				settle(t, current, brokers.Done, d)
			}
			assert.True(t, slices.IsSorted(order), "%v", order)
			assert.Len(t, slices.Compact(order), n)
		})
	}
}

// Release on an ordered lane gives back every later message too, and order holds.
func TestReleaseOnAnOrderedLaneGivesBackTheLane(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.put0(func(c *SourceConfig) { c.Topology, c.SingleActiveConsumer = Declare, true })
	r.put(0, 10)
	s, _, _ := r.source(10, func(c *SourceConfig) { c.Topology, c.SingleActiveConsumer = Declare, true })
	ds := receive(t, s, 5) // five more are buffered
	settle(t, s, brokers.Done, ds[0])
	require.ErrorIs(t, s.Settle(t.Context(), settlements(brokers.Retry, ds[2])...)[0], brokers.ErrUnsupported)
	// Verbs beside a Release are carried out first, wherever they stand in the call.
	errs := s.Settle(t.Context(), append(settlements(brokers.Release, ds[2], ds[3]), settlements(brokers.Done, ds[1])...)...)
	for _, err := range errs {
		require.NoError(t, err)
	}
	for _, d := range ds[2:] {
		<-d.Context.Done()
		require.ErrorIs(t, context.Cause(d.Context), brokers.ErrOwnershipLost)
	}
	// The neighbour that went back with the lane: releasing needs nothing, and a late
	// answer is dropped.
	require.NoError(t, s.Settle(t.Context(), settlements(brokers.Release, ds[4])...)[0])
	require.ErrorIs(t, s.Settle(t.Context(), settlements(brokers.Done, ds[2])...)[0], brokers.ErrAlreadySettled)

	again := receive(t, s, 8)
	assert.Equal(t, []string{id(2), id(3), id(4), id(5), id(6), id(7), id(8), id(9)}, ids(again))
	assert.Greater(t, again[0].Lane.Epoch, ds[0].Lane.Epoch)
	settle(t, s, brokers.Done, again...)
}

// put0 makes the queue by opening and closing a Source.
func (r *rig) put0(edit func(*SourceConfig)) {
	s, _, _ := r.source(1, edit)
	closeWithin(r.t, s.Close)
}

// What is held for too long goes back alone, before the broker's timeout takes
// the neighbours: zulip/zulip#39661, facile-it/rabbitmq-consumer#6,
// celery/celery#6760, Bogdanp/dramatiq#827.
func TestDeliveryHeldForMaxHoldGoesBackAlone(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.declare(nil)
	r.put(0, 2)
	s, caps, ev := r.source(10, func(c *SourceConfig) { c.MaxHold = 500 * time.Millisecond })
	assert.Equal(t, 500*time.Millisecond, caps.MaxHold)
	ds := receive(t, s, 2)
	began := time.Now()
	settle(t, s, brokers.Done, ds[1])
	<-ds[0].Context.Done()
	assert.GreaterOrEqual(t, time.Since(began), 400*time.Millisecond)
	require.ErrorIs(t, context.Cause(ds[0].Context), brokers.ErrOwnershipLost)
	require.ErrorIs(t, s.Settle(t.Context(), settlements(brokers.Done, ds[0])...)[0], brokers.ErrOwnershipLost)
	again := receive(t, s, 1)[0]
	assert.Equal(t, ds[0].ID, again.ID)
	assert.Equal(t, ds[0].Lane, again.Lane, "the subscription went on")
	settle(t, s, brokers.Done, again)
	assert.Empty(t, ev.of(brokers.EventDisconnected))
}

// A message that waits in the buffer of a paused runner for MaxHold goes back too.
func TestBufferedDeliveryHeldForMaxHoldGoesBack(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.declare(nil)
	r.put(0, 1)
	s, _, _ := r.source(10, func(c *SourceConfig) { c.MaxHold = 300 * time.Millisecond })
	var attempt int
	require.Eventually(t, func() bool {
		d := receive(t, s, 1)[0]
		attempt = d.Attempt
		settle(t, s, brokers.Release, d)
		return attempt > 2
	}, patience, 500*time.Millisecond)
}

// MaxHold on an ordered lane gives back the lane.
func TestMaxHoldOnAnOrderedLaneKeepsOrder(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	edit := func(c *SourceConfig) {
		c.Topology, c.SingleActiveConsumer, c.MaxHold = Declare, true, 500*time.Millisecond
	}
	r.put0(edit)
	r.put(0, 3)
	s, _, _ := r.source(10, edit)
	ds := receive(t, s, 3)
	<-ds[0].Context.Done()
	<-ds[2].Context.Done()
	again := receive(t, s, 3)
	assert.Equal(t, []string{id(0), id(1), id(2)}, ids(again))
	settle(t, s, brokers.Done, again...)
}

func TestIDFunctionThatFailsMarksTheDelivery(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.declare(nil)
	r.put(0, 3)
	s, _, _ := r.source(10, func(c *SourceConfig) {
		c.KeyFromRoutingKey = true
		c.ID = func(m *brokers.Message) (string, error) {
			switch m.ID {
			case id(0):
				return "", errors.New("no tenant")
			case id(1):
				panic("odd")
			}
			return brokers.JoinID("tenant", m.ID), nil
		}
	})
	ds := receive(t, s, 3)
	require.ErrorContains(t, ds[0].Defect, "no tenant")
	assert.Equal(t, id(0), ds[0].ID)
	require.ErrorIs(t, ds[1].Defect, brokers.ErrBadID)
	require.NoError(t, ds[2].Defect)
	assert.Equal(t, "6:tenant6:"+id(2), ds[2].ID)
	assert.Equal(t, r.queue, ds[2].Key)
	settle(t, s, brokers.Done, ds...)
}

func TestWrongConfigurationIsReportedWhole(t *testing.T) {
	t.Parallel()
	_, err := NewSource(SourceConfig{
		URL: "amqp://guest:pa#ss:hunter2@host", Topology: 9, QueueType: 9, MaxHold: -1, Heartbeat: time.Millisecond,
		Bindings: []Binding{{}}, DeliveryLimit: -5, QueueArgs: map[string]any{"x": struct{}{}},
	})
	assert.Equal(t, brokers.Fatal, brokers.ClassOf(err))
	for _, part := range []string{"URL number 1", "Queue is empty", "Topology 9", "QueueType 9", "MaxHold", "Heartbeat", "Bindings", "DeliveryLimit", "QueueArgs"} {
		require.ErrorContains(t, err, part)
	}
	assert.NotContains(t, err.Error(), "hunter2")
	assert.NotContains(t, err.Error(), "pa#ss")
	_, err = NewPublisher(PublisherConfig{Window: -1, Topology: 9, AppID: strings.Repeat("x", 256)})
	for _, part := range []string{"URL is empty", "Window", "Topology 9", "AppID"} {
		require.ErrorContains(t, err, part)
	}
}

func TestSourceServesOneOpen(t *testing.T) {
	t.Parallel()
	s, err := NewSource(SourceConfig{URL: "amqp://127.0.0.1:1", Queue: "q"})
	require.NoError(t, err)
	_, err = s.Receive(t.Context(), 1)
	require.ErrorContains(t, err, "call Open first")
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	_, err = s.Open(ctx, brokers.OpenOptions{})
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, "connection refused", "the cause is lost")
	_, err = s.Open(t.Context(), brokers.OpenOptions{})
	assert.Equal(t, brokers.Fatal, brokers.ClassOf(err))
	require.NoError(t, s.Close(t.Context()))
}
