// Command memory runs the wallet example on the broker that lives in the process,
// and PostgreSQL:
//
//	go run ./cmd/devenv -only postgres -- go run ./examples/wallet/memory
package main

import (
	"context"
	"log"

	"github.com/twiceproof/twiceproof/brokers/memory"
	"github.com/twiceproof/twiceproof/examples/wallet"
)

func main() {
	b := memory.New(memory.Config{})
	if err := wallet.Run(context.Background(), b.Source("topups"), b.Publisher(), "topups"); err != nil {
		log.Fatal(err)
	}
}
