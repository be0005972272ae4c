package devenv

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/sqs"
)

// elasticMQ is the SQS server that is not ours: 26 MB of jars.
var elasticMQ = jars{name: "elasticmq-1.7.1", dependencies: `
<dependency><groupId>org.elasticmq</groupId><artifactId>elasticmq-server_2.13</artifactId><version>1.7.1</version></dependency>`}

// SQS is a private ElasticMQ on 127.0.0.1, on a port of its own. It keeps queues and
// messages in memory: a kill loses them. Its methods are not for concurrent use; PID
// and URL excepted.
type SQS struct {
	st        *state
	java      string
	classpath string
	port      int

	mu   sync.Mutex
	node *process
}

// StartSQS starts a private ElasticMQ from the cached jars, which takes about 2
// seconds, and waits until it answers. It returns [ErrUnavailable] without Java or
// the jars. ctx bounds the start alone; the server runs until Close.
func StartSQS(ctx context.Context, o Options) (*SQS, error) {
	if !localSupported {
		return nil, errNoLocal
	}
	bin, err := java()
	if err != nil {
		return nil, fmt.Errorf("ElasticMQ: %w", err)
	}
	cp, err := elasticMQ.classpath()
	if err != nil {
		return nil, fmt.Errorf("ElasticMQ: %w", err)
	}
	st, err := newState(o, "sqs")
	if err != nil {
		return nil, err
	}
	s := &SQS{st: st, java: bin, classpath: cp}
	if err := s.create(ctx); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

func (s *SQS) create(ctx context.Context) error {
	ports, err := freePorts(1)
	if err != nil {
		return err
	}
	s.port = ports[0]
	p := strconv.Itoa(s.port)
	// The default binds 0.0.0.0.
	conf := `include classpath("application.conf")
node-address { protocol = http, host = "127.0.0.1", port = ` + p + `, context-path = "" }
rest-sqs { enabled = true, bind-port = ` + p + `, bind-hostname = "127.0.0.1", sqs-limits = strict }
rest-stats { enabled = false }
`
	if err := os.WriteFile(s.conf(), []byte(conf), 0o644); err != nil {
		return err
	}
	return s.Start(ctx)
}

func (s *SQS) conf() string { return filepath.Join(s.st.dir, "elasticmq.conf") }

// URL returns the endpoint, for BaseEndpoint of a client; it is the same after a
// restart. Any credentials will do.
func (s *SQS) URL() string { return "http://" + addr(s.port) }

// Addr returns host:port, for a proxy in front of the server.
func (s *SQS) Addr() string { return addr(s.port) }

// PID returns the server's process id, or 0 while it is stopped.
func (s *SQS) PID() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.node.alive() {
		return 0
	}
	return s.node.pid()
}

// Start starts a stopped or killed server again, on the same port and without its
// queues, and waits until it answers. On a running one it only waits.
func (s *SQS) Start(ctx context.Context) error {
	node, err := s.spawn()
	if err != nil {
		return err
	}
	if err = node.await(ctx, func(ctx context.Context) error { return readySQS(ctx, s.URL()) }); err != nil {
		return errors.Join(err, node.end(os.Kill, 0))
	}
	return nil
}

func (s *SQS) spawn() (*process, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.node.alive() {
		return s.node, nil
	}
	cmd := exec.Command(s.java, "-Xmx192m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1",
		"-Dconfig.file="+s.conf(), "-cp", s.classpath, "org.elasticmq.server.Main")
	cmd.Dir = s.st.dir
	node, err := start(s.st, "elasticmq", cmd, childAttr(nil))
	if err != nil {
		return nil, err
	}
	s.node = node
	return node, nil
}

// Stop stops the server (SIGTERM). It returns once the process is gone.
func (s *SQS) Stop() error { return s.end(syscall.SIGTERM, 10*time.Second) }

// Kill kills the server (SIGKILL): a crash. It returns once the process is gone.
func (s *SQS) Kill() error { return s.end(os.Kill, 0) }

func (s *SQS) end(sig os.Signal, patience time.Duration) error {
	s.mu.Lock()
	node := s.node
	s.mu.Unlock()
	return node.end(sig, patience)
}

// Close kills the server and removes its files. It may be called again.
func (s *SQS) Close() error { return errors.Join(s.Kill(), s.st.close()) }

// readySQS waits for ElasticMQ's own word first: its port is open before that.
func readySQS(ctx context.Context, url string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/health", nil)
	if err != nil {
		return err
	}
	tr := &http.Transport{DisableKeepAlives: true}
	resp, err := tr.RoundTrip(req)
	if err != nil {
		return err
	}
	if err := resp.Body.Close(); err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("GET /health: %s", resp.Status)
	}
	return pingSQS(ctx, url)
}

// pingSQS lists a queue, which any SQS can do, with the credentials of the
// environment if there are some: an endpoint that is given may be AWS itself.
func pingSQS(ctx context.Context, url string) error {
	tr := &http.Transport{DisableKeepAlives: true, Proxy: http.ProxyFromEnvironment}
	_, err := sqs.New(sqs.Options{
		BaseEndpoint: aws.String(url),
		Region:       orElse(os.Getenv("AWS_REGION"), "eu-central-1"),
		HTTPClient:   &http.Client{Transport: tr},
		Credentials: aws.CredentialsProviderFunc(func(context.Context) (aws.Credentials, error) {
			return aws.Credentials{
				AccessKeyID:     orElse(os.Getenv("AWS_ACCESS_KEY_ID"), "devenv"),
				SecretAccessKey: orElse(os.Getenv("AWS_SECRET_ACCESS_KEY"), "devenv"),
				SessionToken:    os.Getenv("AWS_SESSION_TOKEN"),
			}, nil
		}),
		RetryMaxAttempts: 1,
	}).ListQueues(ctx, &sqs.ListQueuesInput{MaxResults: aws.Int32(1)})
	return err
}

func orElse(s, other string) string {
	if s == "" {
		return other
	}
	return s
}
