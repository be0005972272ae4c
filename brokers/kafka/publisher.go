package kafka

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"

	"github.com/twiceproof/twiceproof/brokers"
)

var codecs = map[Compression]kafka.Compression{
	NoCompression: 0, Gzip: kafka.Gzip, Snappy: kafka.Snappy, LZ4: kafka.Lz4, Zstd: kafka.Zstd,
}

// partitioner chooses as Java's default one does; kafka-go's own default does not.
var partitioner kafka.Murmur2Balancer

// Publisher publishes to the topics that messages name. Make one by [NewPublisher]. It
// connects with the first Publish and makes connections anew by itself.
type Publisher struct {
	cfg PublisherConfig
	c   *client

	mu      sync.Mutex
	closed  bool
	topics  map[string]*topicState
	calls   sync.WaitGroup // Publish calls; Add under mu while open
	life    context.Context
	die     context.CancelCauseFunc
	rotated int // the partition for messages without a key
}

// topicState is what is known about a topic that is published to.
type topicState struct {
	partitions []int // 0..n-1
	turns      []chan struct{}
	missing    time.Time // since when; zero if it is there
}

// NewPublisher returns a Publisher for the configuration, or everything that is wrong
// with it. It does no I/O.
func NewPublisher(cfg PublisherConfig) (*Publisher, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	p := &Publisher{cfg: cfg, topics: map[string]*topicState{}}
	p.c = newClient(cfg.Brokers, cfg.Security, "twiceproof-publisher", nil)
	p.c.Timeout = cfg.Timeout
	p.life, p.die = context.WithCancelCause(context.Background())
	return p, nil
}

// Limits implements [brokers.Publisher].
func (p *Publisher) Limits() brokers.PublishLimits {
	return brokers.PublishLimits{MessageBytes: int64(p.cfg.MaxMessageBytes)}
}

// Publish implements [brokers.Publisher]. Messages of one partition go out in batches,
// one at a time and in order; the partitions side by side. After a batch that was not
// accepted, what follows it on its partition is NotSent.
func (p *Publisher) Publish(ctx context.Context, ms ...*brokers.Message) []brokers.Result {
	rs := make([]brokers.Result, len(ms))
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		for i := range rs {
			rs[i] = brokers.Result{Outcome: brokers.NotSent, Err: brokers.ErrClosed}
		}
		return rs
	}
	p.calls.Add(1)
	p.mu.Unlock()
	defer p.calls.Done()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(p.life, func() { cancel(brokers.ErrClosed) })()

	c := call{p: p, now: time.Now(), routes: p.lookUp(ctx, ms), stopped: map[string]bool{}}
	p.mu.Lock()
	p.rotated++
	c.rotated = p.rotated
	p.mu.Unlock()
	for at := 0; at < len(ms); {
		var streams []*stream
		streams, at = c.round(ms, rs, at)
		var wg sync.WaitGroup
		for _, s := range streams[min(1, len(streams)):] {
			wg.Go(func() { s.send(ctx) })
		}
		if len(streams) > 0 {
			streams[0].send(ctx)
		}
		wg.Wait()
		for _, s := range streams {
			maps.Copy(c.stopped, s.stopped)
		}
	}
	return rs
}

// call is one Publish.
type call struct {
	p       *Publisher
	now     time.Time
	routes  map[string]route
	rotated int
	stopped map[string]bool // keys with a message that is not accepted
}

// entry is one message of a Publish.
type entry struct {
	m    *brokers.Message
	r    *brokers.Result
	rec  protocol.Record
	size int
}

// stream is what goes to one partition in one Publish.
type stream struct {
	p         *Publisher
	topic     string
	partition int
	turn      chan struct{}
	es        []entry
	stopped   map[string]bool // keys of this stream with a message that is not accepted
}

