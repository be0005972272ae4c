package devtest

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/twiceproof/twiceproof/internal/devenv"
)

// startTimeout bounds the start of a private server.
const startTimeout = 2 * time.Minute

// OwnPostgres starts a private PostgreSQL server from local binaries, for tests that
// stop, kill and restart it. Without binaries the test ends as in [Missing].
func OwnPostgres(t testing.TB, cfg ...devenv.PostgresConfig) *devenv.Postgres {
	t.Helper()
	return own(t, "postgres", func(ctx context.Context) (*devenv.Postgres, error) {
		return devenv.StartPostgres(ctx, devenv.Options{}, last(cfg))
	})
}

// OwnRabbitMQ starts a private RabbitMQ node from local binaries, which takes 5 to
// 10 seconds, for tests that stop, kill, restart or configure it. Without binaries
// the test ends as in [Missing].
func OwnRabbitMQ(t testing.TB, cfg ...devenv.RabbitMQConfig) *devenv.RabbitMQ {
	t.Helper()
	return own(t, "rabbitmq", func(ctx context.Context) (*devenv.RabbitMQ, error) {
		return devenv.StartRabbitMQ(ctx, devenv.Options{}, last(cfg))
	})
}

// OwnSQS starts a private ElasticMQ, which takes about 2 seconds, for tests that
// stop, kill or restart it. Without its jars the test ends as in [Missing].
func OwnSQS(t testing.TB) *devenv.SQS {
	t.Helper()
	return own(t, "sqs", func(ctx context.Context) (*devenv.SQS, error) {
		return devenv.StartSQS(ctx, devenv.Options{})
	})
}

// OwnKafka starts a private Apache Kafka, which takes 5 to 8 seconds, for tests that
// stop, kill, restart or configure it. Without its jars the test ends as in [Missing].
func OwnKafka(t testing.TB, cfg ...devenv.KafkaConfig) *devenv.Kafka {
	t.Helper()
	return own(t, "kafka", func(ctx context.Context) (*devenv.Kafka, error) {
		return devenv.StartKafka(ctx, devenv.Options{}, last(cfg))
	})
}

type server interface {
	Close() error
	Logs() string
}

func own[S server](t testing.TB, service string, start func(context.Context) (S, error)) S {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), startTimeout)
	defer cancel()
	s, err := start(ctx)
	switch {
	case errors.Is(err, devenv.ErrUnavailable) || errors.Is(err, errors.ErrUnsupported):
		Missing(t, service, "a private server needs local binaries: "+err.Error())
	case err != nil:
		t.Fatalf("start a private %s: %v", service, err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the private %s has logged:\n%s", service, s.Logs())
		}
		if err := s.Close(); err != nil {
			t.Errorf("stop the private %s: %v", service, err)
		}
	})
	return s
}

// last returns the configuration given, or the zero one.
func last[C any](cfg []C) C {
	var c C
	if len(cfg) > 0 {
		c = cfg[len(cfg)-1]
	}
	return c
}
