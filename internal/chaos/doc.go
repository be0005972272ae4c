// Package chaos holds the tests that kill things: the process of a consumer or a
// relay at every point where it matters, and, in long runs, consumers, relays,
// connections and the database again and again while messages flow. It exports
// nothing.
//
// What it shows, counted by SQL at the end and never by the program's own word:
// every message has exactly one effect, nothing stays held, nothing is left on the
// broker. Where the source keeps an order, the first effects of each key have it
// too.
//
// What it does not: the faults are those that are listed in docs/chaos.md. A disk
// that loses what it has confirmed is none of them.
package chaos
