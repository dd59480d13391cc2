"""What a thread does for others between its own work, one after the other; each who asks gets a future."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from ref_server.scoring.reference import NotReady

T = TypeVar("T")


@dataclass(frozen=True)
class _Errand:
    work: Callable[[], Any]
    answer: Future[Any]


class Errands:
    """Asked for from any thread, run by one. fatal: what ends that thread, and is not the answer to one errand."""

    def __init__(self, fatal: type[Exception]) -> None:
        self._fatal = fatal
        self._waiting: deque[_Errand] = deque()
        self._closed = False
        self._door = threading.Lock()  # none may slip in once it is closed, or nobody would ever answer it

    def __len__(self) -> int:
        """How many wait, besides the one that is run."""
        return len(self._waiting)

    def ask(self, work: Callable[[], T]) -> "Future[T]":
        """A future of what `work` returns. Raises NotReady once it is closed."""
        errand = _Errand(work, Future())
        with self._door:
            if self._closed:
                raise NotReady("the server is shutting down")
            self._waiting.append(errand)
        return errand.answer

    def close(self) -> None:
        """Takes no more. Those who wait are still served."""
        with self._door:
            self._closed = True

    def run_next(self) -> bool:
        """Runs the oldest that waits; False when there was none. Raises what is fatal, and what is no Exception."""
        if not self._waiting:
            return False
        errand = self._waiting.popleft()
        if not errand.answer.set_running_or_notify_cancel():
            return True
        try:
            errand.answer.set_result(errand.work())
        except BaseException as error:
            if isinstance(error, self._fatal) or not isinstance(error, Exception):
                errand.answer.set_exception(_ended())
                raise
            errand.answer.set_exception(error)  # belongs to whoever asked
        return True

    def refuse_all(self) -> None:
        """Closes, and tells all who wait that nobody will come: NotReady."""
        self.close()
        for errand in self._waiting:
            if errand.answer.set_running_or_notify_cancel():
                errand.answer.set_exception(_ended())


def _ended() -> NotReady:
    return NotReady("the scoring loop has ended by an error")
