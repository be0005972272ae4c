package outbox

// The statements of the relay. $1 is always the relay where there is one.

const (
	sqlHeartbeat = `INSERT INTO {s}outbox_relays (id, seen_at, until) VALUES ($1, {now}, {after:$2}) ON CONFLICT (id) DO UPDATE SET seen_at = {now}, until = {after:$2}`
	// Each relay by its own lease: they need not be configured alike.
	sqlForget = `DELETE FROM {s}outbox_relays WHERE until <= {now}`
	sqlLive   = `SELECT count(*) FROM {s}outbox_relays`
	// A lease that is over and that nobody took is renewed like any other: the token
	// is the same, so nobody has published its rows in between.
	sqlRenew      = `UPDATE {s}outbox_shares SET until = {after:$2} WHERE owner = $1 RETURNING share, token`
	sqlTakeShares = `WITH f AS MATERIALIZED (SELECT share FROM {s}outbox_shares WHERE until <= {now} ORDER BY share LIMIT $3 {skip})
		UPDATE {s}outbox_shares SET owner = $1, token = token + 1, until = {after:$2} WHERE share IN (SELECT share FROM f) RETURNING share, token`
	sqlGiveShares = `WITH f AS MATERIALIZED (SELECT share FROM {s}outbox_shares WHERE owner = $1 ORDER BY share DESC LIMIT $2)
		UPDATE {s}outbox_shares SET owner = NULL, until = {now} WHERE share IN (SELECT share FROM f) AND owner = $1 RETURNING share`
	sqlLeave      = `UPDATE {s}outbox_shares SET owner = NULL, until = {now} WHERE owner = $1`
	sqlLeaveRelay = `DELETE FROM {s}outbox_relays WHERE id = $1`
	sqlCleanup    = `DELETE FROM {s}outbox_messages WHERE seq IN (SELECT seq FROM {s}outbox_messages
		WHERE published_at IS NOT NULL AND {age:published_at} > {int:$1} LIMIT $2)`
	sqlProbe = `SELECT m.seq, s.token, r.until FROM {s}outbox_messages m, {s}outbox_shares s, {s}outbox_relays r WHERE 1 = 0`
)

const cleanupBatch = 1000

// ints is a list of integers that came as one parameter.
func ints(param string) string {
	return `(SELECT {pg:unnest(` + param + `::text::bigint[])}{lite:value FROM json_each(` + param + `)})`
}

var (
	sqlFetch           = fetchSQL(`parked OR next_at > {began}`)
	sqlFetchSkipParked = fetchSQL(`NOT parked AND next_at > {began}`)
)

// sqlWalk comes before a fetch in its transaction. A table that was empty a minute
// ago has no statistics, and without them PostgreSQL sorts the whole backlog (0.8 s
// a fetch with 1,000,000 rows) rather than walk its index (1 ms). JIT would take
// longer than the fetch.
const sqlWalk = `SELECT set_config('enable_sort', 'off', true), set_config('jit', 'off', true)`

const fetched = `seq, share, attempts, message_id, topic, message_key, type, content_type, produced_at, headers, payload`

// fetchSQL reads from the lowest seq each time, never from where the last one
// ended: a transaction that drew a lower number may commit later, and its message
// comes first in its key. The conditions are subqueries (not joins), so that the
// plan is a walk along the backlog index that ends at LIMIT. The running sum bounds
// the bytes of one batch before any payload is read: PostgreSQL passes payloads on
// as references, SQLite would copy them and joins the rows once more instead.
//
// A row that waits for another try is judged twice, as a row and as what blocks its
// key, and both must be by one clock: a row whose time came in between would neither
// be read nor block, and the next of its key would overtake it.
func fetchSQL(blocks string) string {
	const sized = `, sum(size) OVER (ORDER BY seq ROWS UNBOUNDED PRECEDING) - size AS before FROM (SELECT `
	return `SELECT {pg:w.seq, share}{lite:m.seq, m.share}, attempts, message_id, topic, message_key, type, content_type, produced_at, headers, payload, payload IS NULL
		FROM (SELECT {pg:` + fetched + `}{lite:seq}` + sized + `{pg:` + fetched + `}{lite:seq}, coalesce(octet_length(payload), 0) AS size FROM {s}outbox_messages
			WHERE published_at IS NULL AND NOT parked AND (next_at IS NULL OR next_at <= {began})
			AND (message_key IS NULL OR message_key NOT IN (SELECT message_key FROM {s}outbox_messages
				WHERE (parked OR next_at IS NOT NULL) AND published_at IS NULL AND message_key IS NOT NULL AND (` + blocks + `)))
			AND (share IN (SELECT share FROM {s}outbox_shares WHERE owner = $1)) IS TRUE
			AND seq NOT IN ` + ints("$3") + `
			ORDER BY seq LIMIT $2) AS found) AS w {lite:JOIN outbox_messages m ON m.seq = w.seq}
		WHERE w.before < {int:$4} ORDER BY w.seq`
}

// owned: the relay has the row's share, under the token that it read the row
// under. A relay that lost a share and has it again marks nothing that it read
// before. (The lease may be over by now; as long as nobody took the share nobody
// else published the row.)
var owned = ` AND (share IN (SELECT share FROM {s}outbox_shares WHERE owner = $1 AND token * 256 + share IN ` + ints("$3") + `)) IS TRUE`

var (
	sqlDelete = `DELETE FROM {s}outbox_messages WHERE seq IN ` + ints("$2") + owned
	sqlMark   = `UPDATE {s}outbox_messages SET published_at = {now}, next_at = NULL, parked = {pg:false}{lite:0} WHERE seq IN ` + ints("$2") + owned
	sqlAgain  = `UPDATE {s}outbox_messages SET next_at = {now} WHERE NOT parked AND next_at > {now} AND seq IN ` + ints("$2") + owned
	sqlFailed = `UPDATE {s}outbox_messages SET attempts = f.attempts, next_at = {after:f.delay}, parked = {pg:f.parked = 1}{lite:f.parked}, last_error = f.why
		FROM ({pg:SELECT * FROM json_to_recordset($2::text::json) AS j(seq bigint, attempts integer, delay bigint, parked integer, why text)}` +
		`{lite:SELECT value ->> 'seq' AS seq, value ->> 'attempts' AS attempts, value ->> 'delay' AS delay, value ->> 'parked' AS parked, value ->> 'why' AS why FROM json_each($2)}) AS f
		WHERE outbox_messages.seq = f.seq` + owned
)

// sqlLeft counts what is not published, by what keeps it.
const sqlLeft = `SELECT count(*),
		coalesce(sum(CASE WHEN parked THEN 1 ELSE 0 END), 0),
		coalesce(sum(CASE WHEN NOT parked AND next_at > {now} THEN 1 ELSE 0 END), 0),
		coalesce(sum(CASE WHEN NOT parked AND (next_at IS NULL OR next_at <= {now}) AND (share IN (SELECT share FROM {s}outbox_shares WHERE owner = $1)) IS NOT TRUE THEN 1 ELSE 0 END), 0)
	FROM {s}outbox_messages WHERE published_at IS NULL`

// sqlLeftFirst names the first of those that block: parked, or waiting for another try.
const sqlLeftFirst = `SELECT message_id, parked, coalesce(last_error, '') FROM {s}outbox_messages
	WHERE (parked OR next_at IS NOT NULL) AND published_at IS NULL AND (parked OR next_at > {now}) ORDER BY seq LIMIT 5`
