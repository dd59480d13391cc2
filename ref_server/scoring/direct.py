"""Direct requests for scores, and replacements of the weights, in one waiting line."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ref_server.metrics.totals import DeviceTotals
from ref_server.scoring.reference import Busy, NotReady, Replica, Scores
from shared.batch import BatchError, TokenGroup


@dataclass(frozen=True, eq=False)
class Direct:
    """A `Job` whose caller waits for the answer."""

    group: TokenGroup
    temperature: float
    totals: DeviceTotals
    answer: "Future[Scores]" = field(default_factory=Future)

    @property
    def groups(self) -> Sequence[TokenGroup]:
        return (self.group,)

    @property
    def temperatures(self) -> Sequence[float]:
        return (self.temperature,)

    def scored(self, scores: Scores) -> Callable[[], None]:
        if not all(np.isfinite(logps).all() for logps in (*scores.logps, *(scores.teacher_logps or ()))):
            raise BatchError("completion_ids", "have log-probs that are not finite: the model cannot compute them")
        return partial(self._deliver, scores)

    def fail(self, error: Exception) -> None:
        self.answer.set_exception(error)  # the caller raises it

    def _deliver(self, scores: Scores) -> None:
        self.totals.direct_tokens.inc(self.group.tokens)
        self.answer.set_result(scores)


@dataclass(frozen=True, eq=False)
class Replacement:
    """Replaces the weights for all later requests. answer: set once the old weights are no longer used."""

    replica: Replica
    answer: "Future[None]" = field(default_factory=Future)


class Line:
    """First come, first served. Any thread may join it; one thread serves it."""

    def __init__(self) -> None:
        self._waiting: deque[Direct | Replacement] = deque()
        self._served: list[Direct] = []
        self._closed = False
        self._joining = threading.Lock()  # a request that joined after the close would never get an answer

    def __len__(self) -> int:
        """How many wait, without those that are being served."""
        return len(self._waiting)

    def join(self, one: Direct | Replacement, *, most: int) -> None:
        """Raises NotReady once it is closed, Busy when `most` wait already."""
        with self._joining:
            if self._closed:
                raise NotReady("the server is shutting down")
            if len(self) >= most:
                raise Busy(f"{most} direct requests wait already")
            self._waiting.append(one)

    def close(self) -> None:
        """Refuses new requests. Waiting ones are still served."""
        with self._joining:
            self._closed = True

    def next_replacement(self) -> Replacement | None:
        """The replacement at the head of the line, if there is one: all before it have been taken."""
        if self._waiting and isinstance(first := self._waiting[0], Replacement):
            self._waiting.popleft()
            return first
        return None

    def take(self, max_tokens: int) -> list[Direct]:
        """The oldest requests: as many as fit max_tokens (P + C each), at least one, none behind a replacement."""
        self._served = []
        while self._waiting and isinstance(first := self._waiting[0], Direct):
            if self._served and first.group.tokens > max_tokens:
                break
            self._waiting.popleft()
            if first.answer.set_running_or_notify_cancel():
                max_tokens -= first.group.tokens
                self._served.append(first)
        return self._served

    def refuse_all(self) -> None:
        """Closes the line, and fails all unanswered requests with NotReady."""
        self.close()
        unanswered = [one for one in self._served if not one.answer.done()]
        for one in (*unanswered, *(one for one in self._waiting if one.answer.set_running_or_notify_cancel())):
            one.answer.set_exception(NotReady("the scoring loop has ended with an error"))
