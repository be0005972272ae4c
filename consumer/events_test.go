package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/twiceproof/twiceproof/brokers"
	"github.com/twiceproof/twiceproof/brokers/memory"
	"github.com/twiceproof/twiceproof/consumer"
	"github.com/twiceproof/twiceproof/internal/devenv/devtest"
	"github.com/twiceproof/twiceproof/internal/pgproxy"
)

// The rows of the table "what happens when", one test each. Those of handlers'
// results are in runner_test.go, those of outages in outage_test.go.

type execFunc = func(sql string, args ...any) error

func quick() consumer.Config {
	return consumer.Config{Backoff: 10 * time.Millisecond, MaxBackoff: 20 * time.Millisecond}
}

func TestHandlerPastItsDeadlineHasFailed(t *testing.T) {
	t.Parallel()
	onAll(t, func(t *testing.T, db database) {
		b := memory.New(memory.Config{})
		cfg := quick()
		cfg.HandlerTimeout, cfg.Tries, cfg.MaxAttempts = 50*time.Millisecond, 1, 2
		r := db.start(t, b.Source("q"), cfg, func(ctx context.Context, exec func(string, ...any) error, m *consumer.Message) error {
			if err := effect(exec, m); err != nil {
				return err
			}
			<-ctx.Done()
			return ctx.Err()
		})
		publish(t, b, msg("q", "1", "k", "x"))
		eventually(t, "dead", func() bool { return r.Stats().Dead == 1 })
		require.NoError(t, r.stop())
		require.Equal(t, 1, db.query(t, `SELECT count(*) FROM held_messages WHERE dead AND attempts = 2 AND last_error_class = 'timeout' AND last_error LIKE 'handler timeout of 50ms%'`))
		require.Zero(t, db.query(t, `SELECT count(*) FROM effects`))
		require.EqualValues(t, 2, r.Stats().Failures)
	})
}

// A handler that ignores its context must not keep its worker, its connection or its
// claim; where nobody can take them (SQLite) health says so.
func TestHandlerThatIgnoresItsContextIsCutOff(t *testing.T) {
	t.Parallel()
	onAll(t, func(t *testing.T, db database) {
		b := memory.New(memory.Config{})
		free := make(chan struct{})
		var runs atomic.Int64
		cfg := quick()
		cfg.HandlerTimeout, cfg.Grace, cfg.Concurrency = 50*time.Millisecond, 50*time.Millisecond, 1
		cfg.Backoff, cfg.MaxBackoff, cfg.Tries = time.Hour, time.Hour, 1
		r := db.start(t, b.Source("q"), cfg, func(_ context.Context, exec execFunc, m *consumer.Message) error {
			if err := effect(exec, m); err != nil {
				return err
			}
			if m.ID == "stuck" && runs.Add(1) == 1 {
				<-free
			}
			return nil
		})
		publish(t, b, msg("q", "stuck", "k", "x"), msg("q", "next", "", "x"))
		eventually(t, "health is red", func() bool { return r.Healthy() != nil })
		require.ErrorContains(t, r.Healthy(), "ignores its context")
		if db.name == "sqlite" {
			require.Zero(t, r.Stats().Processed)
			close(free)
			eventually(t, "the next one", func() bool { return r.Stats().Processed == 1 })
		} else {
			eventually(t, "the one worker goes on", func() bool { return r.Stats().Processed == 1 })
			require.Error(t, r.Healthy(), "the handler still runs")
			close(free)
		}
		eventually(t, "health is green", func() bool { return r.Healthy() == nil })
		require.NoError(t, r.stop())
		require.EqualValues(t, 1, r.Stats().Abandoned)
		require.Equal(t, 1, db.query(t, `SELECT count(*) FROM effects`), "only the next one's")
		require.Equal(t, 1, db.query(t, `SELECT count(*) FROM held_messages WHERE message_id = 'stuck' AND attempts = 1 AND last_error_class = 'timeout'`))
	})
}

