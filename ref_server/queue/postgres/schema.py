"""The tables of the queue on PostgreSQL, in their own schema."""

import psycopg

from ref_server.queue.errors import StorageBroken
from ref_server.queue.schema import SCHEMA_VERSION, create_tables

SCHEMA = "tandem"
# By version: the SQL that makes a store of that version one of the next, as in `sqlite/schema.py`.
UPGRADES: dict[int, str] = {}

_TYPES = {
    "serial": "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
    "integer": "BIGINT",
    "real": "DOUBLE PRECISION",
    "text": 'TEXT COLLATE "C"',  # compares byte by byte, as in SQLite, whatever the database's locale
    "bytes": "BYTEA",
    "flag": "BOOLEAN",
    "strict": "",
    "keyed": "",
}

_DEPTHS = """
CREATE TABLE version (number INTEGER NOT NULL);

-- Log-probs do not compress.
ALTER TABLE payloads ALTER COLUMN body SET STORAGE EXTERNAL;
ALTER TABLE scores ALTER COLUMN body SET STORAGE EXTERNAL;
ALTER TABLE training ALTER COLUMN body SET STORAGE EXTERNAL;

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
        db.execute((create_tables(_TYPES) + _DEPTHS).encode())
        db.execute("INSERT INTO version VALUES (%s)", [SCHEMA_VERSION])
    row = db.execute("SELECT number FROM version").fetchone()
    version = row[0] if row else "none"
    while version in UPGRADES:
        db.execute(UPGRADES[version].encode())
        version += 1
        db.execute("UPDATE version SET number = %s", [version])
    if version != SCHEMA_VERSION:
        raise StorageBroken(
            f"the database has schema version {version}, this program reads {SCHEMA_VERSION}: "
            "install the version that wrote it"
        )
