// Package devtest gives tests the real services they need: the database and the
// broker whose URLs cmd/devenv (or the caller) put into the environment, in a
// corner of their own, or a private server for tests that stop and restart one.
//
//	go run ./cmd/devenv -- go test ./...
//
// What it guarantees: a service given by URL is never stopped, and nothing in it
// that the test did not create is dropped. A test whose service is missing is
// skipped with one line on standard error that starts with "SKIP", or fails where
// the environment variable TWICEPROOF_REQUIRE names the service ("postgres",
// "rabbitmq", "sqs", "kafka"; a comma separates several).
//
// What it does not: install anything, or start a shared server. That is cmd/devenv's
// work, so that `go test ./...` alone changes nothing on the machine.
package devtest

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
)

// EnvRequire is the environment variable that lists the services whose absence is
// a failure.
const EnvRequire = "TWICEPROOF_REQUIRE"

// Required tells whether TWICEPROOF_REQUIRE names the service.
func Required(service string) bool {
	return slices.ContainsFunc(strings.Split(os.Getenv(EnvRequire), ","), func(s string) bool {
		return strings.TrimSpace(s) == service
	})
}

// Missing ends the test: skipped with one printed line, or failed where the
// service is required. why says what to do.
func Missing(t testing.TB, service, why string) {
	t.Helper()
	if Required(service) {
		t.Fatalf("%s is required by %s: %s", service, EnvRequire, why)
	}
	fmt.Fprintf(os.Stderr, "SKIP %s: %s: %s\n", service, t.Name(), why)
	t.Skipf("%s: %s", service, why)
}

// Skip skips the test and prints one line that says why: for what no service could
// make possible, such as another operating system.
func Skip(t testing.TB, why string) {
	t.Helper()
	fmt.Fprintf(os.Stderr, "SKIP %s: %s\n", t.Name(), why)
	t.Skip(why)
}

// urlOf returns the value of the environment variable, or ends the test.
func urlOf(t testing.TB, service, env string) string {
	t.Helper()
	u := os.Getenv(env)
	if u == "" {
		Missing(t, service, env+" is not set; run the tests by `go run ./cmd/devenv -- go test ./...`")
	}
	return u
}

// PostgresURL returns DATABASE_URL. Isolate by a schema of your own; see
// [PostgresSchema] and [Postgres].
func PostgresURL(t testing.TB) string { t.Helper(); return urlOf(t, "postgres", "DATABASE_URL") }

// RabbitMQURL returns AMQP_URL. Isolate by names that nobody else uses; see [Name].
func RabbitMQURL(t testing.TB) string { t.Helper(); return urlOf(t, "rabbitmq", "AMQP_URL") }

// SQSEndpoint returns SQS_ENDPOINT. Isolate by names that nobody else uses; see [Name].
func SQSEndpoint(t testing.TB) string { t.Helper(); return urlOf(t, "sqs", "SQS_ENDPOINT") }

// KafkaBrokers returns the addresses in KAFKA_BROKERS. Isolate by names that nobody
// else uses; see [Name].
func KafkaBrokers(t testing.TB) []string {
	t.Helper()
	return strings.Split(urlOf(t, "kafka", "KAFKA_BROKERS"), ",")
}
