package inbox

import (
	"context"
	"errors"
	"time"

	"github.com/twiceproof/twiceproof/brokers"
)

// Store keeps claims and held messages in a database whose transaction type is Tx.
type Store[Tx any] interface {
	// Begin opens a transaction and claims the unit's messages in it, before anything
	// else. It returns one verdict per item, and an Attempt when at least one is
	// Claimed; otherwise the transaction is over (what is behind a held message has
	// been held by it, if the unit says so) and the Attempt is nil.
	//
	// Errors: ErrClaimTimeout when a concurrent transaction has the ID for longer
	// than ClaimTimeout; one for which Rerun is true; everything else means that the
	// database cannot be used now, and nothing has happened.
	Begin(ctx context.Context, u Unit) (Attempt[Tx], []Verdict, error)

	// Record keeps outcomes of messages that were not processed, in a transaction of
	// its own: Recorded, or what was found instead (Held: it is held already).
	Record(ctx context.Context, u Unit, outcomes ...Outcome[Tx]) ([]Verdict, error)

	// TakeHeads marks due held messages as started by this caller for the lease, each
	// for one caller and only the first of its key, and returns them. ErrClaimTimeout:
	// another writer is in the way (SQLite); nothing was taken. Heads that come with an
	// error are those that are taken if the commit, whose answer is missing, succeeded:
	// give them to ReturnHead.
	TakeHeads(ctx context.Context, q HeadQuery) ([]*Head, error)
	// BeginRetry opens the transaction of a head's run. ErrHeadLost: it was taken
	// again, or settled, by somebody else. ErrTxEnded: an earlier run ended its
	// transaction itself and had committed; the head has been settled as done.
	BeginRetry(ctx context.Context, h *Head, u Unit) (Attempt[Tx], error)
	// ReturnHead takes a start back that counts for nothing (shutdown, outage), due
	// again after delay.
	ReturnHead(ctx context.Context, h *Head, delay time.Duration) error
	// RepairHeads makes the first message of every key due that a race, or a change
	// of AfterDead, left waiting; it returns how many.
	RepairHeads(ctx context.Context, consumer string, continueAfterDead bool) (int, error)
	// Held counts a consumer's held messages.
	Held(ctx context.Context, consumer string) (HeldStats, error)

	// Suspect notes that a run begins of a message that may have ended a process before,
	// in a transaction of its own, and returns how many have begun since Cleared, this one
	// included.
	Suspect(ctx context.Context, consumer string, it *Item) (starts int, err error)
	// Cleared forgets them: a run has ended, and the process has not.
	Cleared(ctx context.Context, consumer string, it *Item) error
	// LaneOwner returns who works on a broker's lane; "" is nobody. One that has not left
	// may have died. EnterLane makes owner the one, LeaveLane notes that it has ended in
	// good order.
	LaneOwner(ctx context.Context, consumer, lane string) (owner string, err error)
	EnterLane(ctx context.Context, consumer, lane, owner string) error
	LeaveLane(ctx context.Context, consumer, lane, owner string) error

	// Retain does one step of the cleanup of old claims, if the lease can be had. It never
	// deletes the claim of a message that is held, nor one younger than the window.
	Retain(ctx context.Context, r RetainRequest) (RetainResult, error)
	// CaughtUp notes that everything that was on the broker has been settled once: from
	// then on old claims may be deleted.
	CaughtUp(ctx context.Context, consumer string) error

	// Check says whether the database can be used: reachable, writable, with all
	// tables.
	Check(ctx context.Context) error
	// PoolSize is the number of connections, 0 for no limit.
	PoolSize() int
}

// Attempt is an open transaction with its claims. Exactly one of Commit, Fail and
// Rollback ends it. It is not safe for concurrent use, except for Kill.
type Attempt[Tx any] interface {
	// Tx is the transaction for the handler.
	Tx() Tx
	// Commit ends the transaction. No and Ended come with the reason.
	Commit(ctx context.Context) (CommitResult, error)
	// Fail undoes the handler's work of a retry and keeps the outcome on its held
	// message. On other attempts it is an error: Rollback and Record.
	Fail(ctx context.Context, o Outcome[Tx]) error
	// Rollback undoes everything. ErrTxEnded: the transaction was over already.
	Rollback(ctx context.Context) error
	// Broken reports whether the connection is gone.
	Broken() bool
	// Rerun reports whether the transaction met a serialization failure or deadlock,
	// also when the handler hid it.
	Rerun(handlerErr error) bool
	// Kill ends the connection under a handler that does not return; errors.ErrUnsupported
	// where that cannot be done. Afterwards the attempt may only be ended by Fail or
	// Rollback; the handler need not have returned.
	Kill(ctx context.Context) error
}

// CommitResult is what became of a COMMIT.
type CommitResult uint8

const (
	// CommitNo: nothing is stored.
	CommitNo CommitResult = iota
	// CommitYes: it is stored.
	CommitYes
	// CommitUnknown: the answer did not come. Claim again.
	CommitUnknown
	// CommitEnded: the handler ended the transaction itself. Claim again: a duplicate
	// had been committed; a claim that succeeds shows that it had not.
	CommitEnded
)

