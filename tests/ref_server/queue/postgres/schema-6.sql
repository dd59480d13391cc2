-- The tables as version 6 of the schema made them: what a server of that version left.
CREATE SCHEMA tandem;
SET search_path TO tandem;

CREATE TABLE version (number INTEGER NOT NULL);

CREATE TABLE batches (
    seq               BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,  -- order of admission
    id                TEXT COLLATE "C" NOT NULL UNIQUE,
    content_hash      BYTEA NOT NULL,
    run               TEXT COLLATE "C" NOT NULL,
    lineage           TEXT COLLATE "C" NOT NULL DEFAULT '',
    epoch             BIGINT NOT NULL,
    policy_version    BIGINT NOT NULL,
    prompt_tokens     BIGINT NOT NULL,
    completion_tokens BIGINT NOT NULL,
    completions       BIGINT NOT NULL,
    payload_bytes     BIGINT NOT NULL,
    admitted_at       DOUBLE PRECISION NOT NULL,
    state             TEXT COLLATE "C" NOT NULL,
    reason            TEXT,
    settled_at        DOUBLE PRECISION,
    scored            BOOLEAN NOT NULL DEFAULT FALSE,
    scoring_attempts  INTEGER NOT NULL DEFAULT 0,
    interruptions     INTEGER NOT NULL DEFAULT 0,
    scorer            TEXT,
    deliveries        INTEGER NOT NULL DEFAULT 0,
    returned          BOOLEAN NOT NULL DEFAULT FALSE,
    in_doubt          BOOLEAN NOT NULL DEFAULT FALSE,
    released_token    TEXT,
    token             TEXT,
    consumer          TEXT COLLATE "C",
    incarnation       TEXT,
    request_id        TEXT COLLATE "C",
    lease_seconds     DOUBLE PRECISION,
    expires           DOUBLE PRECISION,   -- of the lease or the claim, on the database's clock
    started           BOOLEAN NOT NULL DEFAULT FALSE
);

CREATE TABLE payloads (
    seq      BIGINT PRIMARY KEY REFERENCES batches ON DELETE CASCADE,
    body     BYTEA NOT NULL,
    training BYTEA
);
-- Log-probs do not compress.
ALTER TABLE payloads ALTER COLUMN body SET STORAGE EXTERNAL, ALTER COLUMN training SET STORAGE EXTERNAL;

CREATE TABLE events (
    number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    seq    BIGINT NOT NULL REFERENCES batches ON DELETE CASCADE,
    at     DOUBLE PRECISION NOT NULL,
    state  TEXT NOT NULL,
    detail TEXT NOT NULL
);

CREATE TABLE epochs (
    run          TEXT COLLATE "C" NOT NULL,
    lineage      TEXT COLLATE "C" NOT NULL DEFAULT '',
    epoch        BIGINT NOT NULL,
    fork_version BIGINT NOT NULL,
    PRIMARY KEY (run, lineage, epoch)
);

CREATE TABLE runs (
    run      TEXT COLLATE "C" PRIMARY KEY,
    lineage  TEXT COLLATE "C" NOT NULL,
    heard    DOUBLE PRECISION NOT NULL,
    seconds  DOUBLE PRECISION NOT NULL,
    finished BOOLEAN NOT NULL
);

CREATE TABLE incarnations (
    number      BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    consumer    TEXT COLLATE "C" NOT NULL,
    incarnation TEXT COLLATE "C" NOT NULL,
    seen_at     DOUBLE PRECISION NOT NULL,
    UNIQUE (consumer, incarnation)
);

CREATE TABLE reference (
    one      INTEGER PRIMARY KEY CHECK (one = 1),
    snapshot TEXT,
    version  BIGINT NOT NULL,
    base     TEXT NOT NULL
);

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

-- Each row is a change in the number and bytes of batches; the depth is the sum of the rows. Transactions only append,
-- so they never wait for each other. Each server replaces the rows by their sums now and then (ADD_UP).
CREATE TABLE depths (
    state         TEXT COLLATE "C" NOT NULL,
    run           TEXT COLLATE "C" NOT NULL,
    started       BOOLEAN NOT NULL,
    batches       BIGINT NOT NULL,
    payload_bytes BIGINT NOT NULL
);

CREATE TABLE probe (written_at DOUBLE PRECISION NOT NULL);
INSERT INTO probe VALUES (0);

CREATE FUNCTION batches_come() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO depths SELECT state, run, started, count(*), sum(payload_bytes) FROM new GROUP BY state, run, started;
    RETURN NULL;
END $$;
CREATE FUNCTION batches_move() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO depths SELECT state, run, started, sum(batches), sum(size) FROM (
        SELECT state, run, started, -1 AS batches, -payload_bytes AS size FROM old
        UNION ALL SELECT state, run, started, 1, payload_bytes FROM new
    ) AS moves GROUP BY state, run, started HAVING sum(batches) <> 0 OR sum(size) <> 0;
    RETURN NULL;
END $$;
CREATE FUNCTION batches_go() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO depths SELECT state, run, started, -count(*), -sum(payload_bytes) FROM old GROUP BY state, run, started;
    RETURN NULL;
END $$;
CREATE TRIGGER come AFTER INSERT ON batches
    REFERENCING NEW TABLE AS new FOR EACH STATEMENT EXECUTE FUNCTION batches_come();
CREATE TRIGGER move AFTER UPDATE ON batches
    REFERENCING OLD TABLE AS old NEW TABLE AS new FOR EACH STATEMENT EXECUTE FUNCTION batches_move();
CREATE TRIGGER go AFTER DELETE ON batches
    REFERENCING OLD TABLE AS old FOR EACH STATEMENT EXECUTE FUNCTION batches_go();

CREATE INDEX ready_fifo_of_run ON batches (run, lineage, returned DESC, seq) WHERE state = 'ready';
CREATE INDEX ready_freshest_of_run ON batches (run, lineage, returned DESC, policy_version DESC, seq DESC)
    WHERE state = 'ready';
CREATE INDEX waiting_by_version ON batches (run, lineage, epoch, policy_version) WHERE state IN ('queued', 'ready');
CREATE INDEX leases_of_lineage ON batches (run, lineage, lease_seconds) WHERE state = 'leased';
CREATE INDEX batches_in_state ON batches (state, seq);
CREATE INDEX ready_fifo ON batches (returned DESC, seq) WHERE state = 'ready';
CREATE INDEX ready_freshest ON batches (returned DESC, policy_version DESC, seq DESC) WHERE state = 'ready';
CREATE INDEX by_expiry ON batches (expires) WHERE expires IS NOT NULL;
CREATE INDEX leases_by_consumer ON batches (consumer, request_id) WHERE state = 'leased';
CREATE INDEX settled ON batches (settled_at) WHERE settled_at IS NOT NULL;
CREATE INDEX kept_payloads ON batches (settled_at, seq) WHERE settled_at IS NOT NULL AND payload_bytes > 0;
CREATE INDEX samples_of_run ON batches (run, content_hash DESC, seq DESC) WHERE state = 'done' AND payload_bytes > 0;
CREATE INDEX events_of_batch ON events (seq, number);
CREATE INDEX IF NOT EXISTS waiting_by_age ON batches (admitted_at) WHERE state IN ('queued', 'ready');

INSERT INTO version VALUES (6);
