package sqsfake

import (
	"cmp"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

const (
	maxHold     = 12 * time.Hour
	dedupWindow = 5 * time.Minute
)

// queue is one queue. Guarded by the Server's lock.
type queue struct {
	s        *Server
	name     string
	attrs    map[string]string
	fifo     bool
	msgs     []*message // in the order of sending
	dedup    map[string]dedupEntry
	attempts map[string]*attempt
	serial   int
}

type dedupEntry struct {
	at time.Time
	id string
}

// attempt is what a ReceiveRequestAttemptId was answered with.
type attempt struct {
	at   time.Time
	msgs []*message
	// handles are those that were answered; one that changed since ends the attempt.
	handles []string
}

type message struct {
	id, body, group, dedup string
	attrs                  map[string]attribute
	sent, first            time.Time
	visible                time.Time
	received               time.Time // of the newest hand-over
	handle                 string
	receives               int
	sequence               int
	source                 string // the queue it was dead-lettered from
	touched                bool   // deleted or changed since its hand-over
}

type attribute struct {
	DataType    string
	StringValue *string `json:",omitempty"`
	BinaryValue []byte  `json:",omitempty"`
}

func (m *message) inFlight(now time.Time) bool { return m.receives > 0 && m.visible.After(now) }

func randomID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	h := hex.EncodeToString(b[:])
	return h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
}

func (q *queue) number(name string, zero int) int {
	n, err := strconv.Atoi(q.attrs[name])
	if err != nil {
		return zero
	}
	return n
}

func (q *queue) inFlight(now time.Time) (n int) {
	for _, m := range q.msgs {
		if m.inFlight(now) {
			n++
		}
	}
	return n
}

// add stores a message; on a FIFO queue one whose deduplication ID was seen within five
// minutes is accepted and dropped.
func (q *queue) add(now time.Time, m *message, delay time.Duration) *message {
	if q.fifo {
		if e, ok := q.dedup[m.dedup]; ok && now.Sub(e.at) < dedupWindow {
			return &message{id: e.id}
		}
	}
	q.serial++
	m.id, m.sent, m.visible, m.sequence = cmp.Or(m.id, randomID()), now, now.Add(delay), q.serial
	if q.fifo {
		q.dedup[m.dedup] = dedupEntry{now, m.id}
	}
	q.msgs = append(q.msgs, m)
	return m
}

// take hands over up to n messages.
func (q *queue) take(now time.Time, n int, visibility time.Duration) []*message {
	q.redrive(now)
	blocked := map[string]bool{}
	if q.fifo {
		for _, m := range q.msgs {
			if m.inFlight(now) {
				blocked[m.group] = true
			}
		}
	}
	var out []*message
	for _, m := range q.msgs {
		if len(out) == n {
			break
		}
		if q.fifo && blocked[m.group] {
			continue
		}
		if m.visible.After(now) {
			blocked[m.group] = q.fifo // a later one stays hidden behind it
			continue
		}
		q.hand(now, m, visibility)
		out = append(out, m)
	}
	return out
}

func (q *queue) hand(now time.Time, m *message, visibility time.Duration) {
	m.receives++
	if m.first.IsZero() {
		m.first = now
	}
	m.received, m.visible, m.touched = now, now.Add(visibility), false
	m.handle = fmt.Sprintf("%s/%d/%s", q.name, m.receives, m.id)
}

// redrive moves what was received too often to the dead-letter queue.
func (q *queue) redrive(now time.Time) {
	var p struct {
		Target string          `json:"deadLetterTargetArn"`
		Max    json.RawMessage `json:"maxReceiveCount"`
	}
	if json.Unmarshal([]byte(q.attrs["RedrivePolicy"]), &p) != nil {
		return
	}
	limit, err := strconv.Atoi(strings.Trim(string(p.Max), `"`))
	dead := q.s.queues[p.Target[strings.LastIndexByte(p.Target, ':')+1:]]
	if err != nil || dead == nil {
		return
	}
	q.msgs = slices.DeleteFunc(q.msgs, func(m *message) bool {
		if m.receives < limit || m.visible.After(now) {
			return false
		}
		c := &message{id: m.id, body: m.body, attrs: m.attrs, group: m.group, dedup: m.id, receives: m.receives, source: q.name}
		dead.add(now, c, 0)
		return true
	})
}

// again answers a repeated ReceiveRequestAttemptId with the same messages and handles.
func (q *queue) again(now time.Time, id string, visibility time.Duration) ([]*message, bool) {
	a := q.attempts[id]
	if a == nil || now.Sub(a.at) > dedupWindow {
		return nil, false
	}
	for i, m := range a.msgs {
		if m.touched || m.handle != a.handles[i] || !m.visible.After(now) {
			return nil, false
		}
	}
	for _, m := range a.msgs {
		m.visible = now.Add(visibility)
	}
	return a.msgs, true
}

// find returns the message that a handle was given out for, and whether the handle is
// its newest one.
func (q *queue) find(handle string) (m *message, newest bool, err *apiError) {
	parts := strings.SplitN(handle, "/", 3)
	if len(parts) != 3 || parts[0] != q.name {
		return nil, false, invalid("ReceiptHandleIsInvalid", "The input receipt handle is invalid.")
	}
	for _, m := range q.msgs {
		if m.id == parts[2] {
			return m, m.handle == handle, nil
		}
	}
	return nil, false, nil
}

func (q *queue) remove(now time.Time, handle string) *apiError {
	m, newest, err := q.find(handle)
	switch {
	case err != nil || m == nil: // a second delete is no error
		return err
	case q.fifo && (!newest || !m.visible.After(now)):
		return invalid("InvalidParameterValue", "Value for parameter ReceiptHandle is invalid. Reason: The receipt handle has expired.")
	case !newest:
		return nil // success, and not deleted
	}
	m.touched = true
	q.msgs = slices.DeleteFunc(q.msgs, func(o *message) bool { return o == m })
	return nil
}

func (q *queue) change(now time.Time, handle string, seconds int) *apiError {
	if seconds < 0 || seconds > 43200 {
		return invalid("InvalidParameterValue", "VisibilityTimeout must be between 0 and 43200")
	}
	m, newest, err := q.find(handle)
	switch {
	case err != nil:
		return err
	case m == nil || !m.visible.After(now):
		return invalid("MessageNotInflight", "The message is not in flight.")
	case !newest:
		return invalid("ReceiptHandleIsInvalid", "The receipt handle is not the newest one.")
	}
	until := now.Add(time.Duration(seconds) * time.Second)
	if until.After(m.received.Add(maxHold)) {
		return invalid("InvalidParameterValue", "Total VisibilityTimeout for the message is beyond the limit [43200 seconds]")
	}
	m.touched = true
	m.visible = until
	return nil
}

// nextVisible returns when a hidden message becomes visible.
func (q *queue) nextVisible(now time.Time) (at time.Time) {
	for _, m := range q.msgs {
		if m.visible.After(now) && (at.IsZero() || m.visible.Before(at)) {
			at = m.visible
		}
	}
	return at
}
