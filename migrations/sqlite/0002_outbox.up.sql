-- +goose Up

-- Messages to publish, written by the business transaction. The relay deletes a
-- row (or sets published_at, by option) once the broker has accepted it.
CREATE TABLE IF NOT EXISTS outbox_messages (
	seq          INTEGER PRIMARY KEY AUTOINCREMENT, -- order within a key
	share        INTEGER NOT NULL CHECK (share BETWEEN 0 AND 255), -- hash of the key: the unit relays divide among them
	attempts     INTEGER NOT NULL DEFAULT 0,
	parked       INTEGER NOT NULL DEFAULT 0, -- refused too often; blocks its key
	next_at      INTEGER, -- not before; NULL is at once
	message_id   TEXT    NOT NULL,
	topic        BLOB    NOT NULL,
	message_key  BLOB,
	type         BLOB    NOT NULL,
	content_type BLOB    NOT NULL,
	produced_at  TEXT,
	headers      BLOB,
	payload      BLOB,
	created_at   INTEGER NOT NULL DEFAULT 0,
	published_at INTEGER,
	last_error   TEXT
);

-- The backlog in order: relays walk it from its start and pass over the shares of
-- others. Published rows leave the index.
CREATE INDEX IF NOT EXISTS outbox_messages_backlog ON outbox_messages (seq) WHERE published_at IS NULL;
-- What cleanup may delete.
CREATE INDEX IF NOT EXISTS outbox_messages_published ON outbox_messages (published_at) WHERE published_at IS NOT NULL;
-- What blocks its key: parked, or waiting for another try. Few rows.
CREATE INDEX IF NOT EXISTS outbox_messages_blocked ON outbox_messages (seq) WHERE parked OR next_at IS NOT NULL;

-- Relays that live, by their own heartbeats.
CREATE TABLE IF NOT EXISTS outbox_relays (
	id      TEXT    PRIMARY KEY,
	seen_at INTEGER NOT NULL,
	until   INTEGER NOT NULL -- the end of its lease: from then on it counts no more
);

-- Who publishes which share: one owner at a time, with a lease and a token that
-- every mark must match.
CREATE TABLE IF NOT EXISTS outbox_shares (
	share INTEGER PRIMARY KEY CHECK (share BETWEEN 0 AND 255),
	owner TEXT,
	token INTEGER NOT NULL DEFAULT 0,
	until INTEGER NOT NULL DEFAULT 0
);
WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < 255)
INSERT OR IGNORE INTO outbox_shares (share) SELECT i FROM n;
