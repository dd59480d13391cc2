"""Opens the queue that the settings select."""

from psycopg.conninfo import conninfo_to_dict

from ref_server.config import ServeConfig
from ref_server.queue.postgres.store import PostgresQueue
from ref_server.queue.queue import Queue
from ref_server.queue.sqlite.store import SqliteQueue

QUEUE_FILE = "queue.sqlite"


def open_queue(config: ServeConfig) -> Queue:
    """Raises StorageBroken when the store cannot be reached, is damaged, or belongs to another program."""
    bounds = {
        "limits": config.queue.limits,
        "retention_seconds": config.queue.retention_days * 86_400,
        "max_waiting_seconds": config.queue.max_waiting_days * 86_400,
    }
    if config.store == "sqlite":
        return SqliteQueue(config.data_dir / QUEUE_FILE, min_free=config.queue.min_free, **bounds)
    return PostgresQueue(config.store, **bounds)


def describe_store(config: ServeConfig) -> str:
    """Where the queue is, for people. It leaves passwords out."""
    if config.store == "sqlite":
        return f"sqlite in {config.data_dir}"
    parts = conninfo_to_dict(config.store)
    return f"postgresql {parts.get('dbname', '')} on {parts.get('host', 'this machine')}:{parts.get('port', 5432)}"
