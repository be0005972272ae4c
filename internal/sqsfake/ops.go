package sqsfake

import (
	"cmp"
	"context"
	"crypto/md5"
	"encoding/hex"
	"fmt"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// request is what any operation may be asked with.
type request struct {
	QueueName, QueueUrl, QueueNamePrefix string
	Attributes                           map[string]string
	entry
	Entries                 []entry
	MaxNumberOfMessages     int
	WaitTimeSeconds         *int
	ReceiveRequestAttemptId string

	MessageAttributeNames, MessageSystemAttributeNames, AttributeNames []string

	fault *Fault
}

// entry is one of a batch, or the only one.
type entry struct {
	Id, ReceiptHandle, MessageBody         string
	MessageGroupId, MessageDeduplicationId string
	VisibilityTimeout                      *int
	DelaySeconds                           int
	MessageAttributes                      map[string]attribute
}

func (e *entry) visibility(zero int) int {
	if e.VisibilityTimeout == nil {
		return zero
	}
	return *e.VisibilityTimeout
}

type object = map[string]any

func noQueue() *apiError {
	return invalid("QueueDoesNotExist", "The specified queue does not exist.")
}

func urlOf(name string) string { return "http://sqsfake.invalid/000000000000/" + name }

func (s *Server) do(ctx context.Context, op string, in *request) (any, *apiError) {
	switch op {
	case "CreateQueue":
		return s.create(in)
	case "ListQueues":
		return s.list(in), nil
	}
	name := cmp.Or(in.QueueName, in.QueueUrl[strings.LastIndexByte(in.QueueUrl, '/')+1:])
	s.mu.Lock()
	q := s.queues[name]
	s.mu.Unlock()
	if q == nil {
		return nil, noQueue()
	}
	if op == "ReceiveMessage" {
		ms, err := s.receive(ctx, q, in)
		if err != nil {
			return nil, err
		}
		return s.messages(q, ms, in), nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.woken()
	now := time.Now()
	switch op {
	case "GetQueueUrl":
		return object{"QueueUrl": urlOf(name)}, nil
	case "GetQueueAttributes":
		return object{"Attributes": q.attributes(now)}, nil
	case "SetQueueAttributes":
		maps.Copy(q.attrs, in.Attributes)
		return object{}, nil
	case "DeleteQueue":
		delete(s.queues, name)
		return object{}, nil
	case "SendMessage":
		return q.send(now, &in.entry)
	case "SendMessageBatch":
		if err := batchSize(in.Entries); err != nil {
			return nil, err
		}
		return batch(in, func(e *entry) (object, *apiError) { return q.send(now, e) })
	case "DeleteMessage":
		return object{}, q.remove(now, in.ReceiptHandle)
	case "DeleteMessageBatch":
		return batch(in, func(e *entry) (object, *apiError) { return object{}, q.remove(now, e.ReceiptHandle) })
	case "ChangeMessageVisibility":
		return object{}, q.change(now, in.ReceiptHandle, in.visibility(-1))
	case "ChangeMessageVisibilityBatch":
		return batch(in, func(e *entry) (object, *apiError) { return object{}, q.change(now, e.ReceiptHandle, e.visibility(-1)) })
	}
	return nil, invalid("InvalidAction", op)
}

func (s *Server) create(in *request) (any, *apiError) {
	s.mu.Lock()
	defer s.mu.Unlock()
	fifo := in.Attributes["FifoQueue"] == "true"
	if fifo != strings.HasSuffix(in.QueueName, ".fifo") {
		return nil, invalid("InvalidParameterValue", "The name of a FIFO queue can only include alphanumeric characters, hyphens, or underscores, must end with .fifo suffix")
	}
	if s.queues[in.QueueName] == nil {
		attrs := map[string]string{"MessageRetentionPeriod": "345600", "VisibilityTimeout": "30"}
		maps.Copy(attrs, in.Attributes)
		s.queues[in.QueueName] = &queue{s: s, name: in.QueueName, attrs: attrs, fifo: fifo, dedup: map[string]dedupEntry{}, attempts: map[string]*attempt{}}
	}
	return object{"QueueUrl": urlOf(in.QueueName)}, nil
}

func (s *Server) list(in *request) any {
	s.mu.Lock()
	defer s.mu.Unlock()
	urls := []string{}
	for _, name := range slices.Sorted(maps.Keys(s.queues)) {
		if strings.HasPrefix(name, in.QueueNamePrefix) {
			urls = append(urls, urlOf(name))
		}
	}
	return object{"QueueUrls": urls}
}

func (q *queue) attributes(now time.Time) map[string]string {
	a := maps.Clone(q.attrs)
	n := q.inFlight(now)
	delayed := 0
	for _, m := range q.msgs {
		if m.receives == 0 && m.visible.After(now) {
			delayed++
		}
	}
	a["ApproximateNumberOfMessages"] = strconv.Itoa(len(q.msgs) - n - delayed)
	a["ApproximateNumberOfMessagesNotVisible"] = strconv.Itoa(n)
	a["ApproximateNumberOfMessagesDelayed"] = strconv.Itoa(delayed)
	a["QueueArn"] = "arn:aws:sqs:eu-central-1:000000000000:" + q.name
	return a
}

var entryID = regexp.MustCompile(`^[A-Za-z0-9_-]{1,80}$`)

// batch does each entry and puts the answers in two lists.
func batch(in *request, do func(*entry) (object, *apiError)) (any, *apiError) {
	switch n := len(in.Entries); {
	case n == 0:
		return nil, invalid("EmptyBatchRequest", "There should be at least one entry in the request.")
	case n > 10:
		return nil, invalid("TooManyEntriesInBatchRequest", fmt.Sprintf("Maximum number of entries per request are 10. You have sent %d.", n))
	}
	seen := map[string]bool{}
	for _, e := range in.Entries {
		if !entryID.MatchString(e.Id) {
			return nil, invalid("InvalidBatchEntryId", e.Id)
		}
		if seen[e.Id] {
			return nil, invalid("BatchEntryIdsNotDistinct", e.Id)
		}
		seen[e.Id] = true
	}
	ok, failed := []object{}, []object{}
	for i := range in.Entries {
		e := &in.Entries[i]
		if f := in.fault; f != nil && f.Entries[i] != "" {
			failed = append(failed, object{"Id": e.Id, "Code": f.Entries[i], "Message": "injected", "SenderFault": f.SenderFault})
			continue
		}
		out, err := do(e)
		if err != nil {
			failed = append(failed, object{"Id": e.Id, "Code": err.code, "Message": err.message, "SenderFault": true})
			continue
		}
		out["Id"] = e.Id
		ok = append(ok, out)
	}
	return object{"Successful": ok, "Failed": failed}, nil
}

// limit is 1 MiB of bodies and attributes.
const limit = 1 << 20

func (e *entry) size() int {
	n := len(e.MessageBody)
	for name, a := range e.MessageAttributes {
		n += len(name) + len(a.DataType) + len(a.BinaryValue)
		if a.StringValue != nil {
			n += len(*a.StringValue)
		}
	}
	return n
}

func batchSize(es []entry) *apiError {
	n := 0
	for i := range es {
		n += es[i].size()
	}
	if n > limit {
		return invalid("BatchRequestTooLong", fmt.Sprintf("Batch requests cannot be longer than %d bytes. You have sent %d bytes.", limit, n))
	}
	return nil
}

func (q *queue) send(now time.Time, e *entry) (object, *apiError) {
	if err := q.check(e); err != nil {
		return nil, err
	}
	m := q.add(now, &message{body: e.MessageBody, attrs: e.MessageAttributes, group: e.MessageGroupId, dedup: e.MessageDeduplicationId}, time.Duration(e.DelaySeconds)*time.Second)
	out := object{"MessageId": m.id, "MD5OfMessageBody": md5Of(e.MessageBody)}
	if q.fifo {
		out["SequenceNumber"] = fmt.Sprintf("%020d", m.sequence)
	}
	return out, nil
}

func md5Of(s string) string {
	h := md5.Sum([]byte(s))
	return hex.EncodeToString(h[:])
}

var attributeName = regexp.MustCompile(`^[A-Za-z0-9_.-]{1,256}$`)

// check is what SQS refuses of a message.
func (q *queue) check(e *entry) *apiError {
	switch {
	case e.MessageBody == "":
		return invalid("MissingParameter", "The request must contain the parameter MessageBody.")
	case !isText(e.MessageBody):
		return invalid("InvalidMessageContents", "Invalid characters found.")
	case e.size() > limit:
		return invalid("InvalidParameterValue", "One or more parameters are invalid. Reason: Message must be shorter than 1048576 bytes.")
	case len(e.MessageAttributes) > 10:
		return invalid("InvalidParameterValue", "Number of message attributes exceeds the allowed maximum [10].")
	case e.DelaySeconds < 0 || e.DelaySeconds > 900 || q.fifo && e.DelaySeconds > 0:
		return invalid("InvalidParameterValue", "DelaySeconds")
	case q.fifo && (e.MessageGroupId == "" || e.MessageDeduplicationId == ""):
		return invalid("MissingParameter", "The request must contain the parameters MessageGroupId and MessageDeduplicationId.")
	case !idText(e.MessageGroupId) || !idText(e.MessageDeduplicationId):
		return invalid("InvalidParameterValue", "group and deduplication IDs have up to 128 alphanumeric characters and punctuation")
	}
	for name, a := range e.MessageAttributes {
		low := strings.ToLower(name)
		if !attributeName.MatchString(name) || strings.HasPrefix(low, "aws.") || strings.HasPrefix(low, "amazon.") ||
			strings.HasPrefix(name, ".") || strings.HasSuffix(name, ".") || strings.Contains(name, "..") {
			return invalid("InvalidParameterValue", "message attribute name "+strconv.Quote(name))
		}
		if a.StringValue == nil && len(a.BinaryValue) == 0 || a.StringValue != nil && (*a.StringValue == "" || !isText(*a.StringValue)) {
			return invalid("InvalidParameterValue", "The message attribute "+strconv.Quote(name)+" must contain a non-empty value of its type")
		}
	}
	return nil
}

func idText(s string) bool {
	return len(s) <= 128 && !strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r > '~' })
}