func TestUndecodablePayloadIsDeadAtOnce(t *testing.T) {
	t.Parallel()
	onAll(t, func(t *testing.T, db database) {
		b := memory.New(memory.Config{})
		type body struct{ N int }
		h := consumer.JSON(func(context.Context, execFunc, consumer.Event[body]) error { return nil })
		r := db.start(t, b.Source("q"), quick(), func(ctx context.Context, exec func(string, ...any) error, m *consumer.Message) error {
			return h(ctx, exec, m)
		})
		tomb := msg("q", "tombstone", "", "")
		tomb.Payload = nil // tulios/kafkajs#185: a null value must not crash the decoder
		publish(t, b, msg("q", "good", "", `{"N":1}`), msg("q", "type", "", `{"N":"x"}`), msg("q", "empty", "", ""), tomb)
		eventually(t, "all", func() bool { s := r.Stats(); return s.Processed == 1 && s.Dead == 3 })
		require.NoError(t, r.stop())
		require.Equal(t, 3, db.query(t, `SELECT count(*) FROM held_messages WHERE dead AND attempts = 1 AND last_error_class = 'permanent' AND last_error LIKE 'decode payload%'`))
	})
}

// The first lost connections of a message count for nothing; one that loses it every
// time kills its backend, and must not do so for ever.
func TestMessageThatKillsItsBackendIsHeld(t *testing.T) {
	t.Parallel()
	for _, db := range []func(*testing.T) database{postgres, postgresDB} {
		db := db(t)
		t.Run(db.name, func(t *testing.T) {
			t.Parallel()
			b := memory.New(memory.Config{})
			var once atomic.Bool
			cfg := quick()
			cfg.Tries, cfg.MaxAttempts = 1, 2
			r := db.start(t, b.Source("q"), cfg, func(_ context.Context, exec execFunc, m *consumer.Message) error {
				if m.ID == "killer" || m.ID == "unlucky" && once.CompareAndSwap(false, true) {
					_ = exec(`SELECT pg_terminate_backend(pg_backend_pid())`)
					return errors.New("its own words, not to be judged by")
				}
				return effect(exec, m)
			})
			publish(t, b, msg("q", "killer", "k", "x"), msg("q", "unlucky", "", "x"), msg("q", "other", "", "x"))
			eventually(t, "all", func() bool { s := r.Stats(); return s.Processed == 2 && s.Dead == 1 })
			require.NoError(t, r.stop())
			require.Equal(t, 1, db.query(t, `SELECT count(*) FROM effects WHERE id = 'unlucky' AND n = 1`), "no attempt was counted")
			require.Equal(t, 1, db.query(t, `SELECT count(*) FROM held_messages WHERE message_id = 'killer' AND dead AND attempts = 2 AND last_error LIKE 'the database connection was lost in 3 runs in a row%'`))
		})
	}
}

func TestClaimThatWaitsTooLongIsTriedAgainAndNeverADuplicate(t *testing.T) {
	t.Parallel()
	onAll(t, func(t *testing.T, db database) {
		b := memory.New(memory.Config{})
		inside, leave := make(chan struct{}), make(chan struct{})
		var first sync.Once
		h := func(_ context.Context, exec func(string, ...any) error, m *consumer.Message) error {
			wait := false
			first.Do(func() { wait = true })
			if wait {
				close(inside)
				<-leave
				return errors.New("rolled back")
			}
			return effect(exec, m)
		}
		cfg := quick()
		cfg.ClaimTimeout, cfg.Order, cfg.Concurrency, cfg.Tries = 50*time.Millisecond, consumer.Unordered, 2, 1
		r := db.start(t, b.Source("q"), cfg, h)
		publish(t, b, msg("q", "1", "", "x"))
		<-inside
		publish(t, b, msg("q", "1", "", "x"))
		require.Never(t, func() bool { s := r.Stats(); return s.Duplicates+s.Processed+s.Failures > 0 }, 500*time.Millisecond, 20*time.Millisecond)
		close(leave)
		eventually(t, "one of the two ran", func() bool { return r.Stats().Processed == 1 })
		eventually(t, "both are settled", func() bool { return b.Len("q") == 0 })
		require.NoError(t, r.stop())
		require.Equal(t, 1, db.query(t, `SELECT count(*) FROM effects`))
		require.EqualValues(t, 1, r.Stats().Failures)
	})
}