// round answers what cannot be sent and returns the rest by partition, up to the first
// message whose key is in the round already on another topic: that one has to wait for
// what becomes of the earlier one. next is where the next round begins.
func (c *call) round(ms []*brokers.Message, rs []brokers.Result, from int) (list []*stream, next int) {
	type place struct {
		topic     string
		partition int
	}
	streams := map[place]*stream{}
	keys := map[string]string{} // the topic of each key of the round
	for i := from; i < len(ms); i++ {
		m := ms[i]
		if m.Key != "" && c.stopped[m.Key] {
			rs[i] = brokers.Result{Outcome: brokers.NotSent, Err: brokers.ErrKeyStopped}
			continue
		}
		if topic, ok := keys[m.Key]; ok && topic != m.Topic {
			return list, i
		}
		rt := c.routes[m.Topic]
		refused := rt.result
		rec, size := recordOf(m, c.now)
		if refused.Err == nil && size > c.p.cfg.MaxMessageBytes {
			refused = brokers.Result{Outcome: brokers.Refused, Err: &brokers.Error{
				Class: brokers.Permanent, Op: "publish", Err: fmt.Errorf("the message has %d bytes; MaxMessageBytes is %d", size, c.p.cfg.MaxMessageBytes),
			}}
		}
		if refused.Err != nil {
			rs[i] = refused
			if m.Key != "" {
				c.stopped[m.Key] = true
			}
			continue
		}
		at := place{m.Topic, c.rotated % len(rt.partitions)}
		if m.Key != "" {
			at.partition = partitioner.Balance(kafka.Message{Key: []byte(m.Key)}, rt.partitions...)
			keys[m.Key] = m.Topic
		}
		s := streams[at]
		if s == nil {
			s = &stream{p: c.p, topic: m.Topic, partition: at.partition, turn: rt.turns[at.partition], stopped: map[string]bool{}}
			streams[at] = s
			list = append(list, s)
		}
		s.es = append(s.es, entry{m, &rs[i], rec, size})
	}
	return list, len(ms)
}

// route is where the messages of a topic can go, or why nowhere.
type route struct {
	partitions []int
	turns      []chan struct{}
	result     brokers.Result
}

