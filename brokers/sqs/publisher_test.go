package sqs

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/sqs"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/internal/sqsfake"
)

func outcomes(rs []brokers.Result) []brokers.Outcome {
	os := make([]brokers.Outcome, len(rs))
	for i, r := range rs {
		os[i] = r.Outcome
	}
	return os
}

func (r *rig) messages(n int, edit func(i int, m *brokers.Message)) []*brokers.Message {
	ms := make([]*brokers.Message, n)
	for i := range ms {
		ms[i] = &brokers.Message{ID: fmt.Sprintf("id-%03d", i), Topic: r.queue, Payload: []byte("x")}
		if edit != nil {
			edit(i, ms[i])
		}
	}
	return ms
}

func TestEachEntryOfASendHasItsOwnAnswer(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r, srv := strict(t, false, nil)
		p := r.publisher(nil)
		defer r.close(p)
		srv.Fail(sqsfake.Fault{Op: "SendMessageBatch", Entries: map[int]string{2: "InternalError"}})
		srv.Fail(sqsfake.Fault{Op: "SendMessageBatch", Entries: map[int]string{0: "InvalidMessageContents"}, SenderFault: true})
		rs := p.Publish(t.Context(), r.messages(10, nil)...)
		require.Equal(t, brokers.Refused, rs[2].Outcome)
		require.Equal(t, brokers.Retryable, brokers.ClassOf(rs[2].Err))
		require.Equal(t, 9, srv.Len(r.queue))
		rs = p.Publish(t.Context(), r.messages(10, nil)...)
		require.Equal(t, brokers.Refused, rs[0].Outcome)
		require.Equal(t, brokers.Permanent, brokers.ClassOf(rs[0].Err))
		require.Equal(t, brokers.Accepted, rs[1].Outcome)
	})
}

func TestAnswerOfASendThatIsLostIsUnknownAndNotRepeated(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r, srv := strict(t, false, nil)
		p := r.publisher(nil)
		defer r.close(p)
		srv.Fail(sqsfake.Fault{Op: "SendMessageBatch", LoseAnswer: true})
		rs := p.Publish(t.Context(), r.messages(1, nil)...)
		require.Equal(t, brokers.Unknown, rs[0].Outcome)
		require.ErrorIs(t, rs[0].Err, brokers.ErrUnknownOutcome)
		require.Equal(t, 1, srv.Len(r.queue))
		srv.Fail(sqsfake.Fault{Op: "SendMessageBatch", Unavailable: true})
		require.Equal(t, brokers.Unknown, p.Publish(t.Context(), r.messages(1, nil)...)[0].Outcome, "a 503 may have stored it")
		srv.Fail(sqsfake.Fault{Op: "SendMessageBatch", Code: "RequestThrottled"})
		rs = p.Publish(t.Context(), r.messages(1, nil)...)
		require.Equal(t, brokers.Refused, rs[0].Outcome)
		require.Equal(t, brokers.Throttled, brokers.ClassOf(rs[0].Err))
		srv.Fail(sqsfake.Fault{Op: "SendMessageBatch", Code: "AccessDenied"})
		rs = p.Publish(t.Context(), r.messages(1, nil)...)
		require.Equal(t, brokers.Fatal, brokers.ClassOf(rs[0].Err))
	})
}

// Ten messages, each below the limit, are above it together: MassTransit/MassTransit#5645,
// awslabs/amazon-sqs-python-extended-client-lib#25.
func TestBatchesAreCutByBytesAttributesIncluded(t *testing.T) {
	t.Parallel()
	check := func(t *testing.T, r *rig) {
		p := r.publisher(nil)
		defer r.close(p)
		ms := r.messages(10, func(_ int, m *brokers.Message) {
			m.Payload = bytes.Repeat([]byte("x"), 150_000)
			m.Headers.Add("h", bytes.Repeat([]byte("h"), 20_000))
		})
		ms[4].Payload = bytes.Repeat([]byte("x"), 1_200_000)
		rs := p.Publish(t.Context(), ms...)
		for i, res := range rs {
			if i == 4 {
				require.Equal(t, brokers.Refused, res.Outcome)
				require.Equal(t, brokers.Permanent, brokers.ClassOf(res.Err))
				continue
			}
			require.Equal(t, brokers.Accepted, res.Outcome, "%v", res.Err)
		}
		require.Equal(t, 2, r.wire.counted("SendMessageBatch"))
	}
	t.Run("strict", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) { r, _ := strict(t, false, nil); check(t, r) })
	})
	t.Run("ElasticMQ", func(t *testing.T) { t.Parallel(); check(t, elastic(t, false, nil)) })
}