// PostHog/posthog#100764, npgsql/npgsql#4409: deadlocks and serialization failures
// are nobody's fault, also when the handler hides the error.
func TestDeadlocksAndSerializationFailuresCountForNothing(t *testing.T) {
	t.Parallel()
	for _, level := range []string{"read committed", "repeatable read", "serializable"} {
		t.Run(level, func(t *testing.T) {
			t.Parallel()
			pool := devtest.PostgresPool(t, 20)
			direct := pool.Config()
			direct.ConnConfig.RuntimeParams["default_transaction_isolation"] = level
			direct.ConnConfig.RuntimeParams["deadlock_timeout"] = "20ms"
			isolated := newPool(t, direct)
			db := onPool(t, pool, isolated)
			db.do(t, `CREATE TABLE accounts (id text PRIMARY KEY, n int)`)
			db.do(t, `INSERT INTO accounts VALUES ('a', 0), ('b', 0)`)
			b := memory.New(memory.Config{})
			cfg := quick()
			cfg.MaxAttempts, cfg.Tries, cfg.Concurrency, cfg.HandlerTimeout = 1, 1, 8, time.Minute
			r := db.start(t, b.Source("q"), cfg, func(_ context.Context, exec execFunc, m *consumer.Message) error {
				from, to := "a", "b"
				if m.Payload[0] == '1' {
					from, to = to, from
				}
				err := exec(`UPDATE accounts SET n = n + 1 WHERE id = $1`, from)
				if err == nil {
					err = exec(`UPDATE accounts SET n = n - 1 WHERE id = $1`, to)
				}
				if err != nil {
					return fmt.Errorf("transfer failed: %v", err) // hidden on purpose
				}
				return nil
			})
			const n = 60
			for i := range n {
				publish(t, b, msg("q", fmt.Sprint(i), "", fmt.Sprint(i%2)))
			}
			require.Eventually(t, func() bool { s := r.Stats(); return s.Processed+s.Held == n }, 90*time.Second, 10*time.Millisecond)
			require.NoError(t, r.stop())
			t.Logf("%+v", r.Stats())
			require.EqualValues(t, n, r.Stats().Processed)
			require.Zero(t, r.Stats().Failures)
			require.Zero(t, db.query(t, `SELECT n FROM accounts WHERE id = 'a'`))
		})
	}
}

// erleans/pgo#131.
func TestSwallowedSQLErrorIsAFailedRunWithItsCause(t *testing.T) {
	t.Parallel()
	for _, db := range []func(*testing.T) database{postgres, postgresDB} {
		db := db(t)
		t.Run(db.name, func(t *testing.T) {
			t.Parallel()
			b := memory.New(memory.Config{})
			cfg := quick()
			cfg.MaxAttempts, cfg.Tries = 2, 1
			r := db.start(t, b.Source("q"), cfg, func(_ context.Context, exec execFunc, m *consumer.Message) error {
				_ = effect(exec, m)
				_ = exec(`INSERT INTO no_such_table VALUES (1)`)
				return nil
			})
			publish(t, b, msg("q", "1", "", "x"))
			eventually(t, "dead", func() bool { return r.Stats().Dead == 1 })
			require.NoError(t, r.stop())
			require.Zero(t, db.query(t, `SELECT count(*) FROM effects`))
			require.Equal(t, 1, db.query(t, `SELECT count(*) FROM held_messages WHERE attempts = 2 AND last_error LIKE '%aborted by an earlier ignored error%'`))
			if db.name == "postgres" {
				require.Equal(t, 1, db.query(t, `SELECT count(*) FROM held_messages WHERE last_error LIKE '%no_such_table%'`))
			}
		})
	}
}

func TestHandlerThatEndsItsTransactionIsNeverRunAgainByItself(t *testing.T) {
	t.Parallel()
	onAll(t, func(t *testing.T, db database) {
		b := memory.New(memory.Config{})
		var runs sync.Map
		cfg := quick()
		cfg.Tries, cfg.Backoff, cfg.MaxBackoff = 1, time.Hour, time.Hour
		r := db.start(t, b.Source("q"), cfg, func(_ context.Context, exec execFunc, m *consumer.Message) error {
			n, _ := runs.LoadOrStore(m.ID, new(atomic.Int64))
			n.(*atomic.Int64).Add(1)
			if err := effect(exec, m); err != nil {
				return err
			}
			how := "COMMIT"
			if strings.HasPrefix(m.ID, "rollback") {
				how = "ROLLBACK"
			}
			if err := exec(how); err != nil {
				return err
			}
			if strings.HasSuffix(m.ID, "error") {
				return errors.New("and failed")
			}
			return nil
		})
		ids := []string{"commit", "commit+error", "rollback", "rollback+error"}
		for _, id := range ids {
			publish(t, b, msg("q", id, "", "x"))
		}
		eventually(t, "all settled", func() bool { return b.Len("q") == 0 })
		require.NoError(t, r.stop())
		for _, id := range ids {
			n, _ := runs.Load(id)
			require.EqualValues(t, 1, n.(*atomic.Int64).Load(), "%s ran again", id)
		}
		require.Equal(t, 1, db.query(t, `SELECT count(*) FROM processed_messages WHERE message_id = 'commit' AND state = 0`), "claim and work are there: done")
		require.Equal(t, 2, db.query(t, `SELECT count(*) FROM effects`), "the two that committed")
		require.Equal(t, 1, db.query(t, `SELECT count(*) FROM held_messages WHERE message_id = 'rollback' AND dead AND reason = 'tx-ended'`), "the claim is missing and the handler was content")
		require.Equal(t, 1, db.query(t, `SELECT count(*) FROM held_messages WHERE message_id = 'rollback+error' AND NOT dead AND attempts = 1`), "an ordinary failed run")
		require.Zero(t, db.query(t, `SELECT count(*) FROM held_messages WHERE message_id = 'commit+error'`), "done is done")
	})
}

