package kafka

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

// franz does what kafka-go cannot: transactions and the deletion of records.
type franz struct {
	t  *testing.T
	cl *kgo.Client
}

func adminOf(t *testing.T, addrs []string, opts ...kgo.Opt) *franz {
	t.Helper()
	cl, err := kgo.NewClient(append([]kgo.Opt{kgo.SeedBrokers(addrs...), kgo.RecordPartitioner(kgo.ManualPartitioner())}, opts...)...)
	require.NoError(t, err)
	t.Cleanup(cl.Close)
	return &franz{t, cl}
}

func (f *franz) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	f.t.Cleanup(cancel)
	return ctx
}

func (f *franz) deleteRecords(topic string, partition int, before int64) {
	f.t.Helper()
	var o kadm.Offsets
	o.AddOffset(topic, int32(partition), before, -1)
	_, err := kadm.NewClient(f.cl).DeleteRecords(f.ctx(), o)
	require.NoError(f.t, err)
}

func (f *franz) addPartitions(topic string, n int) {
	f.t.Helper()
	res, err := kadm.NewClient(f.cl).UpdatePartitions(f.ctx(), n, topic)
	require.NoError(f.t, err)
	require.NoError(f.t, res.Error())
}

// transaction writes messages in a transaction of their own and ends it.
func (f *franz) transaction(topic string, partition, from, to int, commit bool) {
	f.t.Helper()
	require.NoError(f.t, f.cl.BeginTransaction())
	f.produce(topic, partition, from, to)
	end := kgo.TryAbort
	if commit {
		end = kgo.TryCommit
	}
	require.NoError(f.t, f.cl.EndTransaction(f.ctx(), end))
}

func (f *franz) produce(topic string, partition, from, to int) {
	f.t.Helper()
	for i := from; i < to; i++ {
		res := f.cl.ProduceSync(f.ctx(), &kgo.Record{
			Topic: topic, Partition: int32(partition), Key: []byte(id(i)), Value: []byte(id(i)), Timestamp: time.Now(),
			Headers: []kgo.RecordHeader{{Key: "message-id", Value: []byte(id(i))}},
		})
		require.NoError(f.t, res.FirstErr())
	}
}
