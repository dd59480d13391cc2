"""What the weights hold and the server does not know of yet."""

import threading
from collections.abc import Iterable


class Ledger:
    """Ids of batches whose effect is in the weights and whose ack was not answered yet. Safe to share."""

    def __init__(self, ids: Iterable[str] = ()) -> None:
        self._ids = set(ids)
        self._lock = threading.Lock()

    def add(self, ids: Iterable[str]) -> None:
        with self._lock:
            self._ids.update(ids)

    def remove(self, ids: Iterable[str]) -> None:
        with self._lock:
            self._ids.difference_update(ids)

    def __contains__(self, id: str) -> bool:
        with self._lock:
            return id in self._ids

    def ids(self) -> list[str]:
        with self._lock:
            return sorted(self._ids)
