-- The tables as version 1 of the schema made them: what a server of that version left.

CREATE TABLE batches (
    seq               INTEGER PRIMARY KEY,         -- order of admission
    id                TEXT NOT NULL UNIQUE,
    content_hash      BLOB NOT NULL,
    run               TEXT NOT NULL,
    epoch             INTEGER NOT NULL,
    policy_version    INTEGER NOT NULL,
    prompt_tokens     INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL,
    completions       INTEGER NOT NULL,
    payload_bytes     INTEGER NOT NULL,            -- 0 once the payload is gone
    admitted_at       REAL NOT NULL,               -- Unix seconds
    state             TEXT NOT NULL,
    reason            TEXT,                        -- why it is expired or dead
    settled_at        REAL,                        -- Unix seconds; since when it is done, expired or dead
    scored            INTEGER NOT NULL DEFAULT 0,
    scoring_attempts  INTEGER NOT NULL DEFAULT 0,  -- those that failed
    deliveries        INTEGER NOT NULL DEFAULT 0,  -- that count: lost once training had started, or broken
    returned          INTEGER NOT NULL DEFAULT 0,  -- it came back from a lease, so it is first in line
    released_token    TEXT,                        -- the last token that gave it back, to know a repeated release
    token             TEXT,                        -- of the lease that holds, or of the one that settled the batch
    consumer          TEXT,
    incarnation       TEXT,
    request_id        TEXT,
    lease_seconds     REAL,
    expires           REAL,                        -- while leased; on this process's monotonic clock
    started           INTEGER NOT NULL DEFAULT 0
) STRICT;

CREATE TABLE payloads (
    seq  INTEGER PRIMARY KEY REFERENCES batches ON DELETE CASCADE,
    body BLOB NOT NULL
) STRICT;

CREATE TABLE events (
    seq    INTEGER NOT NULL REFERENCES batches ON DELETE CASCADE,
    at     REAL NOT NULL,
    state  TEXT NOT NULL,
    detail TEXT NOT NULL
) STRICT;

-- At which version the weights of a run stood when a consumer first showed an epoch.
CREATE TABLE epochs (
    run          TEXT NOT NULL,
    epoch        INTEGER NOT NULL,
    fork_version INTEGER NOT NULL,
    PRIMARY KEY (run, epoch)
) STRICT, WITHOUT ROWID;

-- Every life of every consumer, the newest last, so that a late request of an older one is known for what it is.
CREATE TABLE incarnations (
    number      INTEGER PRIMARY KEY,
    consumer    TEXT NOT NULL,
    incarnation TEXT NOT NULL,
    seen_at     REAL NOT NULL,
    UNIQUE (consumer, incarnation)
) STRICT;

CREATE TABLE depths (
    state         TEXT NOT NULL,
    run           TEXT NOT NULL,
    epoch         INTEGER NOT NULL,
    started       INTEGER NOT NULL,
    batches       INTEGER NOT NULL,
    payload_bytes INTEGER NOT NULL,
    PRIMARY KEY (state, run, epoch, started)
) STRICT, WITHOUT ROWID;

CREATE TABLE probe (written_at REAL NOT NULL) STRICT;
INSERT INTO probe VALUES (0);

CREATE INDEX batches_in_state ON batches (state, seq);
CREATE INDEX ready_fifo ON batches (run, epoch, returned DESC, seq) WHERE state = 'ready';
CREATE INDEX ready_freshest ON batches (run, epoch, returned DESC, policy_version DESC, seq DESC) WHERE state = 'ready';
CREATE INDEX waiting_by_version ON batches (run, epoch, policy_version) WHERE state IN ('queued', 'ready');
CREATE INDEX leases_by_expiry ON batches (expires) WHERE expires IS NOT NULL;
CREATE INDEX leases_by_consumer ON batches (consumer, request_id) WHERE state = 'leased';
CREATE INDEX settled ON batches (settled_at) WHERE settled_at IS NOT NULL;
CREATE INDEX events_of_batch ON events (seq);

CREATE TRIGGER batch_comes AFTER INSERT ON batches BEGIN
    INSERT INTO depths VALUES (NEW.state, NEW.run, NEW.epoch, NEW.started, 1, NEW.payload_bytes)
    ON CONFLICT DO UPDATE SET batches = batches + 1, payload_bytes = payload_bytes + excluded.payload_bytes;
 END;
CREATE TRIGGER batch_moves AFTER UPDATE OF state, started, payload_bytes ON batches BEGIN
    UPDATE depths SET batches = batches - 1, payload_bytes = payload_bytes - OLD.payload_bytes
    WHERE state = OLD.state AND run = OLD.run AND epoch = OLD.epoch AND started = OLD.started;
    DELETE FROM depths
    WHERE state = OLD.state AND run = OLD.run AND epoch = OLD.epoch AND started = OLD.started AND batches = 0;

    INSERT INTO depths VALUES (NEW.state, NEW.run, NEW.epoch, NEW.started, 1, NEW.payload_bytes)
    ON CONFLICT DO UPDATE SET batches = batches + 1, payload_bytes = payload_bytes + excluded.payload_bytes;
 END;
CREATE TRIGGER batch_goes AFTER DELETE ON batches BEGIN
    UPDATE depths SET batches = batches - 1, payload_bytes = payload_bytes - OLD.payload_bytes
    WHERE state = OLD.state AND run = OLD.run AND epoch = OLD.epoch AND started = OLD.started;
    DELETE FROM depths
    WHERE state = OLD.state AND run = OLD.run AND epoch = OLD.epoch AND started = OLD.started AND batches = 0;
 END;

PRAGMA user_version = 1;
