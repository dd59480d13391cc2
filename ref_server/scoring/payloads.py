"""A stored body as the scoring loop sees it: token groups to score, and the body with their scores.

The queue holds bodies of several formats: a run has one. Each has a `Payload` of its own, so the loop knows none of the
formats.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ref_server.scoring.reference import Scores
from shared import wire
from shared.batch import BatchError, RolloutBatch, ScoredBatch, TokenGroup


class Payload(Protocol):
    """A stored body that waits for its scores."""

    @property
    def groups(self) -> Sequence[TokenGroup]:
        """The groups to score, at least one."""
        ...

    @property
    def temperatures(self) -> Sequence[float]:
        """The temperature of each group."""
        ...

    def scored(self, scores: Scores) -> bytes:
        """The body with the scores of its groups. Raises BatchError when they are not finite."""
        ...


@dataclass(frozen=True, eq=False)
class RolloutPayload:
    """A rollout batch: one group."""

    batch: RolloutBatch

    @property
    def groups(self) -> Sequence[TokenGroup]:
        return (self.batch.group,)

    @property
    def temperatures(self) -> Sequence[float]:
        return (self.batch.temperature,)

    def scored(self, scores: Scores) -> bytes:
        return wire.encode(scored_batch(self.batch, scores))


def scored_batch(batch: RolloutBatch, scores: Scores) -> ScoredBatch:
    """scores: of its one group. Raises BatchError when they are not finite."""
    (ref_logps,) = scores.logps
    (teacher_logps,) = scores.teacher_logps or [None]
    return ScoredBatch(batch, ref_logps, str(scores.reference_version), teacher_logps)


def register_reader(run: str, read: Callable[[bytes], Payload]) -> None:
    """Makes `read_payload` read the batches of a run that has a format of its own."""
    _READERS[run] = read


def read_payload(run: str, body: bytes) -> Payload:
    """A body as the queue stores it for a run. Raises BatchError when it is of another format, or damaged."""
    return _READERS.get(run, _read_rollout)(body)


def _read_rollout(body: bytes) -> Payload:
    batch = wire.decode(body)
    if not isinstance(batch, RolloutBatch):
        raise BatchError("format", f"must be {wire.ROLLOUT_FORMAT!r}: it is scored already")
    return RolloutPayload(batch)


_READERS: dict[str, Callable[[bytes], Payload]] = {}
