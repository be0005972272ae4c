package memory_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/brokers/memory"
)

func Example() {
	ctx := context.Background()
	b := memory.New(memory.Config{})
	src := b.Source("orders") // declared by its first use: a standard queue
	if _, err := src.Open(ctx, brokers.OpenOptions{Consumer: "billing"}); err != nil {
		fmt.Println(err)
		return
	}
	defer src.Close(ctx)

	b.Publisher().Publish(ctx, &brokers.Message{ID: "order-1", Topic: "orders", Payload: []byte("3 apples")})
	ds, _ := src.Receive(ctx, 10)
	for _, d := range ds {
		fmt.Printf("%s: %s (attempt %d)\n", d.ID, d.Payload, d.Attempt)
		src.Settle(ctx, brokers.Settlement{Delivery: d, Verb: brokers.Done})
	}
	fmt.Println(b.Len("orders"), b.Check())
	// Output:
	// order-1: 3 apples (attempt 1)
	// 0 <nil>
}

// A message is delivered twice and the second publish of it is refused: what a
// consumer and a relay must live with.
func ExampleBroker_Inject() {
	ctx := context.Background()
	b := memory.New(memory.Config{})
	b.Inject(memory.Select{Name: "orders", ID: "order-1"}, memory.DuplicateDelivery())
	b.Inject(memory.Select{Name: "orders", Nth: 2}, memory.PublishNack(errors.New("the disk is full")))
	src, pub := b.Source("orders"), b.Publisher()
	src.Open(ctx, brokers.OpenOptions{})
	defer src.Close(ctx)
	for _, id := range []string{"order-1", "order-2"} {
		r := pub.Publish(ctx, &brokers.Message{ID: id, Topic: "orders"})[0]
		fmt.Println(id, r.Outcome, r.Err)
	}
	for range 2 {
		ds, _ := src.Receive(ctx, 1)
		fmt.Println("received", ds[0].ID)
		src.Settle(ctx, brokers.Settlement{Delivery: ds[0], Verb: brokers.Done})
	}
	fmt.Println("faults left:", len(b.Pending()))
	// Output:
	// order-1 accepted <nil>
	// order-2 refused the disk is full
	// received order-1
	// received order-1
	// faults left: 0
}
