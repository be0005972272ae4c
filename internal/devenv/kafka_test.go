package devenv_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"os"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"
	"github.com/segmentio/kafka-go/sasl/plain"
	"github.com/segmentio/kafka-go/sasl/scram"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/internal/devenv"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
)

func TestKafkaKeepsItsDataOverAKillAndItsPorts(t *testing.T) {
	k := devtest.OwnKafka(t)
	tr := &kafka.Transport{MetadataTTL: 500 * time.Millisecond}
	defer tr.CloseIdleConnections()
	c := &kafka.Client{Addr: kafka.TCP(k.Addr()), Timeout: 10 * time.Second, Transport: tr}
	res, err := c.CreateTopics(t.Context(), &kafka.CreateTopicsRequest{Topics: []kafka.TopicConfig{{Topic: "t", NumPartitions: 1, ReplicationFactor: 1}}})
	require.NoError(t, err)
	require.NoError(t, res.Errors["t"])
	require.EventuallyWithT(t, func(ct *assert.CollectT) {
		res, err := c.Produce(t.Context(), &kafka.ProduceRequest{
			Topic: "t", RequiredAcks: kafka.RequireAll, Records: protocol.NewRecordReader(protocol.Record{Value: protocol.NewBytes([]byte("kept"))}),
		})
		if assert.NoError(ct, err) {
			assert.NoError(ct, res.Error)
		}
	}, 20*time.Second, 50*time.Millisecond)

	pid, at := k.PID(), k.Addr()
	require.NoError(t, k.Kill())
	require.Zero(t, k.PID())
	require.NoError(t, k.Start(t.Context()))
	require.NotEqual(t, pid, k.PID())
	require.Equal(t, at, k.Addr())
	require.EventuallyWithT(t, func(ct *assert.CollectT) {
		res, err := c.Fetch(t.Context(), &kafka.FetchRequest{Topic: "t", MinBytes: 1, MaxBytes: 1 << 20, MaxWait: 200 * time.Millisecond})
		if !assert.NoError(ct, err) || !assert.NoError(ct, res.Error) {
			return
		}
		rec, err := res.Records.ReadRecord()
		if assert.False(ct, errors.Is(err, io.EOF)) && assert.NoError(ct, err) {
			b, _ := protocol.ReadAll(rec.Value)
			assert.Equal(ct, "kept", string(b))
		}
	}, 30*time.Second, 100*time.Millisecond)
	require.NoError(t, k.Stop())
}

func TestKafkaSpeaksTLSAndTakesCredentials(t *testing.T) {
	k := devtest.OwnKafka(t)
	scram256, err := scram.Mechanism(scram.SHA256, devenv.KafkaUser, devenv.KafkaPassword)
	require.NoError(t, err)
	scram512, err := scram.Mechanism(scram.SHA512, devenv.KafkaUser, devenv.KafkaPassword)
	require.NoError(t, err)
	pem, err := os.ReadFile(k.CAFile())
	require.NoError(t, err)
	pool := x509.NewCertPool()
	require.True(t, pool.AppendCertsFromPEM(pem))
	for name, c := range map[string]struct {
		addr string
		tr   *kafka.Transport
	}{
		"plain":     {k.SASLAddr(), &kafka.Transport{SASL: plain.Mechanism{Username: devenv.KafkaUser, Password: devenv.KafkaPassword}}},
		"scram 256": {k.SASLAddr(), &kafka.Transport{SASL: scram256}},
		"scram 512": {k.SASLAddr(), &kafka.Transport{SASL: scram512}},
		"tls":       {k.TLSAddr(), &kafka.Transport{TLS: &tls.Config{RootCAs: pool}}},
	} {
		t.Run(name, func(t *testing.T) {
			defer c.tr.CloseIdleConnections()
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			res, err := (&kafka.Client{Addr: kafka.TCP(c.addr), Transport: c.tr}).Metadata(ctx, &kafka.MetadataRequest{})
			require.NoError(t, err)
			require.Len(t, res.Brokers, 1)
		})
	}
}
