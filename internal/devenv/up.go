package devenv

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"slices"
	"strings"
)

// Rungs of the ladder, as [Found] reports them.
const (
	RungURL     = "url"     // given in the environment
	RungCompose = "compose" // this repository's compose project was running
	RungLocal   = "local"   // started from local binaries
	RungDocker  = "docker"  // started as a compose project of our own
	RungInstall = "install" // started from binaries that were installed for it
)

// server is what a rung started.
type server interface {
	URL() string
	io.Closer
}

// Service is one kind of real service: how it is found, pinged, started and
// installed. Another service is another value of this type.
type Service struct {
	// Name is how flags, TWICEPROOF_REQUIRE and messages call it.
	Name string
	// EnvVar is the environment variable that holds its URL.
	EnvVar string

	ping  func(ctx context.Context, url string) error
	local func(ctx context.Context, o Options) (server, error)

	composeName    string   // service in docker-compose.yml
	composePort    string   // its port inside
	composePortEnv []string // variables of docker-compose.yml for the published ports
	composeURL     func(hostPort string) string

	installers []installer
}

// Services returns all that this package knows.
func Services() []Service {
	return []Service{
		{
			Name: "postgres", EnvVar: "DATABASE_URL",
			ping: pingPostgres,
			local: func(ctx context.Context, o Options) (server, error) {
				return orNil(StartPostgres(ctx, o, PostgresConfig{}))
			},
			composeName: "postgres", composePort: "5432", composePortEnv: []string{"TWICEPROOF_POSTGRES_PORT"},
			composeURL: func(hp string) string {
				return "postgres://postgres:postgres@" + hp + "/postgres?sslmode=disable"
			},
			installers: []installer{apt("postgresql"), npm()},
		},
		{
			Name: "rabbitmq", EnvVar: "AMQP_URL",
			ping: pingRabbitMQ,
			local: func(ctx context.Context, o Options) (server, error) {
				return orNil(StartRabbitMQ(ctx, o, RabbitMQConfig{}))
			},
			composeName: "rabbitmq", composePort: "5672", composePortEnv: []string{"TWICEPROOF_RABBITMQ_PORT", "TWICEPROOF_RABBITMQ_MANAGEMENT_PORT"},
			composeURL: func(hp string) string { return "amqp://guest:guest@" + hp + "/" },
			installers: []installer{apt("rabbitmq-server")},
		},
		{
			Name: "sqs", EnvVar: "SQS_ENDPOINT",
			ping: pingSQS,
			local: func(ctx context.Context, o Options) (server, error) {
				return orNil(StartSQS(ctx, o))
			},
			composeName: "sqs", composePort: "9324", composePortEnv: []string{"TWICEPROOF_SQS_PORT"},
			composeURL: func(hp string) string { return "http://" + hp },
			installers: []installer{elasticMQ.installer()},
		},
		{
			Name: "kafka", EnvVar: "KAFKA_BROKERS",
			ping: pingKafka,
			local: func(ctx context.Context, o Options) (server, error) {
				return orNil(StartKafka(ctx, o, KafkaConfig{}))
			},
			// The published port is fixed: clients connect to what the broker advertises.
			composeName: "kafka", composePort: "9092",
			composeURL: func(hp string) string { return hp },
			installers: []installer{apacheKafka.installer()},
		},
	}
}

// orNil keeps a nil pointer from becoming a non-nil interface.
func orNil[T server](s T, err error) (server, error) {
	if err != nil {
		return nil, err
	}
	return s, nil
}

// Find returns the services with the names; an unknown name is an error that lists
// the known ones. No names means all.
func Find(names ...string) ([]Service, error) {
	all := Services()
	if len(names) == 0 {
		return all, nil
	}
	var found []Service
	for _, n := range names {
		i := slices.IndexFunc(all, func(s Service) bool { return s.Name == n })
		if i < 0 {
			known := make([]string, len(all))
			for j, s := range all {
				known[j] = s.Name
			}
			return nil, fmt.Errorf("unknown service %q; known are %s", n, strings.Join(known, ", "))
		}
		found = append(found, all[i])
	}
	return found, nil
}

// Found says where a service was found.
type Found struct {
	Service Service
	// URL is empty where it was not found.
	URL string
	// Rung is one of the Rung constants.
	Rung string
	// Missing says for each rung why it gave nothing; nil if the service was found.
	Missing error
	server  server // nil if we did not start it
}

