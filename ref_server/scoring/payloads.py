"""A stored body as the scoring loop sees it: token groups to score, and the body with their scores.

The queue holds bodies of several formats. Each has a `Payload` of its own, so the loop knows none of the formats.
"""

import json
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


def register_reader(format: str, read: Callable[[bytes], Payload]) -> None:
    """Makes `read_payload` read another format."""
    _READERS[format] = read


def read_payload(body: bytes) -> Payload:
    """A body as the queue stores it. Raises BatchError when it is of no known format, or damaged."""
    format = _format(body)
    if format not in _READERS:
        raise BatchError("format", f"must be {' or '.join(map(repr, _READERS))}, got {format[:40]!r}")
    return _READERS[format](body)


def _read_rollout(body: bytes) -> Payload:
    batch = wire.decode(body)
    assert isinstance(batch, RolloutBatch), "its format says so"
    return RolloutPayload(batch)


_READERS: dict[str, Callable[[bytes], Payload]] = {wire.ROLLOUT_FORMAT: _read_rollout}


def _format(body: bytes) -> str:
    """The format that the safetensors metadata names. The format's own reader checks the rest."""
    size = int.from_bytes(body[:8], "little")
    try:
        return str(json.loads(body[8 : 8 + size])["__metadata__"]["format"])
    except (ValueError, KeyError, TypeError):
        raise BatchError("body", "must be a safetensors file whose metadata names its format") from None