// lookUp finds the partitions of the messages' topics, without creating any.
func (p *Publisher) lookUp(ctx context.Context, ms []*brokers.Message) map[string]route {
	routes := map[string]route{}
	var names []string
	for _, m := range ms {
		if _, ok := routes[m.Topic]; ok {
			continue
		}
		routes[m.Topic] = route{}
		var pr problems
		if pr.topic(m.Topic); len(pr) > 0 {
			routes[m.Topic] = route{result: brokers.Result{Outcome: brokers.Refused, Err: &brokers.Error{
				Class: brokers.Permanent, Op: "publish", Err: errors.Join(brokers.ErrNoRoute, errors.Join(pr...)),
			}}}
			continue
		}
		names = append(names, m.Topic)
	}
	if len(names) == 0 {
		return routes
	}
	all := func(r brokers.Result) map[string]route {
		for _, n := range names {
			routes[n] = route{result: r}
		}
		return routes
	}
	if ctx.Err() != nil {
		return all(brokers.Result{Outcome: brokers.NotSent, Err: context.Cause(ctx)})
	}
	res, err := p.c.Metadata(ctx, &kafka.MetadataRequest{Topics: names})
	if err != nil {
		if ctx.Err() == nil {
			err = p.c.explain(ctx, err)
		}
		err = classify("look up the topic", causeOf(ctx, err))
		if ctx.Err() != nil || brokers.ClassOf(err) != brokers.Fatal {
			return all(brokers.Result{Outcome: brokers.NotSent, Err: err})
		}
		return all(brokers.Result{Outcome: brokers.Refused, Err: err})
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, t := range res.Topics {
		routes[t.Name] = p.route(t)
	}
	for _, n := range names {
		if r := routes[n]; r.partitions == nil && r.result.Err == nil {
			routes[n] = p.route(kafka.Topic{Name: n, Error: kafka.UnknownTopicOrPartition})
		}
	}
	return routes
}

// route judges what the cluster says about a topic. The caller holds the lock.
func (p *Publisher) route(t kafka.Topic) route {
	st := p.topics[t.Name]
	if st == nil {
		st = &topicState{}
		p.topics[t.Name] = st
	}
	op := fmt.Sprintf("publish to %q", t.Name)
	switch {
	case isCode(t.Error, kafka.UnknownTopicOrPartition):
		if st.missing.IsZero() {
			st.missing = time.Now()
		}
		class := brokers.Retryable // it may be new, and not known everywhere
		if time.Since(st.missing) >= p.cfg.MissingFor {
			class = brokers.Fatal
		}
		return route{result: brokers.Result{Outcome: brokers.Refused, Err: missingTopic(class, op, t.Name)}}
	case t.Error != nil:
		return route{result: brokers.Result{Outcome: brokers.Refused, Err: classify(op, t.Error)}}
	case len(t.Partitions) == 0:
		return route{result: brokers.Result{Outcome: brokers.Refused, Err: classify(op, kafka.LeaderNotAvailable)}}
	}
	st.missing = time.Time{}
	if n := len(t.Partitions); n != len(st.partitions) {
		if len(st.partitions) > 0 {
			p.cfg.Logger.Warn("the number of partitions has changed: keys move, and their order is not kept across the change",
				"topic", t.Name, "before", len(st.partitions), "now", n)
		}
		// Those who wait for a turn of before keep it: the channels stay.
		for i := len(st.partitions); i < n; i++ {
			st.partitions = append(st.partitions, i)
			if i >= len(st.turns) {
				st.turns = append(st.turns, make(chan struct{}, 1))
			}
		}
		st.partitions = st.partitions[:n]
	}
	return route{partitions: slices.Clip(st.partitions), turns: slices.Clip(st.turns)}
}

// send sends the stream, one request at a time.
func (s *stream) send(ctx context.Context) {
	// One request per partition is in flight, whoever sends: two could be stored the
	// other way round.
	select {
	case s.turn <- struct{}{}:
		defer func() { <-s.turn }()
	case <-ctx.Done():
		s.rest(s.es, context.Cause(ctx))
		return
	}
	for len(s.es) > 0 {
		n, size := 0, 0
		for n < len(s.es) && n < s.p.cfg.BatchMessages && (n == 0 || size+s.es[n].size <= s.p.cfg.BatchBytes) {
			size += s.es[n].size
			n++
		}
		batch := s.es[:n]
		s.es = s.es[n:]
		if ctx.Err() != nil {
			s.rest(batch, context.Cause(ctx))
			s.rest(s.es, context.Cause(ctx))
			return
		}
		r := s.produce(ctx, batch)
		if r.Outcome == brokers.Refused && brokers.ClassOf(r.Err) == brokers.Permanent && len(batch) > 1 {
			r = s.oneByOne(ctx, batch)
		} else {
			for _, e := range batch {
				*e.r = r
				if r.Outcome != brokers.Accepted {
					s.stopped[e.m.Key] = true
				}
			}
		}
		if r.Outcome != brokers.Accepted && brokers.ClassOf(r.Err) != brokers.Permanent {
			s.rest(s.es, r.Err)
			return
		}
		s.es = s.passStopped(s.es)
	}
}

// passStopped answers the messages of stopped keys and returns the others.
func (s *stream) passStopped(es []entry) []entry {
	if len(s.stopped) == 0 {
		return es
	}
	kept := es[:0]
	for _, e := range es {
		if e.m.Key != "" && s.stopped[e.m.Key] {
			*e.r = brokers.Result{Outcome: brokers.NotSent, Err: brokers.ErrKeyStopped}
			continue
		}
		kept = append(kept, e)
	}
	return kept
}

// oneByOne finds the messages for which a batch was refused for good. It returns the
// last result that stops the partition, or an accepted one.
func (s *stream) oneByOne(ctx context.Context, batch []entry) brokers.Result {
	for i, e := range batch {
		if e.m.Key != "" && s.stopped[e.m.Key] {
			*e.r = brokers.Result{Outcome: brokers.NotSent, Err: brokers.ErrKeyStopped}
			continue
		}
		r := s.produce(ctx, batch[i:i+1])
		*e.r = r
		if r.Outcome == brokers.Accepted {
			continue
		}
		s.stopped[e.m.Key] = true
		if brokers.ClassOf(r.Err) != brokers.Permanent {
			s.rest(batch[i+1:], r.Err)
			return r
		}
	}
	return brokers.Result{Outcome: brokers.Accepted}
}

// rest answers messages that are not sent: an earlier one of the partition was not
// accepted, or ctx ended.
func (s *stream) rest(es []entry, cause error) {
	for _, e := range es {
		err := cause
		if e.m.Key != "" && s.stopped[e.m.Key] {
			err = brokers.ErrKeyStopped
		}
		*e.r = brokers.Result{Outcome: brokers.NotSent, Err: err}
	}
}

// produce sends one request and says what became of it.
func (s *stream) produce(ctx context.Context, es []entry) brokers.Result {
	op := fmt.Sprintf("publish to %s/%d", s.topic, s.partition)
	recs := make([]protocol.Record, len(es))
	for i, e := range es {
		recs[i] = e.rec
		// A record's bytes are read once; a batch that is refused is sent again in parts.
		if e.m.Key != "" {
			recs[i].Key = protocol.NewBytes([]byte(e.m.Key))
		}
		if e.m.Payload != nil {
			recs[i].Value = protocol.NewBytes(e.m.Payload)
		}
	}
	res, err := s.p.c.Produce(ctx, &kafka.ProduceRequest{
		Topic: s.topic, Partition: s.partition, RequiredAcks: kafka.RequireAll,
		Compression: codecs[s.p.cfg.Compression], Records: protocol.NewRecordReader(recs...),
	})
	if err == nil && res.Error == nil {
		return brokers.Result{Outcome: brokers.Accepted}
	}
	if err == nil {
		return answered(op, res.Error)
	}
	e := classify(op, causeOf(ctx, err))
	switch {
	case unreached(err), brokers.ClassOf(e) == brokers.Fatal:
		return brokers.Result{Outcome: brokers.Refused, Err: e} // no connection, so nothing was sent
	case hasCode(err):
		return answered(op, err)
	}
	return unknown(op, err)
}

// answered judges the broker's own word.
func answered(op string, err error) brokers.Result {
	switch {
	// Stored already, or perhaps: too few replicas have it, or it took too long.
	case isCode(err, kafka.NotEnoughReplicasAfterAppend, kafka.RequestTimedOut, kafka.NetworkException, kafka.KafkaStorageError):
		return unknown(op, err)
	}
	return brokers.Result{Outcome: brokers.Refused, Err: classify(op, err)}
}

func unknown(op string, err error) brokers.Result {
	return brokers.Result{Outcome: brokers.Unknown, Err: &brokers.Error{
		Class: brokers.Retryable, Op: op, After: retryPause, Err: errors.Join(brokers.ErrUnknownOutcome, err),
	}}
}

// Close implements [brokers.Publisher]. It waits for the Publish calls that run and,
// when ctx ends first, cuts them off.
func (p *Publisher) Close(ctx context.Context) error {
	p.mu.Lock()
	was := p.closed
	p.closed = true
	p.mu.Unlock()
	if was {
		return nil
	}
	done := make(chan struct{})
	go func() { p.calls.Wait(); close(done) }()
	var err error
	select {
	case <-done:
	case <-ctx.Done():
		err = cmp.Or(context.Cause(ctx), ctx.Err())
		p.die(brokers.ErrClosed)
		<-done // at once: every wait of theirs ends with life
	}
	p.die(brokers.ErrClosed)
	p.c.free()
	return err
}
