package memory_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/brokers/memory"
)

var profiles = map[string]func(b *memory.Broker, name string){
	"queue": func(b *memory.Broker, n string) { b.Queue(n, memory.QueueConfig{Visibility: 2 * time.Second}) },
	"fifo": func(b *memory.Broker, n string) {
		b.Queue(n, memory.QueueConfig{Visibility: 2 * time.Second, FIFO: true})
	},
	"chan": func(b *memory.Broker, n string) {
		b.Channel(n, memory.ChannelConfig{Quorum: true, ConsumerTimeout: time.Minute})
	},
	"single": func(b *memory.Broker, n string) {
		b.Channel(n, memory.ChannelConfig{SingleActive: true, ConsumerTimeout: time.Minute})
	},
	"topic": func(b *memory.Broker, n string) {
		b.Topic(n, memory.TopicConfig{Partitions: 3, HeartbeatEvery: 200 * time.Millisecond})
	},
}

// world is what a run of consumers and producers on every profile came to.
type world struct {
	history string
	effects map[string]int // first deliveries by profile and message
	repeats int
}

// runWorld publishes n messages to every profile from two goroutines each, and
// consumes them with two Sources of two workers each, until all have been seen and
// the broker is empty. Goroutines race freely: only the seed orders them.
func runWorld(t *testing.T, cfg memory.Config, n int) (w world) {
	synctest.Test(t, func(t *testing.T) {
		b := memory.New(cfg)
		w.effects = map[string]int{}
		var mu sync.Mutex
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Hour)
		defer cancel()
		var all sync.WaitGroup
		for _, p := range []string{"queue", "fifo", "chan", "single", "topic"} {
			profiles[p](b, p)
		}
		for _, p := range []string{"queue", "fifo", "chan", "single", "topic"} {
			pctx, done := context.WithCancel(ctx)
			srcs := []brokers.Source{b.Source(p), b.Source(p)}
			for _, src := range srcs {
				_, err := src.Open(ctx, brokers.OpenOptions{Room: 6})
				require.NoError(t, err)
			}
			left := n
			see := func(id string) {
				mu.Lock()
				defer mu.Unlock()
				if w.effects[p+"/"+id]++; w.effects[p+"/"+id] > 1 {
					w.repeats++
				} else if left--; left == 0 {
					done()
				}
			}
			for half := range 2 {
				pub := b.Publisher()
				all.Go(func() {
					for i := half; i < n; i += 2 {
						m := &brokers.Message{ID: fmt.Sprintf("m%03d", i), Topic: p, Key: fmt.Sprint("k", i%5)}
						for ctx.Err() == nil && pub.Publish(ctx, m)[0].Outcome != brokers.Accepted {
						}
					}
				})
			}
			for _, src := range srcs {
				all.Go(func() {
					work := make(chan *brokers.Delivery)
					var workers sync.WaitGroup
					for range 2 {
						workers.Go(func() {
							for d := range work {
								time.Sleep(time.Duration(len(d.Payload)) + 3*time.Millisecond)
								see(d.ID)
								for range 5 { // what failed is worth another try
									err := src.Settle(ctx, brokers.Settlement{Delivery: d, Verb: brokers.Done})[0]
									if err == nil || brokers.ClassOf(err) == brokers.Lost {
										break
									}
								}
							}
						})
					}
					for {
						ds, err := src.Receive(pctx, 4)
						if err != nil {
							break
						}
						for _, d := range ds {
							work <- d
						}
					}
					close(work)
					workers.Wait()
					assert.NoError(t, src.Close(context.Background()))
				})
			}
		}
		all.Wait()
		for _, p := range []string{"queue", "fifo", "chan", "single", "topic"} {
			for i := range n {
				if id := fmt.Sprintf("%s/m%03d", p, i); w.effects[id] == 0 {
					t.Errorf("%s did not arrive", id)
				}
			}
		}
		require.NoError(t, b.Check())
		w.history = b.History().String()
	})
	return w
}

