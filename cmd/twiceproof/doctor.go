package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/twiceproof/twiceproof/internal/sqldb"
	"github.com/twiceproof/twiceproof/migrations"
)

// Levels of a finding.
const (
	levelOK   = "OK"
	levelWarn = "WARN"
	levelFail = "FAIL"
)

// finding is one line of the doctor's.
type finding struct {
	Level string `json:"level"`
	What  string `json:"what"`
	Found string `json:"found"`
	Do    string `json:"do,omitempty"`
}

var errUnwell = errors.New("something needs a person: see the lines that say FAIL")

func newDoctorCommand() *cobra.Command {
	var f databaseFlags
	var asJSON bool
	c := &cobra.Command{
		Use:   "doctor",
		Short: "Look at the database's settings, tables and transactions, and say what to do",
		Long: `Each line is OK, WARN or FAIL, and says what to do. The exit code is 1 if one says FAIL.
It reads only.`,
		Example: "  twiceproof doctor --database-url postgres://localhost/app\n  twiceproof doctor --json",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx := cmd.Context()
			db, d, err := f.open(ctx)
			if err != nil {
				return err
			}
			defer db.Close()
			fs, err := examine(ctx, db, d, f)
			if err != nil {
				return err
			}
			if err := printFindings(cmd.OutOrStdout(), fs, asJSON); err != nil {
				return err
			}
			for _, x := range fs {
				if x.Level == levelFail {
					return errUnwell
				}
			}
			return nil
		},
	}
	f.add(c)
	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON array")
	return c
}

