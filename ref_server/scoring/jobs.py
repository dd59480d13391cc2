"""What a scoring loop works on: bodies from the queue, in the format of their run, and direct requests."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ref_server.metrics import DeviceTotals
from ref_server.queue.records import Claim
from ref_server.scoring.reference import Busy, NotReady, Replica, Scores, most_tokens
from shared import wire
from shared.batch import BatchError, TokenGroup

# The groups of a stored body, at least one, and a temperature for each.
Groups = tuple[Sequence[TokenGroup], Sequence[float]]


def register_reader(run: str, read: Callable[[bytes], Groups]) -> None:
    """Makes `read_payload` read the batches of a run that has its own format."""
    _READERS[run] = read


def read_payload(run: str, body: bytes) -> Groups:
    """A body as the queue stores it for a run. Raises BatchError when it is of another format, or damaged."""
    return _READERS.get(run, _read_batch)(body)


def encode_scores(groups: Sequence[TokenGroup], scores: Scores) -> bytes:
    """The scores of a stored body's groups, one after the other. Raises BatchError when they are not finite."""
    by_teacher = scores.by_teacher
    if by_teacher and len(by_teacher) < len(groups):
        raise BatchError("teacher_prompt_ids", "must be in all groups of a body, or in none")
    return wire.encode_scores(
        np.concatenate(scores.logps),
        str(scores.reference_version),
        np.concatenate(by_teacher) if by_teacher else None,
        images=any(group.images for group in groups),
    )


def _read_batch(body: bytes) -> Groups:
    batch = wire.decode(body)
    if batch.ref_logps is not None:
        raise BatchError("format", f"must be {wire.ROLLOUT_FORMAT!r}: it is scored already")
    return (batch.group,), (batch.temperature,)


_READERS: dict[str, Callable[[bytes], Groups]] = {}


@dataclass(frozen=True, eq=False)
class ClaimedBatch:
    """A batch from the queue. complete: stores its scores. give_up: records that it cannot be scored.

    groups, temperatures: what `read_payload` returned.
    """

    claim: Claim
    claimed_at: float
    complete: "Callable[[ClaimedBatch, bytes], None]"
    give_up: Callable[[Claim, Exception], None]
    groups: Sequence[TokenGroup]
    temperatures: Sequence[float]
    likeliest = False

    def scored(self, scores: Scores) -> Callable[[], None]:
        """Returns a function that delivers the scores. Raises BatchError when they are not finite."""
        return partial(self.complete, self, encode_scores(self.groups, scores))

    def fail(self, error: Exception) -> None:
        self.give_up(self.claim, error)


@dataclass(frozen=True, eq=False)
class DirectRequest:
    """Groups whose log-probs a caller waits for. likeliest: whether it also wants the likeliest tokens."""

    groups: Sequence[TokenGroup]
    temperature: float
    likeliest: bool
    totals: DeviceTotals
    answer: "Future[Scores]" = field(default_factory=Future)

    @property
    def tokens(self) -> int:
        return sum(map(most_tokens, self.groups))

    @property
    def temperatures(self) -> Sequence[float]:
        return [self.temperature] * len(self.groups)

    def scored(self, scores: Scores) -> Callable[[], None]:
        if not all(np.isfinite(logps).all() for logps in (*scores.logps, *scores.by_teacher)):
            raise BatchError("completion_ids", "have log-probs that are not finite: the model cannot compute them")
        return partial(self._deliver, scores)

    def fail(self, error: Exception) -> None:
        self.answer.set_exception(error)  # the caller raises it

    def _deliver(self, scores: Scores) -> None:
        self.totals.direct_tokens.inc(self.tokens)
        self.answer.set_result(scores)


# Groups that are scored together, in one forward.
Job = DirectRequest | ClaimedBatch


def tokens_of(jobs: Sequence[Job]) -> int:
    """Tokens of all groups in one forward, each prompt counted once."""
    return sum(most_tokens(group) for job in jobs for group in job.groups)


@dataclass(frozen=True, eq=False)
class Replacement:
    """Replaces the weights for all later requests. answer: set once the old weights are no longer used."""

    replica: Replica
    answer: "Future[None]" = field(default_factory=Future)


class DirectRequests:
    """Direct requests and replacements of the weights, first come, first served.

    Any thread may add one; a single thread takes them.
    """

    def __init__(self) -> None:
        self._waiting: deque[DirectRequest | Replacement] = deque()
        self._taken: list[DirectRequest] = []
        self._closed = False
        self._adding = threading.Lock()  # a request that was added after the close would never get an answer

    def __len__(self) -> int:
        """How many wait, without those that are being scored."""
        return len(self._waiting)

    def add(self, request: DirectRequest | Replacement, *, most: int) -> None:
        """Raises NotReady once it is closed, Busy when `most` wait already."""
        with self._adding:
            if self._closed:
                raise NotReady("the server is shutting down")
            if len(self) >= most:
                raise Busy(f"{most} direct requests wait already")
            self._waiting.append(request)

    def close(self) -> None:
        """Refuses new requests. Waiting ones are still answered."""
        with self._adding:
            self._closed = True

    def next_replacement(self) -> Replacement | None:
        """The replacement that is first in line, if there is one: all requests before it have been taken."""
        if self._waiting and isinstance(first := self._waiting[0], Replacement):
            self._waiting.popleft()
            return first
        return None

    def take(self, max_tokens: int) -> list[DirectRequest]:
        """The oldest requests: as many as fit max_tokens (P + C each), at least one, none behind a replacement."""
        self._taken = []
        while self._waiting and isinstance(first := self._waiting[0], DirectRequest):
            if self._taken and first.tokens > max_tokens:
                break
            self._waiting.popleft()
            if first.answer.set_running_or_notify_cancel():
                max_tokens -= first.tokens
                self._taken.append(first)
        return self._taken

    def refuse_all(self) -> None:
        """Closes the line, and fails all unanswered requests with NotReady."""
        self.close()
        unanswered = [request for request in self._taken if not request.answer.done()]
        waiting = (request for request in self._waiting if request.answer.set_running_or_notify_cancel())
        for request in (*unanswered, *waiting):
            request.answer.set_exception(NotReady("the scoring loop has ended with an error"))


class ScoringGate:
    """Coordinates the scoring loops of a process. One claims at a time.

    A batch with which a server ended is scored while no other is claimed: if it ends this server too, only
    this batch was interrupted.
    """

    def __init__(self) -> None:
        self.claiming = threading.Lock()
        """Held by the loop that claims, until it works on what it has claimed."""
        self._changed = threading.Condition()
        self._working = 0

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Around work on claimed batches."""
        with self._changed:
            self._working += 1
        try:
            yield
        finally:
            with self._changed:
                self._working -= 1
                self._changed.notify_all()

    def wait_until_alone(self) -> None:
        """Waits until no loop works. Call it while claiming, so that none begins meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: not self._working)