func TestSameSeedSameHistory(t *testing.T) {
	t.Parallel()
	seeds := 40
	if testing.Short() {
		seeds = 5
	}
	seen := map[string]bool{}
	for seed := range uint64(seeds) {
		cfg := memory.Config{Seed: seed + 1, Chaos: memory.Chaos{
			Seed: seed, Duplicate: 0.2, LoseAck: 0.05, FailAck: 0.05, Delay: 0.1, Reorder: 4, Disconnect: 0.02, PublishUnknown: 0.1, PublishNack: 0.05,
		}}
		first, second := runWorld(t, cfg, 30), runWorld(t, cfg, 30)
		if first.history != second.history {
			t.Fatalf("seed %d gave two histories, which part at\n%s", cfg.Seed, parting(first.history, second.history))
		}
		seen[first.history] = true
		require.Len(t, first.effects, 5*30)
		require.NotZero(t, first.repeats, "chaos struck nobody")
	}
	assert.Len(t, seen, seeds, "another seed is another history")
}

func parting(a, b string) string {
	x, y := strings.Split(a, "\n"), strings.Split(b, "\n")
	for i := range min(len(x), len(y)) {
		if x[i] != y[i] {
			return strings.Join(x[max(0, i-5):i+1], "\n") + "\n--- or\n" + y[i]
		}
	}
	return fmt.Sprintf("the end: %d and %d lines", len(x), len(y))
}

func TestNoHistoryWithoutASeed(t *testing.T) {
	t.Parallel()
	w := runWorld(t, memory.Config{}, 20)
	assert.Empty(t, w.history)
	assert.Len(t, w.effects, 100)
}

// Reordered and duplicated, a thousand times: every message arrives, and the
// invariants hold.
func TestReorderAThousandSeeds(t *testing.T) {
	t.Parallel()
	seeds := 1000
	if testing.Short() {
		seeds = 50
	}
	swapped := 0
	for seed := range uint64(seeds) {
		synctest.Test(t, func(t *testing.T) {
			b := memory.New(memory.Config{Seed: seed + 1})
			b.Inject(memory.Select{Name: "q", Times: memory.Always}, memory.Reorder(5))
			r := rand.New(rand.NewPCG(seed, 0))
			for range 4 {
				b.Inject(memory.Select{Name: "q", ID: fmt.Sprintf("m%d", r.IntN(20))}, memory.DuplicateDelivery())
			}
			src := open(t, b, "q", 64)
			publish(t, b, "q", 20)
			got, first := map[string]int{}, []string{}
			for len(b.Pending()) > 0 || b.Len("q") > 0 {
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				ds, err := src.Receive(ctx, 3)
				cancel()
				if err != nil {
					break // the faults left over struck the same message's second copy, or none
				}
				for _, d := range ds {
					if got[d.ID]++; got[d.ID] == 1 {
						first = append(first, d.ID)
					}
					require.NoError(t, settle(src, d, brokers.Done))
				}
			}
			require.Len(t, got, 20)
			for i, id := range first {
				if id != fmt.Sprintf("m%d", i) {
					swapped++
					break
				}
			}
			require.Zero(t, b.Len("q"))
			require.NoError(t, b.Check())
		})
	}
	assert.Greater(t, swapped, seeds*9/10)
}

func TestChaosDeliversEverythingTwiceAndOutOfOrder(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := memory.New(memory.Config{Chaos: memory.Chaos{Seed: 1, Duplicate: 1, Reorder: 8, Delay: 0.3}})
		src := open(t, b, "orders", 64)
		publish(t, b, "orders", 100)
		ds := receive(t, src, 64)
		got := map[string]int{}
		inOrder := true
		for n := 0; ; {
			for _, d := range ds {
				inOrder = inOrder && d.ID == fmt.Sprintf("m%d", n)
				n++
				got[d.ID]++
				require.NoError(t, settle(src, d, brokers.Done))
			}
			if b.Len("orders") == 0 {
				break
			}
			ds = receive(t, src, 1)
		}
		assert.False(t, inOrder)
		require.Len(t, got, 100)
		for id, n := range got {
			assert.Equal(t, 2, n, id)
		}
		require.NoError(t, b.Check())
	})
}