func isText(s string) bool {
	return utf8.ValidString(s) && !strings.ContainsFunc(s, func(r rune) bool {
		return r < 0x20 && r != '\t' && r != '\n' && r != '\r' || r == 0xFFFE || r == 0xFFFF
	})
}

// messages answers a receive with what was asked for, and with nothing else.
func (s *Server) messages(q *queue, ms []*message, in *request) any {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := []object{}
	system := slices.Concat(in.MessageSystemAttributeNames, in.AttributeNames)
	for _, m := range ms {
		all := map[string]string{
			"ApproximateReceiveCount":          strconv.Itoa(m.receives),
			"ApproximateFirstReceiveTimestamp": strconv.FormatInt(m.first.UnixMilli(), 10),
			"SentTimestamp":                    strconv.FormatInt(m.sent.UnixMilli(), 10),
		}
		if q.fifo {
			all["MessageGroupId"], all["MessageDeduplicationId"] = m.group, m.dedup
			all["SequenceNumber"] = fmt.Sprintf("%020d", m.sequence)
		}
		if m.source != "" {
			all["DeadLetterQueueSourceArn"] = "arn:aws:sqs:eu-central-1:000000000000:" + m.source
		}
		o := object{"MessageId": m.id, "ReceiptHandle": m.handle, "Body": m.body, "MD5OfBody": md5Of(m.body)}
		o["Attributes"] = filter(all, system)
		o["MessageAttributes"] = filter(m.attrs, in.MessageAttributeNames)
		out = append(out, o)
	}
	return object{"Messages": out}
}

func filter[V any](all map[string]V, names []string) map[string]V {
	out := map[string]V{}
	for k, v := range all {
		if slices.ContainsFunc(names, func(n string) bool {
			prefix, isPrefix := strings.CutSuffix(n, ".*")
			return n == "All" || n == k || n == ".*" || isPrefix && strings.HasPrefix(k, prefix)
		}) {
			out[k] = v
		}
	}
	return out
}

// The server is used over a socket too.
var _ http.Handler = (*Server)(nil)
