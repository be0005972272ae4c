package devenv

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/segmentio/kafka-go"
)

// apacheKafka is the broker and its KRaft controller: 44 MB of jars. Its pom brings
// slf4j 1.7, so the logger is of that version.
var apacheKafka = jars{name: "kafka-4.3.1", dependencies: `
<dependency><groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>4.3.1</version></dependency>
<dependency><groupId>org.slf4j</groupId><artifactId>slf4j-simple</artifactId><version>1.7.36</version></dependency>`}

// The user of the SASL listener of a private Kafka.
const (
	KafkaUser     = "alice"
	KafkaPassword = "alice-pw"
)

// KafkaConfig is what a private Kafka is started with.
type KafkaConfig struct {
	// Properties are appended to server.properties, for example
	// "auto.create.topics.enable=true"; the last value of a name counts.
	Properties string
}

// Kafka is a private Apache Kafka, one node that is broker and controller, on
// 127.0.0.1 and on ports and a directory of its own. Its methods are not for
// concurrent use; PID and the addresses excepted.
type Kafka struct {
	st        *state
	cfg       KafkaConfig
	java      string
	classpath string
	ports     [4]int // plain, SASL, TLS, controller

	mu   sync.Mutex
	node *process
}

// StartKafka starts a private Kafka from the cached jars, which takes 5 to 8 seconds,
// and waits until topics can be made. It returns [ErrUnavailable] without Java or the
// jars. ctx bounds the start alone; the server runs until Close.
func StartKafka(ctx context.Context, o Options, cfg KafkaConfig) (*Kafka, error) {
	if !localSupported {
		return nil, errNoLocal
	}
	bin, err := java()
	if err != nil {
		return nil, fmt.Errorf("Kafka: %w", err)
	}
	cp, err := apacheKafka.classpath()
	if err != nil {
		return nil, fmt.Errorf("Kafka: %w", err)
	}
	st, err := newState(o, "kafka")
	if err != nil {
		return nil, err
	}
	k := &Kafka{st: st, cfg: cfg, java: bin, classpath: cp}
	if err := k.create(ctx); err != nil {
		return nil, errors.Join(err, k.Close())
	}
	return k, nil
}

func (k *Kafka) create(ctx context.Context) error {
	ports, err := freePorts(4)
	if err != nil {
		return err
	}
	k.ports = [4]int(ports)
	if err := writeCertificate(k.keystore(), k.CAFile()); err != nil {
		return err
	}
	if err := os.WriteFile(k.properties(), []byte(k.text()), 0o600); err != nil {
		return err
	}
	var id [16]byte
	if _, err := rand.Read(id[:]); err != nil {
		return err
	}
	// The storage is formatted with the users of SCRAM in it.
	args := []string{"-Xmx128m", "-XX:TieredStopAtLevel=1", "-cp", k.classpath, "kafka.tools.StorageTool", "format",
		"-t", base64.RawURLEncoding.EncodeToString(id[:]), "-c", k.properties()}
	for _, m := range []string{"SCRAM-SHA-256", "SCRAM-SHA-512"} {
		args = append(args, "--add-scram", m+"=[name="+KafkaUser+",password="+KafkaPassword+"]")
	}
	cmd := exec.CommandContext(ctx, k.java, args...)
	cmd.Dir = k.st.dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("format Kafka's storage: %w: %s", err, out)
	}
	return k.Start(ctx)
}

func (k *Kafka) properties() string { return filepath.Join(k.st.dir, "server.properties") }
func (k *Kafka) keystore() string   { return filepath.Join(k.st.dir, "keystore.pem") }

// CAFile is the PEM file of the authority that signed the TLS listener's certificate.
func (k *Kafka) CAFile() string { return filepath.Join(k.st.dir, "ca.pem") }

// text is server.properties.
func (k *Kafka) text() string {
	jaas := func(listener, mechanism, module, more string) string {
		return "listener.name." + listener + "." + mechanism + ".sasl.jaas.config=org.apache.kafka.common.security." + module + " required" + more + ";\n"
	}
	var listeners, advertised []string
	for i, name := range []string{"PLAINTEXT", "SASL_PLAINTEXT", "SSL", "CONTROLLER"} {
		l := name + "://" + addr(k.ports[i])
		if listeners = append(listeners, l); name != "CONTROLLER" {
			advertised = append(advertised, l)
		}
	}
	return `process.roles=broker,controller
node.id=1
controller.quorum.voters=1@` + addr(k.ports[3]) + `
listeners=` + strings.Join(listeners, ",") + `
advertised.listeners=` + strings.Join(advertised, ",") + `
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,SASL_PLAINTEXT:SASL_PLAINTEXT,SSL:SSL,CONTROLLER:PLAINTEXT
sasl.enabled.mechanisms=PLAIN,SCRAM-SHA-256,SCRAM-SHA-512
` + jaas("sasl_plaintext", "plain", "plain.PlainLoginModule", ` user_`+KafkaUser+`="`+KafkaPassword+`"`) +
		jaas("sasl_plaintext", "scram-sha-256", "scram.ScramLoginModule", "") +
		jaas("sasl_plaintext", "scram-sha-512", "scram.ScramLoginModule", "") + `ssl.keystore.type=PEM
ssl.keystore.location=` + k.keystore() + `
log.dirs=` + filepath.Join(k.st.dir, "data") + `
num.partitions=3
offsets.topic.num.partitions=1
offsets.topic.replication.factor=1
transaction.state.log.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=500
auto.create.topics.enable=false
# After a crash a broker waits for its own old registration to expire.
broker.session.timeout.ms=2000
broker.heartbeat.interval.ms=500
# Compaction within the patience of a test.
log.cleaner.backoff.ms=200
` + k.cfg.Properties + "\n"
}

