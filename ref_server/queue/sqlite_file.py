"""The SQLite file of the embedded queue: its lock, the file systems it may be on, its schema, and how it is opened."""

import fcntl
from pathlib import Path
from typing import IO

import apsw
import psutil

from ref_server.queue.indexes import INDEXES, LINEAGE_INDEXES
from ref_server.queue.interface import StorageBroken

SCHEMA_VERSION = 3

# Payloads have their own table, so a scan of batches never reads them. `depths` holds the counts of batches, so that
# admission and statistics cost the same at any depth. Only the triggers below write it.
_TABLES = """
CREATE TABLE batches (
    seq               INTEGER PRIMARY KEY,         -- order of admission
    id                TEXT NOT NULL UNIQUE,
    content_hash      BLOB NOT NULL,
    run               TEXT NOT NULL,
    lineage           TEXT NOT NULL DEFAULT '',    -- which training of the run's name sampled it
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
    seq  INTEGER PRIMARY KEY REFERENCES batches ON DELETE CASCADE,
    body BLOB NOT NULL
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

CREATE TABLE depths (
    state         TEXT NOT NULL,
    run           TEXT NOT NULL,
    started       INTEGER NOT NULL,
    batches       INTEGER NOT NULL,
    payload_bytes INTEGER NOT NULL,
    PRIMARY KEY (state, run, started)
) STRICT, WITHOUT ROWID;

CREATE TABLE probe (written_at REAL NOT NULL) STRICT;
INSERT INTO probe VALUES (0);
"""

_LINEAGES = """
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
"""

# From each older version to the next, in the transaction that opens the file.
_UPGRADES = {
    2: f"""
ALTER TABLE batches ADD COLUMN lineage TEXT NOT NULL DEFAULT '';
ALTER TABLE epochs RENAME TO epochs_of_runs;
{_LINEAGES}
INSERT INTO epochs SELECT run, '', epoch, fork_version FROM epochs_of_runs;
DROP TABLE epochs_of_runs;
DROP INDEX ready_fifo_of_run;
DROP INDEX ready_freshest_of_run;
DROP INDEX waiting_by_version;
{LINEAGE_INDEXES}
"""
}

# Network file systems: WAL mode's shared memory and locks do not work on them, or not reliably.
_NETWORK = {"afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "smb3", "smbfs"}

# Older versions can reset the WAL while another connection reads it, a rare bug that loses data.
_OLDEST_SQLITE = (3, 51, 3)

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
_TRIGGERS = f"""
CREATE TRIGGER batch_comes AFTER INSERT ON batches BEGIN {_ENTER} END;
CREATE TRIGGER batch_moves AFTER UPDATE OF state, started, payload_bytes ON batches BEGIN {_LEAVE} {_ENTER} END;
CREATE TRIGGER batch_goes AFTER DELETE ON batches BEGIN {_LEAVE} END;
"""


def hold(path: Path) -> IO[bytes]:
    """Locks the data directory until the returned file is closed. Raises StorageBroken."""
    lock_path = path.with_name(path.name + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _refuse_network(path.parent)
        lock = lock_path.open("wb")
    except OSError as error:
        raise StorageBroken(f"data_dir: cannot write to {path.parent}: {error}; choose another --data-dir") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise StorageBroken(
            f"another process holds {path}; stop it, or use another directory ({lock_path.name}: {error})"
        ) from error
    return lock


def _refuse_network(directory: Path) -> None:
    kind = file_system(directory)
    if kind in _NETWORK or kind.startswith("fuse.ssh"):
        raise StorageBroken(
            f"{directory} is on a network file system ({kind}), where SQLite cannot guarantee durability: "
            "choose a directory on a local disk, or a store on PostgreSQL"
        )


def file_system(directory: Path) -> str:
    """The type of the file system that holds a directory, as the operating system names it; '' when unknown."""
    above = [directory.resolve(), *directory.resolve().parents]
    mounted = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    return next((mounted[path].lower() for path in above if path in mounted), "")


def _refuse_old_sqlite() -> None:
    version = apsw.sqlite_lib_version()
    if tuple(int(part) for part in version.split(".")) < _OLDEST_SQLITE:
        needed = ".".join(map(str, _OLDEST_SQLITE))
        raise StorageBroken(f"SQLite is {version}; older than {needed} it can lose data: pip install --upgrade apsw")


def prepare(db: apsw.Connection, path: Path) -> None:
    """Checks the file, creates its schema or upgrades an older one, sets the pragmas of `db`.

    Raises StorageBroken, apsw.Error.
    """
    _refuse_old_sqlite()
    verdict = db.pragma("quick_check", 1)
    if verdict != "ok":
        raise StorageBroken(f"{path} is damaged: {verdict}")
    version = db.pragma("user_version")
    if version not in (0, *_UPGRADES, SCHEMA_VERSION):
        raise StorageBroken(f"{path} has schema version {version}, this program reads {SCHEMA_VERSION}")
    db.set_busy_timeout(5000)  # in case someone reads the file with the sqlite3 shell
    db.pragma("journal_mode", "WAL")
    db.pragma("foreign_keys", True)
    db.pragma("fullfsync", True)  # macOS: a plain fsync stops at the drive's cache
    db.pragma("journal_size_limit", 64 * 2**20)  # truncates a WAL that grew during a burst
    if version == 0:
        with db:
            db.execute(_TABLES + _LINEAGES + INDEXES + _TRIGGERS)
            db.pragma("user_version", SCHEMA_VERSION)
    while (version := db.pragma("user_version")) in _UPGRADES:
        with db:
            db.execute(_UPGRADES[version])
            db.pragma("user_version", version + 1)
