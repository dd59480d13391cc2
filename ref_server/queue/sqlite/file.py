"""The SQLite file of the embedded queue: its lock, the file systems it may be on, and how it is opened."""

import fcntl
from pathlib import Path
from typing import IO

import apsw
import psutil

from ref_server.queue.errors import StorageBroken
from ref_server.queue.indexes import ADDED_INDEXES
from ref_server.queue.sqlite.schema import create_or_upgrade

# Network file systems: WAL mode's shared memory and locks do not work on them, or not reliably.
_NETWORK = {"afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "smb3", "smbfs"}

# Older versions can reset the WAL while another connection reads it, a rare bug that loses data.
_OLDEST_SQLITE = (3, 51, 3)


def hold(path: Path) -> IO[bytes]:
    """Locks the data directory until the returned file is closed. Raises StorageBroken."""
    lock_path = path.with_name(path.name + ".lock")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # it holds all batches
        _refuse_network(path.parent)
        lock = lock_path.open("wb")
    except OSError as error:
        raise StorageBroken(f"data_dir: cannot write to {path.parent}: {error}; choose another --data-dir") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise StorageBroken(
            f"another process holds {path}; stop it, or choose another --data-dir ({lock_path.name}: {error})"
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
    db.set_busy_timeout(5000)  # in case someone reads the file with the sqlite3 shell
    db.pragma("journal_mode", "WAL")
    db.pragma("foreign_keys", True)
    db.pragma("fullfsync", True)  # macOS: a plain fsync stops at the drive's cache
    db.pragma("journal_size_limit", 64 * 2**20)  # truncates a WAL that grew during a burst
    create_or_upgrade(db, path)
    db.execute(ADDED_INDEXES)
