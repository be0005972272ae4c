// Package brokertest is the conformance suite of broker adapters: it verifies that
// a [brokers.Source] and a [brokers.Publisher] keep their contracts, and that what
// their [brokers.Capabilities] claim is true.
//
// # Writing an adapter
//
// An adapter knows its broker and nothing else; see package brokers for what is
// asked of it. In short: Open connects and finds configuration mistakes; Receive
// hands over at most Room unsettled messages and loses none when its ctx ends; the
// Source keeps leases alive by itself from Receive to Settle; each delivery
// carries the ownership it was received under (Lane.Epoch), and a settlement under
// another one answers ErrOwnershipLost and sends nothing; verbs that the broker has
// not answer ErrUnsupported; Close gives back what is unsettled.
//
// # Running the suite
//
// A test of the adapter's package says how to make the parts, once for each way of
// using the broker whose Capabilities differ:
//
//	func TestConformance(t *testing.T) {
//		url := startServer(t)
//		brokertest.Run(t, brokertest.Config{
//			Expected: "testdata/conformance.txt",
//			New: func(t *testing.T) brokertest.Fixture {
//				queue := declareQueue(t, url) // fresh and empty: cases do not share one
//				return brokertest.Fixture{
//					Destination: queue,
//					Missing:     queue + "-missing",
//					Source:      func() brokers.Source { return mybroker.NewSource(url, queue) },
//					Publisher:   func() brokers.Publisher { return mybroker.NewPublisher(url) },
//					Disconnect:  func(src brokers.Source) { cutConnectionOf(src) },
//				}
//			},
//		})
//	}
//
// Which cases apply follows from the Capabilities, from the hooks that the Fixture
// has, and from Config.Exempt. Nothing is skipped silently: the list of the cases
// that ran, and of those that do not apply with the reason, must equal the file
// Config.Expected, which is checked in and read in review. Write it with
//
//	TWICEPROOF_UPDATE=1 go test ./brokers/mybroker -run TestConformance
//
// The suite never sleeps for a fixed time: it waits for what must happen, at most
// Config.Wait, and watches for what must not happen during Config.Quiet.
//
// # What it does not verify
//
// Performance, behaviour over hours, and faults that only the broker's own tests
// can bring about: full disks, failovers, expired credentials. Each adapter has
// scenarios of its own for these.
package brokertest