// Addr is the host:port without TLS and credentials; it is the same after a restart.
func (k *Kafka) Addr() string { return addr(k.ports[0]) }

// URL is Addr.
func (k *Kafka) URL() string { return k.Addr() }

// SASLAddr is the host:port where [KafkaUser] logs in by PLAIN or SCRAM.
func (k *Kafka) SASLAddr() string { return addr(k.ports[1]) }

// TLSAddr is the host:port that speaks TLS; see CAFile.
func (k *Kafka) TLSAddr() string { return addr(k.ports[2]) }

// PID returns the server's process id, or 0 while it is stopped.
func (k *Kafka) PID() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.node.alive() {
		return 0
	}
	return k.node.pid()
}

// Start starts a stopped or killed server again, on the same ports and data, and waits
// until topics can be made. On a running one it only waits.
func (k *Kafka) Start(ctx context.Context) error {
	node, err := k.spawn()
	if err != nil {
		return err
	}
	if err = node.await(ctx, func(ctx context.Context) error { return readyKafka(ctx, k.Addr()) }); err != nil {
		return errors.Join(err, node.end(os.Kill, 0))
	}
	return nil
}

func (k *Kafka) spawn() (*process, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.node.alive() {
		return k.node, nil
	}
	cmd := exec.Command(k.java, "-Xms96m", "-Xmx400m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1",
		"-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-cp", k.classpath, "kafka.Kafka", k.properties())
	cmd.Dir = k.st.dir
	node, err := start(k.st, "kafka", cmd, childAttr(nil))
	if err != nil {
		return nil, err
	}
	k.node = node
	return node, nil
}

// Stop stops the server (SIGTERM), which hands its partitions over and flushes. It
// returns once the process is gone.
func (k *Kafka) Stop() error { return k.end(syscall.SIGTERM, 20*time.Second) }

// Kill kills the server (SIGKILL): a crash. It returns once the process is gone.
func (k *Kafka) Kill() error { return k.end(os.Kill, 0) }

func (k *Kafka) end(sig os.Signal, patience time.Duration) error {
	k.mu.Lock()
	node := k.node
	k.mu.Unlock()
	return node.end(sig, patience)
}

// Close kills the server and removes its files. It may be called again.
func (k *Kafka) Close() error { return errors.Join(k.Kill(), k.st.close()) }

// readyKafka waits until the broker would make a topic: its port is open before that,
// also for a moment after a kill.
func readyKafka(ctx context.Context, at string) error {
	return withKafka(at, func(c *kafka.Client) error {
		if err := metadata(ctx, c); err != nil {
			return err
		}
		name := "twiceproof-ready"
		res, err := c.CreateTopics(ctx, &kafka.CreateTopicsRequest{
			ValidateOnly: true, Topics: []kafka.TopicConfig{{Topic: name, NumPartitions: 1, ReplicationFactor: 1}},
		})
		if err != nil {
			return err
		}
		return res.Errors[name]
	})
}

// pingKafka asks for the cluster's brokers, which needs no permission. at is a list,
// with commas.
func pingKafka(ctx context.Context, at string) error {
	return withKafka(at, func(c *kafka.Client) error { return metadata(ctx, c) })
}

func withKafka(at string, fn func(c *kafka.Client) error) error {
	tr := &kafka.Transport{DialTimeout: pingTimeout}
	defer tr.CloseIdleConnections()
	return fn(&kafka.Client{Addr: kafka.TCP(strings.Split(at, ",")...), Timeout: pingTimeout, Transport: tr})
}

func metadata(ctx context.Context, c *kafka.Client) error {
	res, err := c.Metadata(ctx, &kafka.MetadataRequest{})
	switch {
	case err != nil:
		return err
	case len(res.Brokers) == 0:
		return errors.New("the cluster has no broker yet")
	}
	return nil
}
