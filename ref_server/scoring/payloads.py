"""A stored body as the scoring loop sees it: token groups to score, and the body with their scores.

The queue holds bodies of several formats: a run has one. Each has a `Payload` of its own, so the loop knows none of the
formats.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

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

    def scored(self, logps: Sequence[np.ndarray], reference_version: str) -> bytes:
        """The body with the float32 (C,) log-probs of each group. Raises BatchError when they are not finite."""
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

    def scored(self, logps: Sequence[np.ndarray], reference_version: str) -> bytes:
        (ref_logps,) = logps
        return wire.encode(ScoredBatch(self.batch, ref_logps, reference_version))


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
