"""The interface of a reference model. `frozen_model.py` implements it with a model, `no_model.py` without."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np

from ref_server.metrics.totals import ScoringTotals
from ref_server.queue.queue import Queue
from shared.api import ModelInfo
from shared.batch import TokenGroup


class TooLarge(ValueError):
    """A batch is longer than the server or the model takes."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field} {message}")
        self.field = field


class Busy(Exception):
    """Too many direct requests wait already."""


class NoModel(Exception):
    """The request needs a reference model, and there is none."""


class NotReady(Exception):
    """The server is shutting down and takes no new work."""


class DeviceLost(Exception):
    """The model's device has failed for good: only a new process can use it."""


class BadSnapshotName(ValueError):
    """The name of a snapshot is not that of a directory below the root."""


class NoSnapshot(Exception):
    """There is no snapshot of that name."""


class ReferenceConflict(Exception):
    """The reference cannot be replaced by this snapshot. code: the API's error code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Scores:
    """float32 (C,) log-probs of each group, and the version of the weights that computed them all.

    splits: how often a forward was halved because memory ran out. teacher_logps: the same groups' by the teacher; None
    without one.
    """

    logps: list[np.ndarray]
    reference_version: int
    splits: int = 0
    teacher_logps: list[np.ndarray] | None = None

    def shares(self, sizes: Iterable[int]) -> "Iterator[Scores]":
        """Those of the first so many groups, of the next, and so on."""
        for start, end in pairwise(accumulate(sizes, initial=0)):
            taught = None if self.teacher_logps is None else self.teacher_logps[start:end]
            yield Scores(self.logps[start:end], self.reference_version, teacher_logps=taught)


class Scoring(Protocol):
    """Scores uploads, and direct requests. `ScoringLoops` does it; `NoScoring` stands in where there is no model."""

    totals: ScoringTotals

    def start(self) -> None: ...

    def stop(self) -> None:
        """Takes nothing new, and finishes the current work. Returns at once; `alive` is False when that is done."""
        ...

    def join(self) -> None:
        """After `stop`: waits until the current work is finished."""
        ...

    @property
    def alive(self) -> bool:
        """Whether it scores on any device."""
        ...

    @property
    def failed(self) -> bool:
        """Whether it ended by an error, on any device. Only a new process can then score there."""
        ...

    def ring(self) -> None:
        """Wakes the scoring. Call it after an upload was admitted."""
        ...

    def submit(self, group: TokenGroup, temperature: float) -> "Future[Scores]":
        """A future of one group's scores. Raises Busy, NoModel, NotReady."""
        ...

    def replace(self, replicas: Sequence["Replica"]) -> None:
        """Scores with other replicas from now on, as many. Returns once the old ones are no longer used.

        Raises what `submit` raises.
        """
        ...


class Replica(Protocol):
    """Frozen weights that compute log-probs."""

    version: int
    device: str
    """Where the weights are, for people."""

    def score(self, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> Scores:
        """Scores groups now, in the caller's thread. Raises TooLarge, DeviceLost."""
        ...


class Reference(Protocol):
    scores_uploads: bool
    """Whether an upload is scored before it is leased."""
    info: ModelInfo
    """Its description for clients."""
    version: int
    """Of its weights: 0 for those of `--model`, until others replace them."""
    base: str
    """Fingerprint of the weights of `--model`, which no replacement changes."""

    def check_tokens(self, group: TokenGroup) -> None:
        """Ids, then lengths. Raises BatchError, TooLarge."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens. Raises NoModel."""
        ...

    def decode(self, ids: Sequence[int]) -> str | None:
        """The text of tokens; None without a tokenizer."""
        ...

    def token_texts(self, ids: Sequence[int]) -> Sequence[str | None]:
        """The text of each token alone; None without a tokenizer."""
        ...

    @property
    def replicas(self) -> "Sequence[Replica]":
        """What scores with these weights: one or several, none without a model."""
        ...

    def replacement(self, snapshot: str | None, version: int) -> "Reference":
        """Loads a reference with the weights of a snapshot below the root; None: of `--model`.

        This one does not change. Returns itself if it has that snapshot in that version already. Raises NoModel,
        BadSnapshotName, NoSnapshot, ReferenceConflict.
        """
        ...

    def scoring(self, queue: Queue, on_ready: Callable[[], None]) -> Scoring:
        """A `Scoring` for the batches of a queue. on_ready is called from any thread when batches become ready."""
        ...


def check_size(group: TokenGroup, max_batch_tokens: int) -> None:
    """Raises TooLarge."""
    if group.tokens > max_batch_tokens:
        raise TooLarge(
            "completion_ids", f"and the prompt have {group.tokens} tokens; max_batch_tokens is {max_batch_tokens}"
        )
