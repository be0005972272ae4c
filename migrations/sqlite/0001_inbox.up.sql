-- +goose Up

-- Times are microseconds since 1970 (UTC), written by the program: SQLite has no
-- clock of its own that a transaction could trust.

CREATE TABLE IF NOT EXISTS inbox_consumers (
	id         INTEGER PRIMARY KEY,
	name       TEXT    NOT NULL UNIQUE,
	created_at INTEGER NOT NULL DEFAULT 0
);

-- One row for each message that a consumer has dealt with. The row is inserted by
-- the transaction that does the work: it is the proof that the work was done.
CREATE TABLE IF NOT EXISTS processed_messages (
	processed_at INTEGER NOT NULL,
	consumer_id  INTEGER NOT NULL,
	state        INTEGER NOT NULL DEFAULT 0 CHECK (state IN (0, 1, 2)), -- 0 done, 1 held, 2 discarded
	message_id   TEXT    NOT NULL,
	fp           BLOB,   -- 128 bits over type and payload; NULL never conflicts
	reason       TEXT,   -- why it was discarded
	PRIMARY KEY (consumer_id, message_id)
) WITHOUT ROWID;

-- Messages taken off the broker and kept here: to be retried, dead, or waiting
-- behind one of the same key.
CREATE TABLE IF NOT EXISTS held_messages (
	seq          INTEGER PRIMARY KEY AUTOINCREMENT,
	position     INTEGER NOT NULL DEFAULT 0, -- place in its key; an edited message takes over the old one's
	consumer_id  INTEGER NOT NULL,
	kind         INTEGER NOT NULL DEFAULT 0 CHECK (kind IN (0, 1, 2)), -- 0 ordinary, 1 conflict, 2 without a usable id
	dead         INTEGER NOT NULL DEFAULT 0,
	due_at       INTEGER, -- set only on the message that may run next: the head of its key
	attempts     INTEGER NOT NULL DEFAULT 0, -- failed runs
	starts       INTEGER NOT NULL DEFAULT 0, -- runs begun; the fence of a retry. starts - attempts = runs that died
	tx_mark      TEXT,    -- set while a retry runs; committed only by a handler that ended the transaction itself
	reason       TEXT    NOT NULL, -- retry, behind, dead, conflict, no-id, bad-id, unknown-type, tx-ended, crash-loop
	message_id   TEXT,
	raw_id       BLOB,    -- the id as it came, where message_id cannot hold it
	fp           BLOB,
	first_fp     BLOB,    -- of a conflict: the fingerprint that was processed first
	order_key    BLOB,    -- messages of one order_key run in order; NULL blocks nothing and waits for nothing
	coordinates  TEXT    NOT NULL DEFAULT '',
	topic        BLOB    NOT NULL,
	message_key  BLOB,
	type         BLOB    NOT NULL,
	content_type BLOB    NOT NULL,
	produced_at  TEXT,    -- RFC 3339 with nanoseconds, as the producer said it
	headers      BLOB,
	payload      BLOB,
	held_at      INTEGER NOT NULL DEFAULT 0,
	updated_at   INTEGER NOT NULL DEFAULT 0,
	first_error_class TEXT,
	first_error  TEXT,
	last_error_class  TEXT,
	last_error   TEXT,
	last_stack   TEXT,
	edited_from  TEXT     -- the id of the message that this one replaces
);

-- An ordinary message is held once; a conflict once for each content; a message
-- without an id once for each place on the broker.
CREATE UNIQUE INDEX IF NOT EXISTS held_messages_id ON held_messages (consumer_id, message_id) WHERE kind = 0;
CREATE UNIQUE INDEX IF NOT EXISTS held_messages_conflict ON held_messages (consumer_id, message_id, fp) WHERE kind = 1;
CREATE UNIQUE INDEX IF NOT EXISTS held_messages_no_id ON held_messages (consumer_id, coordinates, fp) WHERE kind = 2 AND coordinates <> '';
-- Is anything of this key held, and which is its first? Asked by every claim.
CREATE INDEX IF NOT EXISTS held_messages_key ON held_messages (consumer_id, order_key, position) WHERE order_key IS NOT NULL;
-- What is due? At most one row a key is in this index.
CREATE INDEX IF NOT EXISTS held_messages_due ON held_messages (consumer_id, due_at) WHERE due_at IS NOT NULL;

-- Readable at night.
CREATE VIEW IF NOT EXISTS inbox AS
SELECT c.name AS consumer, p.message_id,
	CASE p.state WHEN 0 THEN 'done' WHEN 1 THEN 'held' ELSE 'discarded' END AS state,
	p.reason, datetime(p.processed_at / 1000000, 'unixepoch') AS processed_at, lower(hex(p.fp)) AS fingerprint
FROM processed_messages p JOIN inbox_consumers c ON c.id = p.consumer_id;
