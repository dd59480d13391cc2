"""The tables of the queue on PostgreSQL, in their own schema. `sqlite/schema.py` explains the columns."""

import psycopg

from ref_server.queue.errors import StorageBroken
from ref_server.queue.indexes import INDEXES

SCHEMA = "tandem"
SCHEMA_VERSION = 1
# By version: the SQL that makes a store of that version one of the next, as in `sqlite/schema.py`.
UPGRADES: dict[int, str] = {}

# COLLATE "C": texts compare byte by byte, as in SQLite, whatever the database's locale.
_TABLES = """
CREATE TABLE version (number INTEGER NOT NULL);

CREATE TABLE batches (
    seq               BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,  -- order of admission
    id                TEXT COLLATE "C" NOT NULL UNIQUE,
    content_hash      BYTEA NOT NULL,
    run               TEXT COLLATE "C" NOT NULL,
    lineage           TEXT COLLATE "C" NOT NULL DEFAULT '',
    uploader          TEXT COLLATE "C" NOT NULL DEFAULT '',
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
    uploader      TEXT COLLATE "C" NOT NULL,
    started       BOOLEAN NOT NULL,
    batches       BIGINT NOT NULL,
    payload_bytes BIGINT NOT NULL
);

CREATE TABLE probe (written_at DOUBLE PRECISION NOT NULL);
INSERT INTO probe VALUES (0);

CREATE FUNCTION batches_come() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO depths SELECT state, run, uploader, started, count(*), sum(payload_bytes) FROM new
        GROUP BY state, run, uploader, started;
    RETURN NULL;
END $$;
CREATE FUNCTION batches_move() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO depths SELECT state, run, uploader, started, sum(batches), sum(size) FROM (
        SELECT state, run, uploader, started, -1 AS batches, -payload_bytes AS size FROM old
        UNION ALL SELECT state, run, uploader, started, 1, payload_bytes FROM new
    ) AS moves GROUP BY state, run, uploader, started HAVING sum(batches) <> 0 OR sum(size) <> 0;
    RETURN NULL;
END $$;
CREATE FUNCTION batches_go() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO depths SELECT state, run, uploader, started, -count(*), -sum(payload_bytes) FROM old
        GROUP BY state, run, uploader, started;
    RETURN NULL;
END $$;
CREATE TRIGGER come AFTER INSERT ON batches
    REFERENCING NEW TABLE AS new FOR EACH STATEMENT EXECUTE FUNCTION batches_come();
CREATE TRIGGER move AFTER UPDATE ON batches
    REFERENCING OLD TABLE AS old NEW TABLE AS new FOR EACH STATEMENT EXECUTE FUNCTION batches_move();
CREATE TRIGGER go AFTER DELETE ON batches
    REFERENCING OLD TABLE AS old FOR EACH STATEMENT EXECUTE FUNCTION batches_go();
"""

# One statement, so nobody reads a partial sum. Does nothing for 100 rows or fewer: there is nothing to gain.
ADD_UP = """
WITH gone AS (DELETE FROM depths WHERE (SELECT count(*) FROM depths) > 100 RETURNING *)
INSERT INTO depths SELECT state, run, uploader, started, sum(batches), sum(payload_bytes) FROM gone
GROUP BY state, run, uploader, started HAVING sum(batches) <> 0 OR sum(payload_bytes) <> 0
"""


def prepare(db: psycopg.Connection) -> None:
    """Creates the schema or upgrades an older one, in one transaction. Raises StorageBroken, psycopg.Error."""
    db.execute(
        "SELECT pg_advisory_xact_lock(hashtextextended('tandem schema', 0))"
    )  # several servers may start at once
    if db.execute("SELECT to_regnamespace(%s)", [SCHEMA]).fetchone() == (None,):
        db.execute(f"CREATE SCHEMA {SCHEMA}".encode())
        db.execute((_TABLES + INDEXES).encode())
        db.execute("INSERT INTO version VALUES (%s)", [SCHEMA_VERSION])
    row = db.execute("SELECT number FROM version").fetchone()
    found = row[0] if row else "none"
    while found in UPGRADES:
        db.execute(UPGRADES[found].encode())
        found += 1
        db.execute("UPDATE version SET number = %s", [found])
    if found != SCHEMA_VERSION:
        raise StorageBroken(
            f"the database has schema version {found}, this program reads {SCHEMA_VERSION}: "
            "install the version that wrote it"
        )
