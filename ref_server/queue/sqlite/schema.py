"""The tables of the embedded queue. Opening a file creates them, or upgrades those of an older version."""

from pathlib import Path

import apsw

from ref_server.queue.errors import StorageBroken
from ref_server.queue.indexes import INDEXES

SCHEMA_VERSION = 1
# By version: the SQL that makes a store of that version one of the next. A released step is never changed again, so its
# text stands alone, even where the tables below say the same.
UPGRADES: dict[int, str] = {}

# Payloads have their own table, so a scan of batches never reads them. `depths` holds the counts of batches, so that
# admission and statistics cost the same at any depth. Only the triggers below write it.
_TABLES = """
CREATE TABLE batches (
    seq               INTEGER PRIMARY KEY,         -- order of admission
    id                TEXT NOT NULL UNIQUE,
    content_hash      BLOB NOT NULL,
    run               TEXT NOT NULL,
    lineage           TEXT NOT NULL DEFAULT '',    -- which training of the run's name sampled it
    uploader          TEXT NOT NULL DEFAULT '',    -- name of the token that it was uploaded with, if any
    epoch             INTEGER NOT NULL,
    policy_version    INTEGER NOT NULL,
    prompt_tokens     INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL,
    completions       INTEGER NOT NULL,
    payload_bytes     INTEGER NOT NULL,            -- 0 once the payload is gone
    admitted_at       REAL NOT NULL,               -- Unix seconds
    state             TEXT NOT NULL,
    reason            TEXT,                        -- why the batch is expired or dead
    settled_at        REAL,                        -- Unix seconds; when it became done, expired or dead
    scored            INTEGER NOT NULL DEFAULT 0,
    scoring_attempts  INTEGER NOT NULL DEFAULT 0,  -- failed ones
    interruptions     INTEGER NOT NULL DEFAULT 0,  -- how often a server ended while scoring it
    scorer            TEXT,                        -- the server that has claimed it, while scoring
    deliveries        INTEGER NOT NULL DEFAULT 0,  -- lost after training had started, or released with an error
    returned          INTEGER NOT NULL DEFAULT 0,  -- it came back from a lease, so it is leased first
    in_doubt          INTEGER NOT NULL DEFAULT 0,  -- lost while trained on: a checkpoint may contain its effect
    released_token    TEXT,                        -- of the last released lease, to recognise a repeated release
    token             TEXT,                        -- of the current lease, or of the one that settled the batch
    consumer          TEXT,
    incarnation       TEXT,
    request_id        TEXT,
    lease_seconds     REAL,
    expires           REAL,                        -- of the lease, on this process's monotonic clock
    started           INTEGER NOT NULL DEFAULT 0
) STRICT;

CREATE TABLE payloads (
    seq      INTEGER PRIMARY KEY REFERENCES batches ON DELETE CASCADE,
    body     BLOB NOT NULL,
    training BLOB                                  -- what training made of the batch, once it told
) STRICT;

CREATE TABLE events (
    number INTEGER PRIMARY KEY,
    seq    INTEGER NOT NULL REFERENCES batches ON DELETE CASCADE,
    at     REAL NOT NULL,
    state  TEXT NOT NULL,
    detail TEXT NOT NULL
) STRICT;

-- The incarnations of each consumer, newest last, so that a late request of an older one can be refused.
CREATE TABLE incarnations (
    number      INTEGER PRIMARY KEY,
    consumer    TEXT NOT NULL,
    incarnation TEXT NOT NULL,
    seen_at     REAL NOT NULL,
    UNIQUE (consumer, incarnation)
) STRICT;

-- The policy version in the first lease request of each epoch of a lineage.
CREATE TABLE epochs (
    run          TEXT NOT NULL,
    lineage      TEXT NOT NULL,
    epoch        INTEGER NOT NULL,
    fork_version INTEGER NOT NULL,
    PRIMARY KEY (run, lineage, epoch)
) STRICT, WITHOUT ROWID;

-- Whose a run is: the lineage that leased last, when it was heard (monotonic clock), and how long that holds.
CREATE TABLE runs (
    run      TEXT PRIMARY KEY,
    lineage  TEXT NOT NULL,
    heard    REAL NOT NULL,
    seconds  REAL NOT NULL,
    finished INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- The weights that replaced those of --model, if any did: every server of the queue scores with them.
CREATE TABLE reference (
    one      INTEGER PRIMARY KEY CHECK (one = 1),
    snapshot TEXT,                                 -- NULL: those of --model again
    version  INTEGER NOT NULL,
    base     TEXT NOT NULL                         -- fingerprint of the model that they replaced
) STRICT;

-- Metrics that trainers report. A curve is the records of one kind, counted: lists of runs read none of them.
CREATE TABLE curves (
    run        TEXT NOT NULL,
    lineage    TEXT NOT NULL,
    kind       TEXT NOT NULL,
    records    INTEGER NOT NULL,
    bytes      INTEGER NOT NULL,
    step       INTEGER NOT NULL,                   -- the latest
    first_at   REAL NOT NULL,                      -- Unix seconds
    updated_at REAL NOT NULL,
    PRIMARY KEY (run, lineage, kind)
) STRICT, WITHOUT ROWID;

CREATE TABLE metrics (
    run     TEXT NOT NULL,
    lineage TEXT NOT NULL,
    kind    TEXT NOT NULL,
    step    INTEGER NOT NULL,
    name    TEXT NOT NULL,                         -- tells the warnings of a step apart; else empty
    at      REAL NOT NULL,                         -- Unix seconds
    record  TEXT NOT NULL,                         -- JSON, in ASCII
    PRIMARY KEY (run, lineage, kind, step, name),
    FOREIGN KEY (run, lineage, kind) REFERENCES curves ON DELETE CASCADE
) STRICT;

CREATE TABLE depths (
    state         TEXT NOT NULL,
    run           TEXT NOT NULL,
    uploader      TEXT NOT NULL,
    started       INTEGER NOT NULL,
    batches       INTEGER NOT NULL,
    payload_bytes INTEGER NOT NULL,
    PRIMARY KEY (state, run, uploader, started)
) STRICT, WITHOUT ROWID;

CREATE TABLE probe (written_at REAL NOT NULL) STRICT;
INSERT INTO probe VALUES (0);
"""