func printFindings(out io.Writer, fs []finding, asJSON bool) error {
	if asJSON {
		return json.NewEncoder(out).Encode(fs)
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for _, x := range fs {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", x.Level, x.What, x.Found, x.Do)
	}
	return w.Flush()
}

// doctor collects findings.
type doctor struct {
	q      sqldb.Q
	d      sqldb.Dialect
	schema string
	fs     []finding
}

func (x *doctor) add(level, what, found, do string) {
	if level == levelOK {
		do = ""
	}
	x.fs = append(x.fs, finding{level, what, found, do})
}

// one reads the only row of a query.
func (x *doctor) one(ctx context.Context, q string, dest ...any) error {
	_, err := sqldb.QueryRow(ctx, x.q, x.d.SQL(q, x.schema), nil, dest...)
	return err
}

func examine(ctx context.Context, db *sql.DB, d sqldb.Dialect, f databaseFlags) ([]finding, error) {
	x := &doctor{q: sqldb.SQL(db), d: d, schema: f.schema}
	var missing *migrations.MissingError
	switch err := migrations.Check(ctx, migrations.SQLDB(db, d), f.options()...); {
	case errors.As(err, &missing):
		x.add(levelFail, "tables", missing.Error(), "twiceproof migrate up")
		return x.fs, nil
	case err != nil:
		return nil, err
	}
	x.add(levelOK, "tables", "all there", "")
	steps := []func(context.Context) error{x.inbox, x.held, x.outbox, x.retention}
	if d == sqldb.Postgres {
		steps = append(steps, x.durability, x.connections, x.holders, x.bloat)
	} else {
		steps = append(steps, x.sqlite)
	}
	for _, step := range steps {
		if err := step(ctx); err != nil {
			return x.fs, fmt.Errorf("read the database: %w", err)
		}
	}
	return x.fs, nil
}

func level(warn, fail bool) string {
	switch {
	case fail:
		return levelFail
	case warn:
		return levelWarn
	}
	return levelOK
}

func micros(us int64) time.Duration {
	return (time.Duration(us) * time.Microsecond).Round(time.Second)
}

func (x *doctor) inbox(ctx context.Context) error {
	var n, bytes int64
	q := `SELECT count(*), 0 FROM {s}processed_messages`
	if x.d == sqldb.Postgres { // an estimate: counting a large inbox takes long
		q = `SELECT greatest(reltuples, 0)::bigint, pg_total_relation_size(oid) FROM pg_class WHERE oid = '{s}processed_messages'::regclass`
	}
	if err := x.one(ctx, q, &n, &bytes); err != nil {
		return err
	}
	x.add(levelOK, "inbox", fmt.Sprintf("about %d claims, %d MiB", n, bytes>>20), "")
	return nil
}

// stuckFor is how long the first message of a key may lack a time to run: runners repair
// that within seconds.
const stuckFor = time.Minute

func (x *doctor) held(ctx context.Context) error {
	var total, dead, stuck, oldest, due int64
	err := x.one(ctx, `SELECT count(*), count(CASE WHEN dead THEN 1 END), coalesce(max({age:held_at}), 0),
		coalesce(max(CASE WHEN due_at <= {now} THEN {age:due_at} END), 0) FROM {s}held_messages`, &total, &dead, &oldest, &due)
	if err != nil {
		return err
	}
	x.add(level(dead > 0, false), "held", fmt.Sprintf("%d, of which %d dead; the oldest for %s", total, dead, micros(oldest)), "twiceproof held list --groups")
	x.add(level(micros(due) > time.Minute, micros(due) > time.Hour), "due", fmt.Sprintf("the first has been due for %s", micros(due)),
		"no consumer of that name is running, or its workers are busy: look at its health")
	err = x.one(ctx, fmt.Sprintf(`SELECT count(*) FROM {s}held_messages h WHERE h.order_key IS NOT NULL AND NOT h.dead AND h.due_at IS NULL AND {age:h.updated_at} > %d
		AND NOT EXISTS (SELECT 1 FROM {s}held_messages e WHERE e.consumer_id = h.consumer_id AND e.order_key = h.order_key AND e.position < h.position)`, stuckFor.Microseconds()), &stuck)
	if err != nil {
		return err
	}
	x.add(level(stuck > 0, false), "turns", fmt.Sprintf("%d first messages of a key without a time to run", stuck), "start a consumer of that name: it repairs them every few seconds")
	return nil
}

func (x *doctor) outbox(ctx context.Context) error {
	var waiting, oldest, parked, relays int64
	if err := x.one(ctx, sqlOutbox, &waiting, &oldest, &parked, &relays); err != nil {
		return err
	}
	x.add(level(micros(oldest) > time.Minute, waiting > 0 && relays == 0 && micros(oldest) > time.Minute), "outbox",
		fmt.Sprintf("%d waiting, the first for %s; %d relays alive", waiting, micros(oldest), relays), "start a relay, or look at why the broker takes nothing")
	x.add(level(parked > 0, false), "parked", fmt.Sprintf("%d", parked), "twiceproof outbox list")
	return nil
}

func (x *doctor) retention(ctx context.Context) error {
	return x.q.Query(ctx, x.d.SQL(`SELECT c.name, coalesce(r.window_us, 0), r.caught_up_at IS NOT NULL, coalesce({age:r.cleaned_at}, -1), {age:r.since}
		FROM {s}inbox_retention r JOIN {s}inbox_consumers c ON c.id = r.consumer_id ORDER BY c.name`, x.schema), nil, func(scan func(...any) error) error {
		var name string
		var window, cleaned, since int64
		var caughtUp bool
		if err := scan(&name, &window, &caughtUp, &cleaned, &since); err != nil {
			return err
		}
		found := fmt.Sprintf("window %s, never cleaned", micros(window))
		if cleaned >= 0 {
			found = fmt.Sprintf("window %s, cleaned %s ago", micros(window), micros(cleaned))
		}
		what := "retention of " + name
		switch {
		case !caughtUp && since < window:
			x.add(levelWarn, what, found+"; it has not caught up with its broker yet", "nothing is deleted before; if its lag is 0, wait for its next look")
		case cleaned < 0 && since > window+micros2(time.Hour), cleaned > max(window, micros2(6*time.Hour)):
			x.add(levelWarn, what, found, "no consumer of that name is running, or its cleanup fails: see its log")
		default:
			x.add(levelOK, what, found, "")
		}
		return nil
	})
}

func micros2(d time.Duration) int64 { return d.Microseconds() }

func (x *doctor) durability(ctx context.Context) error {
	var sc, fsync, fullPages string
	if err := x.one(ctx, `SELECT current_setting('synchronous_commit'), current_setting('fsync'), current_setting('full_page_writes')`, &sc, &fsync, &fullPages); err != nil {
		return err
	}
	x.add(level(sc != "on" && sc != "remote_apply", false), "synchronous_commit", sc, "consumers raise it to on for their transactions; set it so that producers' outbox rows are as safe")
	x.add(level(false, fsync == "off" || fullPages == "off"), "fsync, full_page_writes", fsync+", "+fullPages, "turn both on: a crash of the machine loses or damages what was confirmed")
	return nil
}

func (x *doctor) connections(ctx context.Context) error {
	var limit, used int64
	if err := x.one(ctx, `SELECT current_setting('max_connections')::bigint - current_setting('superuser_reserved_connections')::bigint, (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend')`, &limit, &used); err != nil {
		return err
	}
	x.add(level(used*10 >= limit*8, used >= limit), "connections", fmt.Sprintf("%d of %d", used, limit), "each runner takes Concurrency + 2: lower Concurrency or the pools, or raise max_connections")
	return nil
}

// holders are what keeps vacuum from removing what cleanup has deleted.
func (x *doctor) holders(ctx context.Context) error {
	var oldest, idle, prepared, slots int64
	err := x.one(ctx, `SELECT coalesce(max(extract(epoch FROM clock_timestamp() - xact_start) * 1000000), 0)::bigint,
		coalesce(max(CASE WHEN state LIKE 'idle in transaction%' THEN extract(epoch FROM clock_timestamp() - state_change) * 1000000 END), 0)::bigint,
		(SELECT count(*) FROM pg_prepared_xacts),
		(SELECT count(*) FROM pg_replication_slots WHERE NOT active)
		FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()`, &oldest, &idle, &prepared, &slots)
	if err != nil {
		return err
	}
	x.add(level(micros(oldest) > 10*time.Minute, false), "long transactions", "the oldest for "+micros(oldest).String(), "they keep vacuum from removing deleted rows: find them in pg_stat_activity")
	x.add(level(micros(idle) > time.Minute, false), "idle in transaction", "the longest for "+micros(idle).String(), "a client holds its locks and does nothing: set idle_in_transaction_session_timeout, or mend it")
	x.add(level(prepared > 0, false), "prepared transactions", fmt.Sprintf("%d", prepared), "COMMIT PREPARED or ROLLBACK PREPARED what nobody finishes: see pg_prepared_xacts")
	x.add(level(slots > 0, false), "inactive replication slots", fmt.Sprintf("%d", slots), "they keep WAL and deleted rows: drop those that nobody uses")
	return nil
}

func (x *doctor) bloat(ctx context.Context) error {
	return x.q.Query(ctx, x.d.SQL(`SELECT t.name, coalesce(s.n_live_tup, 0), coalesce(s.n_dead_tup, 0), pg_total_relation_size(t.oid)
		FROM (VALUES ('{s}processed_messages'::regclass::oid, 'processed_messages'), ('{s}held_messages'::regclass::oid, 'held_messages'), ('{s}outbox_messages'::regclass::oid, 'outbox_messages')) t (oid, name)
		LEFT JOIN pg_stat_all_tables s ON s.relid = t.oid`, x.schema), nil, func(scan func(...any) error) error {
		var name string
		var live, dead, bytes int64
		if err := scan(&name, &live, &dead, &bytes); err != nil {
			return err
		}
		bad := dead > 10_000 && dead > live
		x.add(level(bad, false), "rows of "+name, fmt.Sprintf("%d live, %d dead, %d MiB", live, dead, bytes>>20), "vacuum does not keep up: see what holds it back above, or VACUUM "+name)
		return nil
	})
}

func (x *doctor) sqlite(ctx context.Context) error {
	var mode string
	var sync int64
	if err := x.one(ctx, `SELECT (SELECT journal_mode FROM pragma_journal_mode), (SELECT synchronous FROM pragma_synchronous)`, &mode, &sync); err != nil {
		return err
	}
	x.add(level(mode != "wal", false), "journal_mode", mode, "PRAGMA journal_mode = WAL: readers do not wait for the writer")
	x.add(level(sync < 2, sync == 0), "synchronous, as this command opens it", fmt.Sprintf("%d", sync), "open it with synchronous FULL: what was confirmed can be lost otherwise")
	return nil
}
