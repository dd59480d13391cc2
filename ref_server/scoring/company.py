"""Loops that score beside each other, and the one that has to be alone."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Company:
    """The loops of a process. One claims at a time.

    A batch with which a server ended is scored while no other is claimed: if it ends this server too, it alone was
    interrupted.
    """

    def __init__(self) -> None:
        self.claiming = threading.Lock()
        """Held by the loop that claims, until it works on what it has claimed."""
        self._changed = threading.Condition()
        self._working = 0

    @contextmanager
    def working(self) -> Iterator[None]:
        """Work on claimed batches."""
        with self._changed:
            self._working += 1
        try:
            yield
        finally:
            with self._changed:
                self._working -= 1
                self._changed.notify_all()

    def wait_until_alone(self) -> None:
        """Until no loop works. To be called by the one that claims: so none begins meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: not self._working)
