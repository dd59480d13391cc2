"""Publishes beside training."""

from concurrent.futures import Future, ThreadPoolExecutor

from policy_trainer.weights.model_copy import ModelCopy
from policy_trainer.weights.publication import Publication, Publisher


class PublishedBeside:
    """A `Publisher` whose versions a thread publishes, one version after the other: the trainer waits for none.

    Of those that wait only the newest is published.
    """

    def __init__(self, weights: Publisher) -> None:
        self._weights = weights
        self._thread = ThreadPoolExecutor(1, "publish")
        self._running: list[Future[None]] = []

    def publish(self, copy: ModelCopy, publication: Publication) -> None:
        """Returns at once. Raises what went wrong with an earlier version."""
        self._raise_failures()
        for older in self._running:
            older.cancel()  # unless it has begun
        self._running = [future for future in self._running if not future.done()]
        self._running.append(self._thread.submit(self._weights.publish, copy, publication))

    def describe(self) -> str:
        return self._weights.describe()

    def wait(self) -> None:
        """Returns once the newest version is published. Raises what went wrong with one."""
        self._thread.shutdown(wait=True)
        self._raise_failures()

    def close(self) -> None:
        """Ends the thread after what it has begun. What waits is not published."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _raise_failures(self) -> None:
        for future in self._running:
            if future.done() and not future.cancelled():
                future.result()
