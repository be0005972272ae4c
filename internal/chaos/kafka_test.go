package chaos

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	segmentio "github.com/segmentio/kafka-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/brokers/kafka"
	"github.com/twiceproof/twiceproof/internal/devenv"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
)

const (
	kafkaPartitions = 6
	kafkaGroup      = "chaos"
	// kafkaSession is how long the group waits for a member that was killed.
	kafkaSession = 2 * time.Second
)

// dialer leads every connection through the proxy: the cluster advertises its own address.
func (e endpoint) dialer(ctx context.Context, network, _ string) (net.Conn, error) {
	return (&net.Dialer{Timeout: 2 * time.Second}).DialContext(ctx, network, e.URL)
}

func (e endpoint) kafkaSource() (brokers.Source, error) {
	return kafka.NewSource(kafka.SourceConfig{
		Brokers: []string{e.URL}, Security: kafka.Security{Dial: e.dialer}, Group: kafkaGroup, Topics: []string{e.Name},
		SessionTimeout: kafkaSession, RebalanceTimeout: 8 * time.Second, HeartbeatInterval: 300 * time.Millisecond, DrainFor: 3 * time.Second,
		MaxLaneSpan: 200,
	})
}

func (e endpoint) kafkaPublisher() (brokers.Publisher, error) {
	return kafka.NewPublisher(kafka.PublisherConfig{Brokers: []string{e.URL}, Security: kafka.Security{Dial: e.dialer}, Timeout: 5 * time.Second})
}

// kafkaLog is an Apache Kafka behind a proxy, with one topic.
type kafkaLog struct {
	node  *devenv.Kafka
	proxy *proxy
	name  string
	admin *segmentio.Client

	watching sync.WaitGroup
	mu       sync.Mutex
	samples  int
	back     []string // what moved back
}

func (k *kafkaLog) start(t testing.TB) {
	k.node = devtest.OwnKafka(t)
	k.proxy = newProxy(t, k.node.Addr())
	k.name = devtest.Name("chaos")
	tr := &segmentio.Transport{MetadataTTL: time.Second}
	t.Cleanup(tr.CloseIdleConnections)
	k.admin = &segmentio.Client{Addr: segmentio.TCP(k.node.Addr()), Timeout: 5 * time.Second, Transport: tr}
	res, err := k.admin.CreateTopics(t.Context(), &segmentio.CreateTopicsRequest{
		Topics: []segmentio.TopicConfig{{Topic: k.name, NumPartitions: kafkaPartitions, ReplicationFactor: 1}},
	})
	require.NoError(t, err)
	require.NoError(t, res.Errors[k.name])
	require.Eventually(t, func() bool {
		ends, err := k.ends(t.Context())
		return err == nil && len(ends) == kafkaPartitions
	}, 30*time.Second, 50*time.Millisecond)
	ctx, stop := context.WithCancel(context.Background())
	k.watching.Go(func() { k.watch(ctx) })
	t.Cleanup(func() { stop(); k.watching.Wait() })
}

func (k *kafkaLog) endpoint() endpoint {
	return endpoint{"kafka", k.proxy.l.Addr().String(), k.name, true}
}

func (k *kafkaLog) ordered() bool { return true }

func (k *kafkaLog) cut(context.Context) (int, error) { return k.proxy.cut(), nil }

func (k *kafkaLog) restart(ctx context.Context) error {
	return errors.Join(k.node.Kill(), k.node.Start(ctx))
}

// watch samples the group's offsets all the time: none may ever move back.
func (k *kafkaLog) watch(ctx context.Context) {
	last := map[int]int64{}
	for pause(ctx, 50*time.Millisecond) {
		now, err := k.committed(ctx)
		if err != nil {
			continue // the broker is away
		}
		k.mu.Lock()
		k.samples++
		for p, at := range now {
			if at > 0 && at < last[p] {
				k.back = append(k.back, fmt.Sprintf("partition %d from %d to %d", p, last[p], at))
			}
			last[p] = max(last[p], at)
		}
		k.mu.Unlock()
	}
}

// verify checks what watch has seen.
func (k *kafkaLog) verify(t testing.TB) []row {
	k.mu.Lock()
	defer k.mu.Unlock()
	assert.Empty(t, k.back, "committed offsets that moved back")
	assert.Greater(t, k.samples, 20, "samples of the committed offsets")
	return []row{{"samples of the committed offsets", k.samples}, {"offsets that moved back", len(k.back)}}
}

func (k *kafkaLog) committed(ctx context.Context) (map[int]int64, error) {
	req := &segmentio.OffsetFetchRequest{GroupID: kafkaGroup, Topics: map[string][]int{}}
	for p := range kafkaPartitions {
		req.Topics[k.name] = append(req.Topics[k.name], p)
	}
	res, err := k.admin.OffsetFetch(ctx, req)
	if err != nil {
		return nil, err
	}
	at := map[int]int64{}
	for _, p := range res.Topics[k.name] {
		if p.Error != nil {
			return nil, p.Error
		}
		at[p.Partition] = p.CommittedOffset
	}
	return at, res.Error
}

func (k *kafkaLog) ends(ctx context.Context) (map[int]int64, error) {
	req := &segmentio.ListOffsetsRequest{Topics: map[string][]segmentio.OffsetRequest{}}
	for p := range kafkaPartitions {
		req.Topics[k.name] = append(req.Topics[k.name], segmentio.LastOffsetOf(p))
	}
	res, err := k.admin.ListOffsets(ctx, req)
	if err != nil {
		return nil, err
	}
	end := map[int]int64{}
	for _, p := range res.Topics[k.name] {
		if p.Error != nil {
			return nil, p.Error
		}
		end[p.Partition] = p.LastOffset
	}
	return end, nil
}

// left is the group's lag.
func (k *kafkaLog) left(ctx context.Context) (int, error) {
	end, err := k.ends(ctx)
	if err != nil {
		return 0, err
	}
	at, err := k.committed(ctx)
	if err != nil {
		return 0, err
	}
	n := 0
	for p, e := range end {
		n += int(e - max(at[p], 0))
	}
	return n, nil
}

// A partitioned log: members are killed and join and leave every second, connections
// are cut, the broker and the database die. The first effects of every key are in
// order, and the committed offsets never move back.
func TestChaosOnKafka(t *testing.T) {
	p := planOf(t)
	p.churn = true
	p.brokerKills = max(p.brokerKills, 1)
	runChaos(t, p, &kafkaLog{})
}