func TestBatchThatTheServerFindsTooLongIsSplit(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r, srv := strict(t, false, nil)
		p := r.publisher(nil)
		defer r.close(p)
		srv.Fail(sqsfake.Fault{Op: "SendMessageBatch", Code: "BatchRequestTooLong"})
		for _, res := range p.Publish(t.Context(), r.messages(10, nil)...) {
			require.Equal(t, brokers.Accepted, res.Outcome, "%v", res.Err)
		}
		require.Equal(t, 3, srv.Calls("SendMessageBatch"))
	})
}

func TestOneGroupGoesOutInOrderAndStopsAtItsFirstFailure(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r, srv := strict(t, true, nil)
		p := r.publisher(nil)
		defer r.close(p)
		ms := r.messages(4, func(_ int, m *brokers.Message) { m.Key = "A" })
		ms[3].Key = "B"
		srv.Fail(sqsfake.Fault{Op: "SendMessageBatch", After: 1, Entries: map[int]string{0: "InternalError"}})
		rs := p.Publish(t.Context(), ms...)
		require.Equal(t, []brokers.Outcome{brokers.Accepted, brokers.Refused, brokers.NotSent, brokers.Accepted}, outcomes(rs))
		require.ErrorIs(t, rs[2].Err, brokers.ErrKeyStopped)
		rs = p.Publish(t.Context(), ms...) // what was accepted before is dropped by its deduplication ID
		for _, res := range rs {
			require.Equal(t, brokers.Accepted, res.Outcome)
		}
		s, _ := r.open(10, nil)
		ds := r.receive(s, 4)
		var a []string
		for _, d := range ds {
			if d.Key == "A" {
				a = append(a, d.ID)
			}
		}
		require.Equal(t, []string{"id-000", "id-001", "id-002"}, a)
		r.done(s, ds...)
		require.Zero(t, srv.Len(r.queue))
	})
}

// Control characters are retried for ever: boto/boto3#1953, Particular/NServiceBus.AmazonSQS#2520.
func TestCharactersThatSQSRefusesTravelAsBase64OrAreRefusedForGood(t *testing.T) {
	t.Parallel()
	check := func(t *testing.T, r *rig) {
		p, strictText := r.publisher(nil), r.publisher(func(c *PublisherConfig) { c.TextOnly = true })
		defer r.close(p)
		defer r.close(strictText)
		bodies := []string{"a\x01b", "\uFFFE", string([]byte{0xED, 0xA0, 0x80}), "plain ✓ 🧾", "\t\r\n", ""}
		s, _ := r.open(10, nil)
		for i, body := range bodies {
			m := &brokers.Message{ID: fmt.Sprint("m", i), Topic: r.queue, Payload: []byte(body), Headers: brokers.Headers{{Key: "h", Value: []byte("x\x00y")}}}
			res := strictText.Publish(t.Context(), m)[0]
			if i < 3 {
				require.Equal(t, brokers.Refused, res.Outcome)
				require.Equal(t, brokers.Permanent, brokers.ClassOf(res.Err))
				require.Equal(t, brokers.Accepted, p.Publish(t.Context(), m)[0].Outcome)
			} else {
				require.Equal(t, brokers.Accepted, res.Outcome, "%v", res.Err)
			}
			d := r.receive(s, 1)[0]
			require.Equal(t, body, string(d.Payload))
			h, _ := d.Headers.Get("h")
			require.Equal(t, "x\x00y", string(h))
			require.NoError(t, d.Defect)
			r.done(s, d)
		}
	}
	t.Run("strict", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) { r, _ := strict(t, false, nil); check(t, r) })
	})
	t.Run("ElasticMQ", func(t *testing.T) { t.Parallel(); check(t, elastic(t, false, nil)) })
}

