"""How a database of an older version becomes one of the next: by version, SQL that is never changed again.

Each step has its own text, even where the newest tables say the same: those may change, a step may not.
"""

# Batches and epochs have lineages; who holds a run is known.
_FROM_1 = """
ALTER TABLE batches ADD COLUMN lineage TEXT COLLATE "C" NOT NULL DEFAULT '';
ALTER TABLE epochs ADD COLUMN lineage TEXT COLLATE "C" NOT NULL DEFAULT '';
ALTER TABLE epochs DROP CONSTRAINT epochs_pkey, ADD PRIMARY KEY (run, lineage, epoch);
DROP INDEX ready_fifo_of_run, ready_freshest_of_run, waiting_by_version;
CREATE TABLE runs (
    run      TEXT COLLATE "C" PRIMARY KEY,
    lineage  TEXT COLLATE "C" NOT NULL,
    heard    DOUBLE PRECISION NOT NULL,
    seconds  DOUBLE PRECISION NOT NULL,
    finished BOOLEAN NOT NULL
);
CREATE INDEX ready_fifo_of_run ON batches (run, lineage, returned DESC, seq) WHERE state = 'ready';
CREATE INDEX ready_freshest_of_run ON batches (run, lineage, returned DESC, policy_version DESC, seq DESC)
    WHERE state = 'ready';
CREATE INDEX waiting_by_version ON batches (run, lineage, epoch, policy_version) WHERE state IN ('queued', 'ready');
CREATE INDEX leases_of_lineage ON batches (run, lineage, lease_seconds) WHERE state = 'leased';
"""
# The queue knows which weights replaced those of --model.
_FROM_2 = """
CREATE TABLE reference (
    one      INTEGER PRIMARY KEY CHECK (one = 1),
    snapshot TEXT,
    version  BIGINT NOT NULL,
    base     TEXT NOT NULL
);
"""
# The settled batches whose payloads go first are found at any depth.
_FROM_3 = """
CREATE INDEX kept_payloads ON batches (settled_at, seq) WHERE settled_at IS NOT NULL AND payload_bytes > 0;
"""
# What training made of a batch lies beside its payload; those of a run that are kept are found by their hashes.
_FROM_4 = """
ALTER TABLE payloads ADD COLUMN training BYTEA;
ALTER TABLE payloads ALTER COLUMN training SET STORAGE EXTERNAL;
CREATE INDEX samples_of_run ON batches (run, content_hash DESC, seq DESC) WHERE state = 'done' AND payload_bytes > 0;
"""
# Trainers report the metrics of their runs.
_FROM_5 = """
CREATE TABLE curves (
    run        TEXT COLLATE "C" NOT NULL,
    lineage    TEXT COLLATE "C" NOT NULL,
    kind       TEXT COLLATE "C" NOT NULL,
    records    BIGINT NOT NULL,
    bytes      BIGINT NOT NULL,
    step       BIGINT NOT NULL,
    first_at   DOUBLE PRECISION NOT NULL,
    updated_at DOUBLE PRECISION NOT NULL,
    PRIMARY KEY (run, lineage, kind)
);
CREATE TABLE metrics (
    run     TEXT COLLATE "C" NOT NULL,
    lineage TEXT COLLATE "C" NOT NULL,
    kind    TEXT COLLATE "C" NOT NULL,
    step    BIGINT NOT NULL,
    name    TEXT COLLATE "C" NOT NULL,
    at      DOUBLE PRECISION NOT NULL,
    record  TEXT NOT NULL,
    PRIMARY KEY (run, lineage, kind, step, name),
    FOREIGN KEY (run, lineage, kind) REFERENCES curves ON DELETE CASCADE
);
"""
# Batches are counted by uploader, too.
_FROM_6 = """
ALTER TABLE batches ADD COLUMN uploader TEXT COLLATE "C" NOT NULL DEFAULT '';
DROP TABLE depths;
CREATE TABLE depths (
    state         TEXT COLLATE "C" NOT NULL,
    run           TEXT COLLATE "C" NOT NULL,
    uploader      TEXT COLLATE "C" NOT NULL,
    started       BOOLEAN NOT NULL,
    batches       BIGINT NOT NULL,
    payload_bytes BIGINT NOT NULL
);
INSERT INTO depths SELECT state, run, uploader, started, count(*), sum(payload_bytes) FROM batches
    GROUP BY state, run, uploader, started;
CREATE OR REPLACE FUNCTION batches_come() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO depths SELECT state, run, uploader, started, count(*), sum(payload_bytes) FROM new
        GROUP BY state, run, uploader, started;
    RETURN NULL;
END $$;
CREATE OR REPLACE FUNCTION batches_move() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO depths SELECT state, run, uploader, started, sum(batches), sum(size) FROM (
        SELECT state, run, uploader, started, -1 AS batches, -payload_bytes AS size FROM old
        UNION ALL SELECT state, run, uploader, started, 1, payload_bytes FROM new
    ) AS moves GROUP BY state, run, uploader, started HAVING sum(batches) <> 0 OR sum(size) <> 0;
    RETURN NULL;
END $$;
CREATE OR REPLACE FUNCTION batches_go() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO depths SELECT state, run, uploader, started, -count(*), -sum(payload_bytes) FROM old
        GROUP BY state, run, uploader, started;
    RETURN NULL;
END $$;
"""
UPGRADES = {1: _FROM_1, 2: _FROM_2, 3: _FROM_3, 4: _FROM_4, 5: _FROM_5, 6: _FROM_6}
