"""Opens the queue that the settings select, for a server or as a whole."""

from contextlib import AbstractContextManager
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict

from ref_server.config import ServeConfig
from ref_server.queue.interface import Queue
from ref_server.queue.postgres import whole as postgres
from ref_server.queue.postgres.store import PostgresQueue
from ref_server.queue.sqlite import whole as sqlite
from ref_server.queue.sqlite.store import SqliteQueue
from ref_server.queue.transaction import Database

_FILE = "queue.sqlite"


def open_queue(config: ServeConfig) -> Queue:
    """Raises StorageBroken when the store cannot be reached, is damaged, or belongs to another program."""
    bounds = {
        "limits": config.queue.limits,
        "retention_seconds": config.queue.retention_days * 86_400,
        "max_waiting_seconds": config.queue.max_waiting_days * 86_400,
    }
    if config.store == "sqlite":
        return SqliteQueue(config.data_dir / _FILE, min_free=config.queue.min_free, **bounds)
    return PostgresQueue(config.store, **bounds)


def reading(store: str, data_dir: Path) -> AbstractContextManager[Database]:
    """All that the store holds at one moment. Raises StorageBroken."""
    return sqlite.reading(data_dir / _FILE) if store == "sqlite" else postgres.reading(store)


def filling(store: str, data_dir: Path) -> AbstractContextManager[tuple[Database, float]]:
    """One transaction that fills the store, and the time on the clock of its leases. Raises StorageBroken."""
    return sqlite.filling(data_dir / _FILE) if store == "sqlite" else postgres.filling(store)


def describe_store(config: ServeConfig) -> str:
    """Where the queue is, for people. It leaves passwords out."""
    if config.store == "sqlite":
        return f"sqlite in {config.data_dir}"
    parts = conninfo_to_dict(config.store)
    return f"postgresql {parts.get('dbname', '')} on {parts.get('host', 'this machine')}:{parts.get('port', 5432)}"