_ENTER = """
    INSERT INTO depths VALUES (NEW.state, NEW.run, NEW.uploader, NEW.started, 1, NEW.payload_bytes)
    ON CONFLICT DO UPDATE SET batches = batches + 1, payload_bytes = payload_bytes + excluded.payload_bytes;
"""
_LEAVE = """
    UPDATE depths SET batches = batches - 1, payload_bytes = payload_bytes - OLD.payload_bytes
    WHERE state = OLD.state AND run = OLD.run AND uploader = OLD.uploader AND started = OLD.started;
    DELETE FROM depths
    WHERE state = OLD.state AND run = OLD.run AND uploader = OLD.uploader AND started = OLD.started AND batches = 0;
"""
_TRIGGERS = f"""
CREATE TRIGGER batch_comes AFTER INSERT ON batches BEGIN {_ENTER} END;
CREATE TRIGGER batch_moves AFTER UPDATE OF state, started, payload_bytes ON batches BEGIN {_LEAVE} {_ENTER} END;
CREATE TRIGGER batch_goes AFTER DELETE ON batches BEGIN {_LEAVE} END;
"""


def create_or_upgrade(db: apsw.Connection, path: Path) -> None:
    """Brings the file to SCHEMA_VERSION in one transaction: a process killed meanwhile leaves the file as it was.

    Raises StorageBroken for a file of a newer version.
    """
    with db:
        version = db.pragma("user_version")
        if version > SCHEMA_VERSION:
            raise StorageBroken(
                f"{path} has schema version {version}, this program reads {SCHEMA_VERSION}: "
                "install the newer version that wrote it"
            )
        if version == 0:
            db.execute(_TABLES + INDEXES + _TRIGGERS)
        for older in range(version or SCHEMA_VERSION, SCHEMA_VERSION):
            db.execute(UPGRADES[older])
        db.pragma("user_version", SCHEMA_VERSION)
