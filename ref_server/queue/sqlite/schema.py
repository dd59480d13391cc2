"""The tables of the embedded queue. Opening a file creates them, or upgrades those of an older version."""

from pathlib import Path

import apsw

from ref_server.queue.errors import StorageBroken
from ref_server.queue.schema import SCHEMA_VERSION, create_tables

# By version: the SQL that makes a store of that version one of the next. A released step is never changed again, so its
# text is complete, even where the tables below say the same.
UPGRADES: dict[int, str] = {}

_TYPES = {
    "serial": "INTEGER PRIMARY KEY",
    "integer": "INTEGER",
    "real": "REAL",
    "text": "TEXT",
    "bytes": "BLOB",
    "flag": "INTEGER",
    "strict": "STRICT",
    "keyed": "STRICT, WITHOUT ROWID",
}

# The counts of batches: admission and statistics cost the same at any depth. Only the triggers below write them.
_DEPTHS = """
CREATE TABLE depths (
    state         TEXT NOT NULL,
    run           TEXT NOT NULL,
    uploader      TEXT NOT NULL,
    started       INTEGER NOT NULL,
    batches       INTEGER NOT NULL,
    payload_bytes INTEGER NOT NULL,
    PRIMARY KEY (state, run, uploader, started)
) STRICT, WITHOUT ROWID;
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

    Raises StorageBroken for a file of a newer version, or of one that there is no step from.
    """
    with db:
        version = db.pragma("user_version")
        if version == 0:
            db.execute(create_tables(_TYPES) + _DEPTHS + _TRIGGERS)
            version = SCHEMA_VERSION
        while version in UPGRADES:
            db.execute(UPGRADES[version])
            version += 1
        if version != SCHEMA_VERSION:
            raise StorageBroken(
                f"{path} has schema version {version}, this program reads {SCHEMA_VERSION}: "
                "install the version that wrote it, or choose another --data-dir"
            )
        db.pragma("user_version", SCHEMA_VERSION)
