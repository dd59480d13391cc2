"""Opens the queue that the settings ask for."""

from ref_server.config import ServeConfig
from ref_server.queue.interface import Queue
from ref_server.queue.postgres import PostgresQueue
from ref_server.queue.sqlite import SqliteQueue


def open_queue(config: ServeConfig) -> Queue:
    """Raises StorageBroken when the store cannot be reached, is damaged, or is somebody else's."""
    bounds = {"limits": config.queue.limits, "retention_seconds": config.queue.retention_days * 86_400}
    if config.store == "sqlite":
        return SqliteQueue(config.data_dir / "queue.sqlite", **bounds)
    return PostgresQueue(config.store, **bounds)
