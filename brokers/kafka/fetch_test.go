package kafka

import (
	"context"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
)

// Memory is used again for the next answer only where no message is part of it: what was
// received stays as it was, packed or not, also after many more fetches.
func TestMessagesStayAsTheyWereReceived(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	const batches, each = 40, 50
	for b := range batches {
		codec := []kafka.Compression{0, kafka.Gzip, 0, kafka.Snappy, kafka.Lz4, kafka.Zstd}[b%6]
		recs := make([]protocol.Record, 0, each)
		for i := b * each; i < (b+1)*each; i++ {
			recs = append(recs, protocol.Record{
				Time: time.Now(), Key: protocol.NewBytes([]byte(id(i))), Value: protocol.NewBytes(benchPayload(i)),
				Headers: []protocol.Header{{Key: brokers.HeaderMessageID, Value: []byte(id(i))}},
			})
		}
		res, err := r.admin.Produce(context.Background(), &kafka.ProduceRequest{
			Topic: r.topic, RequiredAcks: kafka.RequireAll, Compression: codec, Records: protocol.NewRecordReader(recs...),
		})
		require.NoError(t, err)
		require.NoError(t, res.Error)
	}
	// About one batch in each fetch.
	s, _ := r.source(batches*each, func(c *SourceConfig) { c.FetchBytes, c.MaxLaneSpan = 16<<10, batches*each })
	ds := receive(t, s, batches*each)
	for i, d := range ds {
		require.Equal(t, id(i), d.ID)
		require.Equal(t, id(i), d.Key)
		require.Equal(t, benchPayload(i), d.Payload)
	}
	done(t, s, ds...)
}
