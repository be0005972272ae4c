-- +goose Up

-- For events that carry a version: the newest one applied, of each entity.
CREATE TABLE IF NOT EXISTS entity_versions (
	scope      TEXT    NOT NULL,
	entity     TEXT    NOT NULL,
	version    INTEGER NOT NULL,
	updated_at INTEGER NOT NULL DEFAULT 0,
	PRIMARY KEY (scope, entity)
) WITHOUT ROWID;
