package sqsfake

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"time"
)

// Server holds queues in memory. Make one by [New].
type Server struct {
	// InFlightLimit is how many messages of a queue may be in flight; 0 means 120,000.
	InFlightLimit int
	// SwallowCancelled lets a receive whose caller is gone take messages all the same, as
	// servers do that do not notice. Default: false.
	SwallowCancelled bool

	mu     sync.Mutex
	queues map[string]*queue
	faults []*Fault
	calls  map[string]int
	wake   chan struct{} // closed and replaced when something may be visible
}

// New returns a server without queues.
func New() *Server {
	return &Server{queues: map[string]*queue{}, calls: map[string]int{}, wake: make(chan struct{})}
}

// Fault makes calls go wrong. Set one of the kinds.
type Fault struct {
	// Op is the operation, for example "DeleteMessageBatch".
	Op string
	// Times is how often it strikes; 0 means once, -1 always.
	Times int
	// After is how many calls pass before it strikes.
	After int

	// Unavailable answers 503 and does nothing.
	Unavailable bool
	// LoseAnswer does what was asked and cuts the connection.
	LoseAnswer bool
	// Code is answered for the whole call, with status 400.
	Code string
	// Entries are the positions in a batch that fail, with the code of each.
	Entries map[int]string
	// SenderFault is what a failed entry says.
	SenderFault bool
}

// Fail adds a fault.
func (s *Server) Fail(f Fault) (stop func()) {
	if f.Times == 0 {
		f.Times = 1
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults = append(s.faults, &f)
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		f.Times = 0
	}
}

// Calls returns how often an operation was called.
func (s *Server) Calls(op string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.calls[op]
}

// Len returns how many messages a queue holds, in flight or not.
func (s *Server) Len(queue string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if q := s.queues[queue]; q != nil {
		return len(q.msgs)
	}
	return 0
}

// InFlight returns how many messages of a queue are in flight.
func (s *Server) InFlight(queue string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if q := s.queues[queue]; q != nil {
		return q.inFlight(time.Now())
	}
	return 0
}

// strike counts a call and returns the fault that it meets.
func (s *Server) strike(op string) *Fault {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls[op]++
	for _, f := range s.faults {
		if f.Op != op || f.Times == 0 {
			continue
		}
		if f.After > 0 {
			f.After--
			continue
		}
		if f.Times > 0 {
			f.Times--
		}
		c := *f
		return &c
	}
	return nil
}

func (s *Server) woken() {
	close(s.wake)
	s.wake = make(chan struct{})
}

// RoundTrip implements [net/http.RoundTripper] without a socket.
func (s *Server) RoundTrip(r *http.Request) (resp *http.Response, err error) {
	if err := r.Context().Err(); err != nil {
		return nil, err
	}
	defer func() {
		if p := recover(); p == http.ErrAbortHandler { //nolint:errorlint // a panic's value
			resp, err = nil, io.ErrUnexpectedEOF
		} else if p != nil {
			panic(p)
		}
	}()
	w := httptest.NewRecorder()
	s.ServeHTTP(w, r)
	if err := r.Context().Err(); err != nil {
		return nil, err
	}
	resp = w.Result()
	resp.Request = r
	return resp, nil
}

type apiError struct {
	status        int
	code, message string
}

func invalid(code, message string) *apiError { return &apiError{http.StatusBadRequest, code, message} }

// ServeHTTP implements [net/http.Handler].
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	_, op, _ := strings.Cut(r.Header.Get("X-Amz-Target"), "AmazonSQS.")
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	f := s.strike(op)
	if f != nil && f.Unavailable {
		fail(w, &apiError{http.StatusServiceUnavailable, "ServiceUnavailable", "injected"})
		return
	}
	if f != nil && f.Code != "" {
		fail(w, invalid(f.Code, "injected"))
		return
	}
	var in request
	if err := json.Unmarshal(body, &in); err != nil {
		fail(w, invalid("InvalidParameterValue", err.Error()))
		return
	}
	in.fault = f
	out, apiErr := s.do(r.Context(), op, &in)
	if f != nil && f.LoseAnswer {
		panic(http.ErrAbortHandler)
	}
	if apiErr != nil {
		fail(w, apiErr)
		return
	}
	w.Header().Set("Content-Type", "application/x-amz-json-1.0")
	_ = json.NewEncoder(w).Encode(out)
}

func fail(w http.ResponseWriter, e *apiError) {
	w.Header().Set("Content-Type", "application/x-amz-json-1.0")
	query := e.code
	if e.code == "QueueDoesNotExist" {
		query = "AWS.SimpleQueueService.NonExistentQueue"
	}
	w.Header().Set("X-Amzn-Query-Error", query+";Sender")
	w.WriteHeader(e.status)
	_ = json.NewEncoder(w).Encode(map[string]string{"__type": "com.amazonaws.sqs#" + e.code, "message": e.message})
}

// receive waits for messages as long as the caller does.
func (s *Server) receive(ctx context.Context, q *queue, in *request) ([]*message, *apiError) {
	visibility := time.Duration(in.visibility(q.number("VisibilityTimeout", 30))) * time.Second
	wait := q.number("ReceiveMessageWaitTimeSeconds", 0)
	if in.WaitTimeSeconds != nil {
		wait = *in.WaitTimeSeconds
	}
	n := max(in.MaxNumberOfMessages, 1)
	if n > 10 || wait < 0 || wait > 20 {
		return nil, invalid("InvalidParameterValue", "MaxNumberOfMessages must be 1 to 10, WaitTimeSeconds 0 to 20")
	}
	deadline := time.Now().Add(time.Duration(wait) * time.Second)
	for {
		s.mu.Lock()
		now := time.Now()
		if s.queues[q.name] != q {
			s.mu.Unlock()
			return nil, noQueue()
		}
		if errors.Is(ctx.Err(), context.Canceled) && !s.SwallowCancelled {
			s.mu.Unlock()
			return nil, nil
		}
		ms, err := q.receive(now, in, n, visibility)
		wake, next := s.wake, q.nextVisible(now)
		s.mu.Unlock()
		if err != nil || len(ms) > 0 || !now.Before(deadline) {
			return ms, err
		}
		if next.IsZero() || next.After(deadline) {
			next = deadline
		}
		t := time.NewTimer(next.Sub(now))
		gone := ctx.Done()
		if s.SwallowCancelled {
			gone = nil
		}
		select {
		case <-wake:
		case <-t.C:
		case <-gone:
		}
		t.Stop()
	}
}

func (q *queue) receive(now time.Time, in *request, n int, visibility time.Duration) ([]*message, *apiError) {
	if id := in.ReceiveRequestAttemptId; id != "" && q.fifo {
		if ms, ok := q.again(now, id, visibility); ok {
			return ms, nil
		}
	}
	limit := q.s.InFlightLimit
	if limit == 0 {
		limit = 120_000
	}
	free := limit - q.inFlight(now)
	if free <= 0 {
		if q.fifo {
			return nil, nil // silence
		}
		return nil, invalid("OverLimit", "Too many messages in flight.")
	}
	ms := q.take(now, min(n, free), visibility)
	if id := in.ReceiveRequestAttemptId; id != "" && q.fifo && len(ms) > 0 {
		a := &attempt{at: now, msgs: ms}
		for _, m := range ms {
			a.handles = append(a.handles, m.handle)
		}
		q.attempts[id] = a
	}
	return ms, nil
}
