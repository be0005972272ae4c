package inbox

import (
	"context"
	"errors"
	"time"
)

// Pace bounds what a replay of many messages asks of consumers and of what is behind
// them. The zero value has no bounds.
type Pace struct {
	// Rate is how many messages are replayed a second at most; 0: no limit.
	Rate float64
	// InFlight is how many replayed ones may be due or running at a time; 0: no limit.
	// What waits behind them in its key comes by itself and is not counted, nor is one
	// whose run has failed and that waits for its next.
	InFlight int
	// Each, if set, is told what became of each choice: nil, or an error of Replay.
	Each func(c Choice, err error)
	// Stuck, if set, is told about every ten seconds that InFlight messages are not
	// finished and none has been for that time: perhaps no consumer runs.
	Stuck func(unfinished int)
}

const (
	flightPoll = 100 * time.Millisecond
	stuckAfter = 10 * time.Second
)

// ReplayAll replays the choices in turn, at a pace. What has changed since it was
// chosen is passed over, so that the same choices may be given again after an
// interruption. tried is the number of choices that were dealt with; it is less than
// all with an error, of ctx or of the database: then the rest is untouched.
func (o *Operator) ReplayAll(ctx context.Context, chosen []Choice, by By, p Pace) (tried int, err error) {
	f := flight{o: o, p: p}
	for _, c := range chosen {
		if err := f.clear(ctx); err != nil {
			return tried, err
		}
		err := o.Replay(ctx, c, by)
		switch {
		case err == nil:
			f.add(c.Seq)
		case ctx.Err() != nil && errors.Is(err, ctx.Err()):
			return tried, err
		case !errors.Is(err, ErrNotHeld) && !errors.Is(err, ErrChanged) && !errors.Is(err, ErrNotReplayable) && !errors.Is(err, ErrRunning):
			return tried, err
		}
		tried++
		if p.Each != nil {
			p.Each(c, err)
		}
	}
	return tried, nil
}

// flight is what a replay has set going.
type flight struct {
	o    *Operator
	p    Pace
	next time.Time // not before
	seqs []int64   // not known to be finished
	most int       // so many may be under way: counted, and replayed since
}

func (f *flight) add(seq int64) {
	if f.p.InFlight > 0 {
		f.seqs = append(f.seqs, seq)
		f.most++
	}
}

// clear waits until another message may be replayed.
func (f *flight) clear(ctx context.Context) error {
	if f.p.Rate > 0 {
		// By the last one, not by the first: a wait is not caught up on.
		if d := time.Until(f.next); d > 0 && !sleep(ctx, d) {
			return ctx.Err()
		}
		f.next = time.Now().Add(time.Duration(float64(time.Second) / f.p.Rate))
	}
	least, since := f.most, time.Now()
	for f.p.InFlight > 0 && f.most >= f.p.InFlight {
		if err := f.count(ctx); err != nil {
			return err
		}
		if f.most < f.p.InFlight {
			break
		}
		if f.most < least {
			least, since = f.most, time.Now()
		} else if time.Since(since) >= stuckAfter {
			since = time.Now()
			if f.p.Stuck != nil {
				f.p.Stuck(f.most)
			}
		}
		if !sleep(ctx, flightPoll) {
			return ctx.Err()
		}
	}
	return ctx.Err()
}

func (f *flight) count(ctx context.Context) error {
	due, waiting, err := f.o.Unfinished(ctx, f.seqs)
	if err != nil {
		return err
	}
	f.seqs, f.most = append(waiting, due...), len(due)
	return nil
}

// Unfinished returns which of the replayed messages with these numbers have had no run
// yet that ended: due, or running; and waiting for an earlier message of their key.
func (o *Operator) Unfinished(ctx context.Context, seqs []int64) (due, waiting []int64, err error) {
	if len(seqs) == 0 {
		return nil, nil, nil
	}
	alive := false
	where, args := HeldFilter{Seqs: seqs, Dead: &alive}.where()
	q := `SELECT h.seq, h.due_at IS NOT NULL FROM {s}held_messages h` + where + ` AND h.attempts = 0`
	err = o.q.Query(ctx, o.e.dialect.SQL(q, o.e.schema), args, func(scan func(...any) error) error {
		var seq int64
		var isDue bool
		err := scan(&seq, &isDue)
		if isDue {
			due = append(due, seq)
		} else {
			waiting = append(waiting, seq)
		}
		return err
	})
	return due, waiting, unreadable(err)
}
