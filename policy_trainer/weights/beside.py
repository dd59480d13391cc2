"""Publishes beside training."""

import threading
from collections.abc import Callable

from policy_trainer.weights.model_copy import ModelCopy
from policy_trainer.weights.publication import Publication, Publisher

# A version on its way has so long to arrive once the run is asked to stop.
_ENDING_SECONDS = 10.0


class PublishedBeside:
    """Publishes in a thread, one version after the other: the trainer waits for none.

    Of those that wait only the newest is published.
    """

    def __init__(self, weights: Publisher) -> None:
        self._weights = weights
        self._changing = threading.Lock()
        self._waiting: tuple[ModelCopy, Publication] | None = None
        self._published: Publication | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def publish(self, copy: ModelCopy, publication: Publication) -> None:
        """Returns at once. Raises what went wrong with an earlier version."""
        self._raise_failure()
        with self._changing:
            self._waiting = copy, publication
            if self._thread is None:
                # A daemon: a request to a server that hangs cannot be broken off, and must not keep the process.
                self._thread = threading.Thread(target=self._publish_waiting, name="publish", daemon=True)
                self._thread.start()

    def lost(self) -> bool:
        """Whether the newest version was published and is gone. Raises what went wrong with one."""
        self._raise_failure()
        with self._changing:
            published = self._published if self._thread is None else None
        return published is not None and not self._weights.has(published)

    def describe(self) -> str:
        return self._weights.describe()

    def wait(self, check: Callable[[], None]) -> None:
        """Returns once the newest version is published. Raises what went wrong with one.

        check: called every few seconds; it may raise to stop.
        """
        while not self._ends_soon():
            check()
        self._raise_failure()

    def close(self) -> None:
        """Ends the thread after what it has begun, or without it where that takes long. What waits is not published."""
        with self._changing:
            self._waiting = None
        self._ends_soon()

    def _ends_soon(self) -> bool:
        with self._changing:
            thread = self._thread
        if thread is not None:
            thread.join(_ENDING_SECONDS)
        return thread is None or not thread.is_alive()

    def _publish_waiting(self) -> None:
        while (waiting := self._take()) is not None:
            try:
                self._weights.publish(*waiting)
                self._published = waiting[1]
            except BaseException as error:  # raised where the trainer asks
                self._failure = error

    def _take(self) -> tuple[ModelCopy, Publication] | None:
        with self._changing:
            waiting, self._waiting = self._waiting, None
            if waiting is None:
                self._thread = None
            return waiting

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