// Unit is the messages of one transaction.
type Unit struct {
	Consumer string
	Items    []*Item
	// ClaimTimeout bounds the wait for a concurrent claim; 0 means 5 s.
	ClaimTimeout time.Duration
	// IdleTimeout ends the transaction of a client that has gone away, by the
	// database; 0 means never.
	IdleTimeout time.Duration
	// ContinueAfterDead: a dead message does not block its key.
	ContinueAfterDead bool
	// HoldBehind: messages behind a held one are held by Begin itself.
	HoldBehind bool
}

// Item is one message of a unit.
type Item struct {
	Message     *brokers.Message
	ID          string // as StoredID returns it; "" has none
	RawID       []byte // the ID as it came, where ID is not it
	Fingerprint []byte // nil never conflicts
	OrderKey    []byte // see OrderKey; nil waits for nothing
	Coordinates string
}

// NewItem returns the item of a message. err is ErrNoID or ErrBadID for a message
// that can only be recorded, not claimed.
func NewItem(m *brokers.Message, coordinates string, orderKey []byte) (*Item, error) {
	it := &Item{Message: m, Fingerprint: Fingerprint(m), OrderKey: orderKey, Coordinates: coordinates}
	var err error
	it.ID, err = StoredID(m.ID)
	if it.ID != m.ID {
		it.RawID = []byte(m.ID)
	}
	return it, err
}

// Verdict is what a claim or a record found.
type Verdict uint8

const (
	// Claimed: this transaction has the message.
	Claimed Verdict = iota + 1
	// Duplicate: it is done (or discarded) already.
	Duplicate
	// Copy: the same message stands earlier in the unit and takes its outcome.
	Copy
	// Held: it is held already.
	Held
	// Behind: a message of its key is held; it was held too, or must be.
	Behind
	// Conflict: the ID was used for other content.
	Conflict
	// Recorded: the outcome is stored.
	Recorded
)

// String returns the verdict's name in lower case.
func (v Verdict) String() string {
	names := [...]string{"", "claimed", "duplicate", "copy", "held", "behind", "conflict", "recorded"}
	return names[min(int(v), len(names)-1)]
}

// Reasons of held messages.
const (
	ReasonRetry       = "retry"
	ReasonBehind      = "behind"
	ReasonDead        = "dead"
	ReasonConflict    = "conflict"
	ReasonNoID        = "no-id"
	ReasonBadID       = "bad-id"
	ReasonUnknownType = "unknown-type"
	ReasonTxEnded     = "tx-ended"
	ReasonCrashLoop   = "crash-loop"
	ReasonTooOld      = "too-old"
)

// Failure is why a message was not processed.
type Failure struct {
	Class string // "handler", "panic", "timeout", …
	Text  string
	Stack string
}

// Outcome is what to keep of a message that was not processed.
type Outcome[Tx any] struct {
	Item *Item
	// Discard keeps the claim as discarded; otherwise the message is held.
	Discard bool
	Reason  string
	Dead    bool          // no further run by itself
	Delay   time.Duration // until the next run
	// Attempts is the number of failed runs, this one included.
	Attempts int
	Failure  Failure
	// With, if set, runs inside the transaction that keeps the outcome. death is 1 when a
	// message is dead for the first time and grows with each time after a replay; 0 for an
	// outcome that is not dead.
	With func(ctx context.Context, tx Tx, death int) error
}

// HeadQuery asks for due held messages.
type HeadQuery struct {
	Consumer string
	Max      int
	Lease    time.Duration // due again after it, whatever becomes of the taker
}

// Head is a held message that was taken for a run.
type Head struct {
	Seq      int64
	Starts   int // the fence: this run's number
	Attempts int
	Reason   string
	Age      time.Duration // since it was held
	Item     *Item

	consumer int16
}

// HeldStats counts held messages.
type HeldStats struct {
	Total, Dead, Due int
	OldestDue        time.Duration // how long the first due message has been due; 0 none
}

// Errors that callers branch on.
var (
	// ErrClaimTimeout: another transaction has had the same message for longer than
	// ClaimTimeout. Try again later.
	ErrClaimTimeout = errors.New("a concurrent transaction holds the same message")
	// ErrCommitUnknown: the answer to COMMIT did not come.
	ErrCommitUnknown = errors.New("commit outcome unknown")
	// ErrTxEnded: the handler ended the transaction itself.
	ErrTxEnded = errors.New("the handler ended the transaction itself; it belongs to the consumer: return nil to commit, an error to roll back")
	// ErrHeadLost: somebody else has the held message.
	ErrHeadLost = errors.New("held message was taken or settled by somebody else")
	// ErrTxOwned is returned by Commit and Rollback of a handler's pgx.Tx.
	ErrTxOwned = errors.New("this transaction belongs to the consumer: return nil to commit, an error to roll back; Begin gives a savepoint of your own")
	// ErrAborted: a statement of the handler failed, the error was ignored, and the
	// database has aborted the transaction.
	ErrAborted = errors.New("transaction was aborted by an earlier ignored error")
)
