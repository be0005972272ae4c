-- +goose Up

-- What people did to held messages and to parked rows of the outbox, written by the
-- transaction that did it. Nothing deletes from here but you.
CREATE TABLE IF NOT EXISTS twiceproof_audit (
	id             INTEGER PRIMARY KEY AUTOINCREMENT,
	at             INTEGER NOT NULL,
	actor          TEXT    NOT NULL, -- who, as the caller said
	action         TEXT    NOT NULL, -- replay, discard, edit, outbox-retry, outbox-discard
	consumer       TEXT,             -- of a held message
	seq            INTEGER NOT NULL, -- of the row acted on
	message_id     TEXT,
	new_message_id TEXT,             -- of an edit: the message that replaces it
	reason         TEXT
);

-- How often was this message replayed?
CREATE INDEX IF NOT EXISTS twiceproof_audit_message ON twiceproof_audit (consumer, message_id);

-- The lease of the one process that cleans a consumer's inbox, and what it may do.
CREATE TABLE IF NOT EXISTS inbox_retention (
	consumer_id  INTEGER PRIMARY KEY,
	owner        TEXT,
	until        INTEGER NOT NULL DEFAULT 0,
	since        INTEGER NOT NULL DEFAULT 0, -- when the consumer was first seen
	caught_up_at INTEGER, -- when everything that was on the broker at a start had been settled
	window_us    INTEGER, -- the window that the runner asks for, in microseconds
	place        INTEGER NOT NULL DEFAULT 0, -- where the walk over the table goes on
	cleaned_at   INTEGER, -- when a walk was last finished
	deleted      INTEGER NOT NULL DEFAULT 0  -- claims deleted so far
);

-- For brokers that do not count deliveries: which lanes are owned by a process that
-- has not ended in good order. The messages that such a lane delivers first are
-- suspected of having ended it.
CREATE TABLE IF NOT EXISTS inbox_lanes (
	consumer_id INTEGER NOT NULL,
	lane        TEXT    NOT NULL,
	owner       TEXT    NOT NULL,
	since       INTEGER NOT NULL DEFAULT 0,
	PRIMARY KEY (consumer_id, lane)
) WITHOUT ROWID;

-- Runs of suspected messages, written before the handler: a run that ends with its
-- process leaves its row.
CREATE TABLE IF NOT EXISTS inbox_suspects (
	consumer_id INTEGER NOT NULL,
	message_id  TEXT    NOT NULL,
	starts      INTEGER NOT NULL,
	last_at     INTEGER NOT NULL DEFAULT 0,
	PRIMARY KEY (consumer_id, message_id)
) WITHOUT ROWID;

-- Places are numbered from now on.
UPDATE held_messages SET position = seq WHERE position = 0;