// jackc/pgx#2110: also on the last attempt the answer decides nothing; the claim does.
func TestUnknownCommitIsResolvedByClaimingAgain(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]pgproxy.Fault{"done": pgproxy.LoseAnswer, "never arrived": pgproxy.LoseCommit} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := devtest.PostgresPool(t, 20)
			proxied, proxy := pgproxy.Between(t, pool)
			db := onPool(t, pool, proxied)
			b := memory.New(memory.Config{})
			cfg := quick()
			cfg.MaxAttempts, cfg.Tries, cfg.HandlerTimeout, cfg.ClaimTimeout = 1, 1, time.Second, 500*time.Millisecond
			var runs atomic.Int64
			r := db.start(t, b.Source("q"), cfg, func(_ context.Context, exec execFunc, m *consumer.Message) error {
				if runs.Add(1) == 1 {
					proxy.ArmMarked(fault)
					if err := exec(pgproxy.Marker); err != nil {
						return err
					}
				}
				return effect(exec, m)
			})
			publish(t, b, msg("q", "1", "k", "x"), msg("q", "2", "k", "x"))
			eventually(t, "settled", func() bool { return b.Len("q") == 0 && db.query(t, `SELECT count(*) FROM effects`) == 2 })
			require.NoError(t, r.stop())
			require.Equal(t, 1, proxy.Hits())
			require.Zero(t, r.Stats().Failures)
			require.Zero(t, r.Stats().Held)
			require.Equal(t, 2, db.query(t, `SELECT count(DISTINCT id) FROM effects`))
			want := map[string]int64{"done": 2, "never arrived": 3}[name]
			require.Equal(t, want, runs.Load())
		})
	}
}

// The commit of a hold may be lost as well; nothing is held twice or not at all.
func TestUnknownCommitOfAHold(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]pgproxy.Fault{"done": pgproxy.LoseAnswer, "never arrived": pgproxy.LoseCommit} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := devtest.PostgresPool(t, 20)
			proxied, proxy := pgproxy.Between(t, pool)
			db := onPool(t, pool, proxied)
			b := memory.New(memory.Config{})
			cfg := quick()
			cfg.Tries, cfg.HandlerTimeout, cfg.ClaimTimeout = 1, time.Second, 500*time.Millisecond
			var runs atomic.Int64
			r := db.start(t, b.Source("q"), cfg, func(_ context.Context, exec execFunc, m *consumer.Message) error {
				if runs.Add(1) == 1 {
					proxy.ArmMarked(fault) // the hold carries the payload, and so the marker
					return consumer.Permanent(errors.New("no"))
				}
				return effect(exec, m)
			})
			publish(t, b, msg("q", "1", "", pgproxy.Marker))
			eventually(t, "settled", func() bool { return b.Len("q") == 0 })
			require.NoError(t, r.stop())
			require.Equal(t, 1, proxy.Hits())
			require.Equal(t, 1, db.query(t, `SELECT count(*) FROM held_messages WHERE dead AND attempts = 1`))
			require.EqualValues(t, 1, runs.Load())
		})
	}
}