func TestHeadersThatNoAttributeCanCarryAreFolded(t *testing.T) {
	t.Parallel()
	many := brokers.Headers{}
	for i := range 11 {
		many.Add(fmt.Sprint("h", i), []byte(fmt.Sprint(i)))
	}
	check := func(t *testing.T, r *rig) {
		p := r.publisher(nil)
		defer r.close(p)
		s, _ := r.open(10, nil)
		for name, hs := range map[string]brokers.Headers{
			"eleven":        many,
			"repeated":      {{Key: "b", Value: []byte("1")}, {Key: "a", Value: []byte("2")}, {Key: "b", Value: []byte("3")}},
			"empty value":   {{Key: "a", Value: []byte{}}},
			"odd name":      {{Key: "näme with spaces", Value: []byte("1")}},
			"a name of SQS": {{Key: "AWS.trace", Value: []byte("1")}},
			"a name of us":  {{Key: "message-id", Value: []byte("not the id")}},
			"bytes":         {{Key: "x y", Value: []byte{0, 1, 255}}},
		} {
			m := &brokers.Message{ID: name, Topic: r.queue, Payload: []byte("x"), Headers: hs}
			require.Equal(t, brokers.Accepted, p.Publish(t.Context(), m)[0].Outcome, name)
			d := r.receive(s, 1)[0]
			require.Equal(t, name, d.ID)
			require.Len(t, d.Headers, len(hs), name)
			for i, h := range hs {
				require.Equal(t, h.Key, d.Headers[i].Key, name)
				require.True(t, bytes.Equal(h.Value, d.Headers[i].Value), name)
			}
			r.done(s, d)
		}
	}
	t.Run("strict", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) { r, _ := strict(t, false, nil); check(t, r) })
	})
	t.Run("ElasticMQ", func(t *testing.T) { t.Parallel(); check(t, elastic(t, false, nil)) })
}

// A replay within five minutes is accepted and dropped: ruby-shoryuken/shoryuken#473,
// MassTransit/MassTransit#4015.
func TestReplayWithAnotherDeduplicationIDIsDelivered(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r, srv := strict(t, true, nil)
		r.send("a", "m1")
		s, _ := r.open(10, nil)
		r.done(s, r.receive(s, 1)...)
		r.send("a", "m1")
		require.Zero(t, srv.Len(r.queue), "this is what SQS does")
		p := r.publisher(func(c *PublisherConfig) {
			c.DedupID = func(m *brokers.Message) string { return m.ID + "#replay-1" }
		})
		defer r.close(p)
		require.Equal(t, brokers.Accepted, p.Publish(t.Context(), &brokers.Message{ID: "m1", Key: "a", Topic: r.queue, Payload: []byte("x")})[0].Outcome)
		d := r.receive(s, 1)[0]
		require.Equal(t, "m1", d.ID)
		r.done(s, d)
	})
}

func TestKeysAndIDsOfAnyKindReachAFIFOQueue(t *testing.T) {
	t.Parallel()
	check := func(t *testing.T, r *rig) {
		p := r.publisher(nil)
		defer r.close(p)
		s, _ := r.open(10, nil)
		for i, key := range []string{"", "plain", "with space", "ключ", strings.Repeat("k", 200), "unkeyed.x", "sha256.x", "\x00\xff"} {
			m := &brokers.Message{ID: fmt.Sprintf("id %d %s", i, strings.Repeat("é", 100)), Key: key, Topic: r.queue, Payload: []byte("x")}
			res := p.Publish(t.Context(), m)[0]
			require.Equal(t, brokers.Accepted, res.Outcome, "%q: %v", key, res.Err)
			d := r.receive(s, 1)[0]
			require.Equal(t, key, d.Key)
			require.Equal(t, m.ID, d.ID)
			r.done(s, d)
		}
	}
	t.Run("strict", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) { r, _ := strict(t, true, nil); check(t, r) })
	})
	t.Run("ElasticMQ", func(t *testing.T) { t.Parallel(); check(t, elastic(t, true, nil)) })
}

