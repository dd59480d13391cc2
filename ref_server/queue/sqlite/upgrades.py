"""How a file of an older version becomes one of the next: by version, SQL that is never changed again.

Each step has its own text, even where the newest tables say the same: those may change, a step may not.
"""

_DEPTHS = """
CREATE TABLE depths (
    state         TEXT NOT NULL,
    run           TEXT NOT NULL,
    started       INTEGER NOT NULL,
    batches       INTEGER NOT NULL,
    payload_bytes INTEGER NOT NULL,
    PRIMARY KEY (state, run, started)
) STRICT, WITHOUT ROWID;
INSERT INTO depths SELECT state, run, started, count(*), sum(payload_bytes) FROM batches GROUP BY state, run, started;
"""
_ENTER = """
    INSERT INTO depths VALUES (NEW.state, NEW.run, NEW.started, 1, NEW.payload_bytes)
    ON CONFLICT DO UPDATE SET batches = batches + 1, payload_bytes = payload_bytes + excluded.payload_bytes;
"""
_LEAVE = """
    UPDATE depths SET batches = batches - 1, payload_bytes = payload_bytes - OLD.payload_bytes
    WHERE state = OLD.state AND run = OLD.run AND started = OLD.started;
    DELETE FROM depths
    WHERE state = OLD.state AND run = OLD.run AND started = OLD.started AND batches = 0;
"""
# Scorers have names, interruptions are counted, events have numbers, and depths do not tell epochs apart.
_FROM_1 = f"""
DROP TRIGGER batch_comes;
DROP TRIGGER batch_moves;
DROP TRIGGER batch_goes;
DROP TABLE depths;
ALTER TABLE batches ADD COLUMN interruptions INTEGER NOT NULL DEFAULT 0;
ALTER TABLE batches ADD COLUMN scorer TEXT;
ALTER TABLE batches ADD COLUMN in_doubt INTEGER NOT NULL DEFAULT 0;
ALTER TABLE events RENAME TO events_without_numbers;
CREATE TABLE events (
    number INTEGER PRIMARY KEY,
    seq    INTEGER NOT NULL REFERENCES batches ON DELETE CASCADE,
    at     REAL NOT NULL,
    state  TEXT NOT NULL,
    detail TEXT NOT NULL
) STRICT;
INSERT INTO events SELECT rowid, seq, at, state, detail FROM events_without_numbers;
DROP TABLE events_without_numbers;
DROP INDEX ready_fifo;
DROP INDEX ready_freshest;
DROP INDEX leases_by_expiry;
CREATE INDEX ready_fifo ON batches (returned DESC, seq) WHERE state = 'ready';
CREATE INDEX ready_fifo_of_run ON batches (run, returned DESC, seq) WHERE state = 'ready';
CREATE INDEX ready_freshest ON batches (returned DESC, policy_version DESC, seq DESC) WHERE state = 'ready';
CREATE INDEX ready_freshest_of_run ON batches (run, returned DESC, policy_version DESC, seq DESC) WHERE state = 'ready';
CREATE INDEX by_expiry ON batches (expires) WHERE expires IS NOT NULL;
CREATE INDEX events_of_batch ON events (seq, number);
{_DEPTHS}
CREATE TRIGGER batch_comes AFTER INSERT ON batches BEGIN {_ENTER} END;
CREATE TRIGGER batch_moves AFTER UPDATE OF state, started, payload_bytes ON batches BEGIN {_LEAVE} {_ENTER} END;
CREATE TRIGGER batch_goes AFTER DELETE ON batches BEGIN {_LEAVE} END;
"""
# Batches and epochs have lineages; who holds a run is known.
_FROM_2 = """
ALTER TABLE batches ADD COLUMN lineage TEXT NOT NULL DEFAULT '';
ALTER TABLE epochs RENAME TO epochs_of_runs;
CREATE TABLE epochs (
    run          TEXT NOT NULL,
    lineage      TEXT NOT NULL,
    epoch        INTEGER NOT NULL,
    fork_version INTEGER NOT NULL,
    PRIMARY KEY (run, lineage, epoch)
) STRICT, WITHOUT ROWID;
CREATE TABLE runs (
    run      TEXT PRIMARY KEY,
    lineage  TEXT NOT NULL,
    heard    REAL NOT NULL,
    seconds  REAL NOT NULL,
    finished INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
INSERT INTO epochs SELECT run, '', epoch, fork_version FROM epochs_of_runs;
DROP TABLE epochs_of_runs;
DROP INDEX ready_fifo_of_run;
DROP INDEX ready_freshest_of_run;
DROP INDEX waiting_by_version;
CREATE INDEX ready_fifo_of_run ON batches (run, lineage, returned DESC, seq) WHERE state = 'ready';
CREATE INDEX ready_freshest_of_run ON batches (run, lineage, returned DESC, policy_version DESC, seq DESC)
    WHERE state = 'ready';
CREATE INDEX waiting_by_version ON batches (run, lineage, epoch, policy_version) WHERE state IN ('queued', 'ready');
CREATE INDEX leases_of_lineage ON batches (run, lineage, lease_seconds) WHERE state = 'leased';
"""
# The queue knows which weights replaced those of --model.
_FROM_3 = """
CREATE TABLE reference (
    one      INTEGER PRIMARY KEY CHECK (one = 1),
    snapshot TEXT,
    version  INTEGER NOT NULL,
    base     TEXT NOT NULL
) STRICT;
"""
# The settled batches whose payloads go first are found at any depth.
_FROM_4 = """
CREATE INDEX kept_payloads ON batches (settled_at, seq) WHERE settled_at IS NOT NULL AND payload_bytes > 0;
"""
# What training made of a batch lies beside its payload; those of a run that are kept are found by their hashes.
_FROM_5 = """
ALTER TABLE payloads ADD COLUMN training BLOB;
CREATE INDEX samples_of_run ON batches (run, content_hash DESC, seq DESC) WHERE state = 'done' AND payload_bytes > 0;
"""
# Trainers report the metrics of their runs.
_FROM_6 = """
CREATE TABLE curves (
    run        TEXT NOT NULL,
    lineage    TEXT NOT NULL,
    kind       TEXT NOT NULL,
    records    INTEGER NOT NULL,
    bytes      INTEGER NOT NULL,
    step       INTEGER NOT NULL,
    first_at   REAL NOT NULL,
    updated_at REAL NOT NULL,
    PRIMARY KEY (run, lineage, kind)
) STRICT, WITHOUT ROWID;
CREATE TABLE metrics (
    run     TEXT NOT NULL,
    lineage TEXT NOT NULL,
    kind    TEXT NOT NULL,
    step    INTEGER NOT NULL,
    name    TEXT NOT NULL,
    at      REAL NOT NULL,
    record  TEXT NOT NULL,
    PRIMARY KEY (run, lineage, kind, step, name),
    FOREIGN KEY (run, lineage, kind) REFERENCES curves ON DELETE CASCADE
) STRICT;
"""
# Batches are counted by uploader, too.
_FROM_7 = """
DROP TRIGGER batch_comes;
DROP TRIGGER batch_moves;
DROP TRIGGER batch_goes;
DROP TABLE depths;
ALTER TABLE batches ADD COLUMN uploader TEXT NOT NULL DEFAULT '';
CREATE TABLE depths (
    state         TEXT NOT NULL,
    run           TEXT NOT NULL,
    uploader      TEXT NOT NULL,
    started       INTEGER NOT NULL,
    batches       INTEGER NOT NULL,
    payload_bytes INTEGER NOT NULL,
    PRIMARY KEY (state, run, uploader, started)
) STRICT, WITHOUT ROWID;
INSERT INTO depths SELECT state, run, uploader, started, count(*), sum(payload_bytes) FROM batches
    GROUP BY state, run, uploader, started;
CREATE TRIGGER batch_comes AFTER INSERT ON batches BEGIN
    INSERT INTO depths VALUES (NEW.state, NEW.run, NEW.uploader, NEW.started, 1, NEW.payload_bytes)
    ON CONFLICT DO UPDATE SET batches = batches + 1, payload_bytes = payload_bytes + excluded.payload_bytes;
END;
CREATE TRIGGER batch_moves AFTER UPDATE OF state, started, payload_bytes ON batches BEGIN
    UPDATE depths SET batches = batches - 1, payload_bytes = payload_bytes - OLD.payload_bytes
    WHERE state = OLD.state AND run = OLD.run AND uploader = OLD.uploader AND started = OLD.started;
    DELETE FROM depths
    WHERE state = OLD.state AND run = OLD.run AND uploader = OLD.uploader AND started = OLD.started AND batches = 0;
    INSERT INTO depths VALUES (NEW.state, NEW.run, NEW.uploader, NEW.started, 1, NEW.payload_bytes)
    ON CONFLICT DO UPDATE SET batches = batches + 1, payload_bytes = payload_bytes + excluded.payload_bytes;
END;
CREATE TRIGGER batch_goes AFTER DELETE ON batches BEGIN
    UPDATE depths SET batches = batches - 1, payload_bytes = payload_bytes - OLD.payload_bytes
    WHERE state = OLD.state AND run = OLD.run AND uploader = OLD.uploader AND started = OLD.started;
    DELETE FROM depths
    WHERE state = OLD.state AND run = OLD.run AND uploader = OLD.uploader AND started = OLD.started AND batches = 0;
END;
"""
UPGRADES = {1: _FROM_1, 2: _FROM_2, 3: _FROM_3, 4: _FROM_4, 5: _FROM_5, 6: _FROM_6, 7: _FROM_7}