// jackc/pgx#787: what fails at the commit is a failed run, and the connection is good
// for the next one.
func TestConstraintThatFailsAtTheCommitIsAFailedRun(t *testing.T) {
	t.Parallel()
	db := postgres(t)
	db.do(t, `CREATE TABLE parents (id text PRIMARY KEY)`)
	db.do(t, `CREATE TABLE children (parent text REFERENCES parents DEFERRABLE INITIALLY DEFERRED)`)
	b := memory.New(memory.Config{})
	cfg := quick()
	cfg.Tries, cfg.MaxAttempts = 1, 2
	r := db.start(t, b.Source("q"), cfg, func(_ context.Context, exec execFunc, m *consumer.Message) error {
		if m.ID == "bad" {
			return exec(`INSERT INTO children VALUES ('nobody')`)
		}
		return effect(exec, m)
	})
	publish(t, b, msg("q", "bad", "", "x"))
	eventually(t, "dead", func() bool { return r.Stats().Dead == 1 })
	publish(t, b, msg("q", "good", "", "x"))
	eventually(t, "processed", func() bool { return r.Stats().Processed == 1 })
	require.NoError(t, r.stop())
	require.Equal(t, 1, db.query(t, `SELECT count(*) FROM held_messages WHERE attempts = 2 AND last_error LIKE '%23503%'`))
}

func TestOwnershipLostWhileHandling(t *testing.T) {
	t.Parallel()
	for _, commits := range []bool{true, false} {
		t.Run(fmt.Sprint("commits ", commits), func(t *testing.T) {
			onAll(t, func(t *testing.T, db database) {
				b := memory.New(memory.Config{})
				b.Channel("c", memory.ChannelConfig{Quorum: true})
				src := b.Source("c")
				inside := make(chan struct{})
				var cause atomic.Value
				var once sync.Once
				r := db.start(t, src, quick(), func(ctx context.Context, exec func(string, ...any) error, m *consumer.Message) error {
					if err := effect(exec, m); err != nil {
						return err
					}
					lost := false
					once.Do(func() {
						close(inside)
						<-ctx.Done()
						cause.Store(context.Cause(ctx))
						lost = true
					})
					if lost && !commits {
						return context.Cause(ctx)
					}
					return nil
				})
				publish(t, b, msg("c", "1", "k", "x"))
				<-inside
				b.Disconnect(src, errors.New("connection reset"), 0)
				eventually(t, "the redelivery is settled", func() bool { return b.Len("c") == 0 })
				require.NoError(t, r.stop())
				require.ErrorIs(t, cause.Load().(error), brokers.ErrOwnershipLost)
				require.Equal(t, 1, db.query(t, `SELECT count(*) FROM effects`))
				s := r.Stats()
				require.Zero(t, s.Held+s.Failures, "neither held nor counted")
				require.EqualValues(t, map[bool]int64{true: 1, false: 0}[commits], s.Duplicates)
			})
		})
	}
}

// openmeterio/openmeter#3141, dapr/components-contrib#4449: a shutdown must not look
// like a failed handler.
func TestShutdownCountsNoAttempt(t *testing.T) {
	t.Parallel()
	onAll(t, func(t *testing.T, db database) {
		b := memory.New(memory.Config{})
		inside := make(chan struct{}, 10)
		cfg := quick()
		cfg.MaxAttempts, cfg.DrainTimeout = 1, 10*time.Millisecond
		r := db.start(t, b.Source("q"), cfg, func(ctx context.Context, exec execFunc, m *consumer.Message) error {
			if err := effect(exec, m); err != nil {
				return err
			}
			inside <- struct{}{}
			<-ctx.Done()
			return ctx.Err() // an error like any other
		})
		for i := range 5 {
			publish(t, b, msg("q", fmt.Sprint(i), "", "x"))
		}
		<-inside
		require.NoError(t, r.stop())
		s := r.Stats()
		require.Zero(t, s.Failures+s.Held+s.Processed)
		require.Zero(t, db.query(t, `SELECT count(*) FROM effects`)+db.query(t, `SELECT count(*) FROM held_messages`)+db.query(t, `SELECT count(*) FROM processed_messages`))
		require.Equal(t, 5, b.Len("q"))
	})
}

// segmentio/kafka-go#1259, wework/grabbit PR#82: a failed ack is not a failed handler.
func TestSettleThatFailsIsTriedAgainOrAbsorbed(t *testing.T) {
	t.Parallel()
	onAll(t, func(t *testing.T, db database) {
		b := memory.New(memory.Config{})
		b.Channel("c", memory.ChannelConfig{Quorum: true})
		b.Inject(memory.Select{ID: "again", Times: 2}, memory.FailSettle(errors.New("i/o timeout"), false))
		b.Inject(memory.Select{ID: "lost"}, memory.DropSettle(nil))
		src := b.Source("c")
		r := db.start(t, src, quick(), func(_ context.Context, exec execFunc, m *consumer.Message) error { return effect(exec, m) })
		publish(t, b, msg("c", "again", "", "x"), msg("c", "lost", "", "x"))
		eventually(t, "both processed, one left", func() bool { return r.Stats().Processed == 2 && b.Len("c") == 1 })
		b.Disconnect(src, errors.New("reset"), 0)
		eventually(t, "the redelivery is a duplicate", func() bool { return r.Stats().Duplicates == 1 && b.Len("c") == 0 })
		require.NoError(t, r.stop())
		require.Equal(t, 2, db.query(t, `SELECT count(*) FROM effects`))
		require.Zero(t, r.Stats().Failures+r.Stats().Held)
	})
}

