package consumer

import (
	"context"
	"time"

	"github.com/twiceproof/twiceproof/inbox"
)

// TooOld says what to do with a message that is older than what the inbox remembers,
// and that the inbox does not know: it may have been processed and forgotten.
type TooOld uint8

const (
	// HoldTooOld keeps it as dead ("too-old"), for a person to decide.
	HoldTooOld TooOld = iota
	// RunTooOld runs it: for handlers that bear a second run.
	RunTooOld
	// DiscardTooOld discards it.
	DiscardTooOld
)

// retentionLease is how long one process cleans before another one may.
const retentionLease = time.Minute

// tendRetention deletes old claims, as one process at a time does, and finds out when
// the consumer has caught up once: before that, what is on the broker may be older than
// the window.
func (l *loop[Tx]) tendRetention(ctx context.Context) {
	if l.cfg.Window < 0 {
		return
	}
	every := min(max(l.cfg.Window/20, 50*time.Millisecond), time.Hour)
	look := min(every, 10*time.Second)
	caughtUp := false
	var cleaned time.Time
	for sleep(ctx, look) && l.gate.wait(ctx) {
		if !caughtUp && l.isCaughtUp(ctx) {
			if err := l.store.CaughtUp(ctx, l.cfg.Name); err != nil {
				continue
			}
			caughtUp = true
		}
		if !cleaned.IsZero() && time.Since(cleaned) < every {
			continue
		}
		cleaned = time.Now()
		for more := true; more && ctx.Err() == nil; {
			r, err := l.store.Retain(ctx, inbox.RetainRequest{Consumer: l.cfg.Name, Owner: l.suspects.owner, Lease: retentionLease, Window: l.cfg.Window})
			if err != nil {
				if ctx.Err() == nil {
					l.cfg.Logger.Warn("cleanup of the inbox failed; trying again later", "error", err)
				}
				break
			}
			l.forgets.Store(int64(r.Forgets))
			if more = r.More; more && !sleep(ctx, 20*time.Millisecond) { // claims come first
				return
			}
		}
	}
}

// isCaughtUp: nothing is on the broker and nothing in hand. A broker that cannot tell
// never says so; then a whole window must pass.
func (l *loop[Tx]) isCaughtUp(ctx context.Context) bool {
	if l.room.inHand() > 0 {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	s, err := l.src.Status(ctx)
	return err == nil && s.Lag() == 0 && l.room.inHand() == 0
}

// tooOld reports whether a message that was claimed anew may have been processed and
// forgotten.
func (l *loop[Tx]) tooOld(j *job) bool {
	forgets := time.Duration(l.forgets.Load())
	at := j.d.Time
	return forgets > 0 && l.cfg.TooOld != RunTooOld && !at.IsZero() && time.Since(at) > forgets
}
