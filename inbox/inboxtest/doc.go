// Package inboxtest is the conformance suite of stores: it verifies that an
// [inbox.Store] keeps its contract, on a real database.
//
// A test of the store's package says how to make the parts:
//
//	func TestConformance(t *testing.T) {
//		inboxtest.Run(t, inboxtest.Config[*sql.Tx]{
//			Expected: "testdata/conformance-mystore.txt",
//			New: func(t *testing.T) inboxtest.Fixture[*sql.Tx] {
//				db := freshDatabase(t) // with the tables of package migrations
//				return inboxtest.Fixture[*sql.Tx]{Store: mystore.New(db), Exec: …, Count: …}
//			},
//		})
//	}
//
// Some cases look into the tables of package migrations, so a store that keeps its
// claims in tables of another form cannot run it. Which cases apply follows from
// the Fixture; the list of those that ran, and of those that do not apply with the
// reason, must equal the file Config.Expected. Write it with TWICEPROOF_UPDATE=1.
//
// The package is unstable before v1, as the interface is that it tests.
package inboxtest