func TestHeldMessageWhoseRunsDieIsNotRunForEver(t *testing.T) {
	t.Parallel()
	onAll(t, func(t *testing.T, db database) {
		b := memory.New(memory.Config{})
		cfg := quick()
		cfg.Tries, cfg.MaxAttempts = 1, 1000
		var runs atomic.Int64
		h := func(_ context.Context, exec func(string, ...any) error, m *consumer.Message) error {
			runs.Add(1)
			return errors.New("no")
		}
		cfg.Backoff, cfg.MaxBackoff = time.Hour, time.Hour
		r := db.start(t, b.Source("q"), cfg, h)
		publish(t, b, msg("q", "1", "k", "x"))
		eventually(t, "held", func() bool { return r.Stats().Held == 1 })
		require.NoError(t, r.stop())
		// Three runs that began and left no outcome.
		db.do(t, `UPDATE held_messages SET starts = attempts + 3, due_at = held_at`)
		before := runs.Load()
		r = db.start(t, b.Source("q"), cfg, h)
		eventually(t, "dead", func() bool { return r.Stats().Dead == 1 })
		require.NoError(t, r.stop())
		require.Equal(t, before, runs.Load(), "not run")
		require.Equal(t, 1, db.query(t, `SELECT count(*) FROM held_messages WHERE dead AND reason = 'crash-loop'`))
	})
}

func TestConflictsAreHeldOrIgnored(t *testing.T) {
	t.Parallel()
	for _, ignore := range []bool{false, true} {
		t.Run(fmt.Sprint("ignore ", ignore), func(t *testing.T) {
			onAll(t, func(t *testing.T, db database) {
				b := memory.New(memory.Config{})
				cfg := quick()
				var asked atomic.Int64
				if ignore {
					cfg.OnConflict = func(m *consumer.Message) consumer.Conflict { asked.Add(1); return consumer.IgnoreConflicts(m) }
				}
				r := db.start(t, b.Source("q"), cfg, func(_ context.Context, exec execFunc, m *consumer.Message) error { return effect(exec, m) })
				publish(t, b, msg("q", "1", "k", "a"))
				eventually(t, "first", func() bool { return r.Stats().Processed == 1 })
				publish(t, b, msg("q", "1", "k", "b"))
				eventually(t, "settled", func() bool { return b.Len("q") == 0 && r.Stats().Conflicts == 1 })
				require.NoError(t, r.stop())
				held := map[bool]int{false: 1, true: 0}[ignore]
				require.Equal(t, held, db.query(t, `SELECT count(*) FROM held_messages WHERE reason = 'conflict' AND dead`))
				require.EqualValues(t, 1-held, asked.Load())
				require.Equal(t, 1, db.query(t, `SELECT count(*) FROM effects`))
			})
		})
	}
}

// NikolayS/PgQue#136, the other end: a type that nobody ever learns.
func TestUnknownTypeIsDeadInTheEnd(t *testing.T) {
	t.Parallel()
	onAll(t, func(t *testing.T, db database) {
		b := memory.New(memory.Config{})
		cfg := quick()
		cfg.UnknownTypeFor = 100 * time.Millisecond
		var x consumer.Mux[execFunc]
		x.Handle("known", func(context.Context, execFunc, *consumer.Message) error { return nil })
		r := db.start(t, b.Source("q"), cfg, func(ctx context.Context, exec func(string, ...any) error, m *consumer.Message) error {
			return x.Serve(ctx, exec, m)
		})
		publish(t, b, msg("q", "1", "k", "x"))
		eventually(t, "dead", func() bool { return r.Stats().Dead == 1 })
		require.NoError(t, r.stop())
		require.Equal(t, 1, db.query(t, `SELECT count(*) FROM held_messages WHERE dead AND reason = 'unknown-type' AND attempts = 0`))
	})
}