// Display returns the URL without its password.
func (f Found) Display() string {
	if !strings.Contains(f.URL, "://") {
		return f.URL // a list of addresses
	}
	u, err := url.Parse(f.URL)
	if err != nil {
		return "(a URL that cannot be parsed)"
	}
	return u.Redacted()
}

// Env is a set of services to run something with.
type Env struct{ Found []Found }

// Up finds or starts the services, as the ladder says. A service that is not found
// is no error: see [Found.Missing]; a given URL that does not answer is one. ctx
// bounds Up alone; the caller must Close the Env.
func Up(ctx context.Context, o Options, services ...Service) (*Env, error) {
	e := &Env{}
	docker, dockerErr := findCompose(ctx)
	for _, s := range services {
		f, err := s.find(ctx, o, docker, dockerErr)
		if err == nil {
			err = context.Cause(ctx)
		}
		e.Found = append(e.Found, f)
		if err != nil {
			return nil, errors.Join(err, e.Close())
		}
	}
	return e, nil
}

func (s Service) find(ctx context.Context, o Options, docker compose, dockerErr error) (Found, error) {
	f := Found{Service: s}
	if f.URL = os.Getenv(s.EnvVar); f.URL != "" {
		f.Rung = RungURL
		if err := s.try(ctx, f.URL); err != nil {
			return f, fmt.Errorf("%s is set (%s), but nothing answers there: %w; start that server, or unset the variable to let another be found",
				s.EnvVar, f.Display(), redact(err, f.URL))
		}
		return f, nil
	}
	var missing []error
	no := func(rung string, err error) { missing = append(missing, fmt.Errorf("%s: %w", rung, err)) }
	got := func(rung string, srv server) (Found, error) {
		return Found{Service: s, URL: srv.URL(), Rung: rung, server: srv}, nil
	}

	if dockerErr == nil {
		if hp, err := docker.address(ctx, s.composeName, s.composePort); err != nil {
			no(RungCompose, err)
		} else if u := s.composeURL(hp); s.try(ctx, u) == nil {
			return Found{Service: s, URL: u, Rung: RungCompose}, nil
		}
	}
	srv, err := s.local(ctx, o)
	if err == nil {
		return got(RungLocal, srv)
	}
	no(RungLocal, err)

	if dockerErr != nil {
		no(RungDocker, dockerErr)
	} else {
		o.log().Info("starting with docker compose", "service", s.Name)
		if srv, err := docker.up(ctx, o, s); err != nil {
			no(RungDocker, err)
		} else if err := s.try(ctx, srv.URL()); err != nil {
			no(RungDocker, errors.Join(err, srv.Close()))
		} else {
			return got(RungDocker, srv)
		}
	}
	if !o.Install {
		no(RungInstall, errors.New("not allowed"))
		f.Missing = errors.Join(missing...)
		return f, nil
	}
	for _, in := range s.installers {
		err := in.usable()
		if err == nil {
			err = in.install(ctx, o)
		}
		if err == nil {
			if srv, err = s.local(ctx, o); err == nil {
				return got(RungInstall, srv)
			}
		}
		no(RungInstall+" by "+in.name, err)
	}
	f.Missing = errors.Join(missing...)
	return f, nil
}

func (s Service) try(ctx context.Context, url string) error {
	ctx, cancel := context.WithTimeout(ctx, pingTimeout)
	defer cancel()
	return s.ping(ctx, url)
}

// redact takes the given URL's password out of an error's text.
func redact(err error, raw string) error {
	if !strings.Contains(raw, "://") {
		return err // a list of addresses
	}
	u, perr := url.Parse(raw)
	if perr != nil {
		return errors.New("the URL cannot be parsed")
	}
	pw, ok := u.User.Password()
	if !ok || pw == "" || !strings.Contains(err.Error(), pw) {
		return err
	}
	return errors.New(strings.ReplaceAll(err.Error(), pw, "xxxxx"))
}

// Environ returns NAME=URL for each service found.
func (e *Env) Environ() []string {
	var env []string
	for _, f := range e.Found {
		if f.URL != "" {
			env = append(env, f.Service.EnvVar+"="+f.URL)
		}
	}
	return env
}

// Close stops what was started, and nothing else. It may be called again.
func (e *Env) Close() error {
	var errs []error
	for i := range e.Found {
		if f := &e.Found[i]; f.server != nil {
			errs = append(errs, f.server.Close())
			f.server = nil
		}
	}
	return errors.Join(errs...)
}
