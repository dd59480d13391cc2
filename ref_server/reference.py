"""What the service asks of a reference model, whether there is one (`frozen_model.py`) or not (`no_model.py`)."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ref_server.queue.interface import Queue
from shared.batch import BatchError, TokenGroup


class TooLarge(ValueError):
    """A batch is longer than the server or the model takes."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field} {message}")
        self.field = field


class Busy(Exception):
    """Too many direct requests wait already."""


class NoModel(Exception):
    """What was asked for needs a reference model, and there is none."""


@dataclass(frozen=True)
class ModelInfo:
    """What a client must know of the reference model."""

    name: str
    revision: str | None
    vocabulary_size: int
    context_length: int | None
    dtype: str
    device: str
    reference_version: int
    max_batch_tokens: int
    tokenizer_fingerprint: str
    forward: str


@dataclass
class ScoringTotals:
    """What has been scored since the server started; seconds of working and of waiting for work."""

    batches: int = 0
    tokens: int = 0
    errors: int = 0
    working_seconds: float = 0.0
    waiting_seconds: float = 0.0


class Scoring(Protocol):
    """What becomes of uploads, and of those who want their scores at once."""

    totals: ScoringTotals

    def start(self) -> None: ...

    def stop(self) -> None: ...

    @property
    def alive(self) -> bool: ...

    def ring(self) -> None:
        """Says that there is work. Call it after an upload was admitted."""
        ...

    def submit(self, group: TokenGroup, temperature: float) -> "Future[np.ndarray]":
        """A future of a group's float32 (C,) log-probs. Raises Busy, NoModel."""
        ...


class Reference(Protocol):
    scores_uploads: bool
    """Whether an upload is scored before it is leased."""

    def describe(self) -> dict[str, Any]:
        """What a client must know: a `ModelInfo`, null where there is nothing to say."""
        ...

    def check_tokens(self, group: TokenGroup) -> None:
        """Ids, then lengths. Raises BatchError, TooLarge."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens. Raises NoModel."""
        ...

    def decode(self, ids: Sequence[int]) -> str | None:
        """The text of tokens; None where nobody knows it."""
        ...

    def scoring(self, queue: Queue, on_ready: Callable[[], None]) -> Scoring:
        """What scores the batches of a queue. on_ready is called, from any thread, when batches have become ready."""
        ...


def check_size(group: TokenGroup, max_batch_tokens: int) -> None:
    """Raises TooLarge."""
    if group.tokens > max_batch_tokens:
        raise TooLarge(
            "completion_ids", f"and the prompt have {group.tokens} tokens; max_batch_tokens is {max_batch_tokens}"
        )


def check_ids(group: TokenGroup, vocabulary: int, whose: str) -> None:
    """Raises BatchError unless every id lies in [0, vocabulary)."""
    for name, ids in (("prompt_ids", group.prompt_ids), ("completion_ids", group.completion_ids)):
        if ids.min() < 0 or ids.max() >= vocabulary:
            raise BatchError(name, f"must lie in [0, {vocabulary}), {whose}")
