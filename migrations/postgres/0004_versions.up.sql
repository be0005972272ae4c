-- +goose Up

-- For events that carry a version: the newest one applied, of each entity.
CREATE TABLE IF NOT EXISTS entity_versions (
	scope      text        COLLATE "C" NOT NULL,
	entity     text        COLLATE "C" NOT NULL,
	version    bigint      NOT NULL,
	updated_at timestamptz NOT NULL DEFAULT clock_timestamp(),
	PRIMARY KEY (scope, entity)
);
