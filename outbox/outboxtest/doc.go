// Package outboxtest is the suite that every outbox passes: what a [outbox.Writer]
// and its relays guarantee together, whatever the database and its driver.
//
// It is for the outboxes of package outbox. [outbox.Queue] is sealed (see there), so
// a store of somebody else's cannot be a Queue; the suite is a package of its own so
// that all outboxes run one list of cases, and it asks for nothing but the public
// API and SQL.
//
// Which cases run follows from the hooks that the [Fixture] has. Nothing is skipped
// silently: the list of the cases that run, and of those that do not apply with the
// reason, must equal the file Config.Expected, which is checked in. Write it with
//
//	TWICEPROOF_UPDATE=1 go test ./outbox -run TestConformance
//
// The suite does not sleep: it waits for what must happen, at most Config.Wait.
// Cases that take long by the clock run where the Fixture can live in a
// testing/synctest bubble.
package outboxtest