// The same event, with and without SNS in front: spinnaker/echo#325,
// aws/aws-dotnet-messaging#18.
func TestEnvelopesGiveTheSameMessage(t *testing.T) {
	t.Parallel()
	const detail = `{"order": 7}`
	sns := func(message string) string {
		return fmt.Sprintf(`{"Type":"Notification","MessageId":"sns-1","TopicArn":"arn:aws:sns:x:1:t","Message":%q,"Timestamp":"2024-02-29T12:00:00.000Z",
			"MessageAttributes":{"message-id":{"Type":"String","Value":"e1"},"bytes":{"Type":"Binary","Value":"AAH/"}}}`, message)
	}
	event := `{"version":"0","id":"ev-1","detail-type":"order.placed","source":"shop","time":"2024-02-29T12:00:00Z","detail":` + detail + `}`
	inDetail := func(m *brokers.Message) (string, error) {
		if id, ok := m.Headers.Get("event-id"); ok && m.ID == "" {
			return string(id), nil
		}
		return m.ID, nil
	}
	for name, c := range map[string]struct {
		envelope Envelope
		body     string
		direct   bool
		defect   bool
		id, typ  string
		payload  string
	}{
		"SNS":                    {envelope: SNS, body: sns(detail), id: "e1", payload: detail},
		"SNS, auto":              {envelope: AutoEnvelope, body: sns(detail), id: "e1", payload: detail},
		"raw, auto":              {envelope: AutoEnvelope, body: detail, direct: true, id: "e1", payload: detail},
		"EventBridge":            {envelope: EventBridge, body: event, id: "ev-1", typ: "order.placed", payload: detail},
		"EventBridge in SNS":     {envelope: EventBridge, body: sns(event), id: "e1", typ: "order.placed", payload: detail},
		"EventBridge, auto":      {envelope: AutoEnvelope, body: sns(event), id: "e1", typ: "order.placed", payload: detail},
		"raw where SNS is said":  {envelope: SNS, body: detail, direct: true, defect: true, id: "e1", payload: detail},
		"half an event":          {envelope: EventBridge, body: event[:40], defect: true, payload: event[:40]},
		"bad base64 in SNS":      {envelope: SNS, body: strings.Replace(sns(detail), "AAH/", "!", 1), defect: true, payload: strings.Replace(sns(detail), "AAH/", "!", 1)},
		"an envelope, none said": {envelope: NoEnvelope, body: sns(detail), payload: sns(detail)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r, srv := strict(t, false, nil)
				if c.direct {
					p := r.publisher(nil)
					p.Publish(t.Context(), &brokers.Message{ID: "e1", Topic: r.queue, Payload: []byte(c.body)})
					r.close(p)
				} else {
					_, err := r.client.SendMessage(t.Context(), &sqs.SendMessageInput{QueueUrl: &r.url, MessageBody: aws.String(c.body)})
					require.NoError(t, err)
				}
				s, _ := r.open(10, func(sc *SourceConfig) { sc.Envelope, sc.ID = c.envelope, inDetail })
				d := r.receive(s, 1)[0]
				require.Equal(t, c.defect, d.Defect != nil, "%v", d.Defect)
				require.Equal(t, c.payload, string(d.Payload))
				require.Equal(t, c.typ, d.Type)
				require.Equal(t, c.id, d.ID)
				if c.defect {
					require.Equal(t, brokers.Permanent, brokers.ClassOf(d.Defect))
				}
				r.done(s, d)
				require.Zero(t, srv.Len(r.queue))
			})
		})
	}
}

func TestPublishThatIsCutOffByItsContextIsUnknown(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r, srv := strict(t, false, nil)
		hold := make(chan struct{})
		slow := &slowTransport{base: srv, hold: hold, op: "AmazonSQS.SendMessageBatch"}
		p, err := NewPublisher(PublisherConfig{Client: clientOn("http://sqsfake", slow)})
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		go func() { <-ctx.Done(); close(hold) }()
		require.Equal(t, brokers.Unknown, p.Publish(ctx, r.messages(1, nil)...)[0].Outcome)
		r.close(p)
	})
}
