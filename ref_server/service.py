"""What the server does, without HTTP: admits batches after checking them, has them scored, describes."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from ref_server.config import ServeConfig
from ref_server.queue.interface import Admission, Queue, StorageBroken, StorageFull, Upload
from ref_server.reference import Reference
from shared import wire
from shared.batch import BatchError, RolloutBatch, ScoredBatch, TokenGroup


class Bell:
    """Wakes every long poll when a batch may have become ready. Rung from any thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._event = asyncio.Event()

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """The event loop on which the polls wait."""
        self._loop = loop

    def ring(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)

    def next(self) -> asyncio.Event:
        """The event that the next ring sets. Take it before looking, so that no ring is missed."""
        return self._event

    def _wake(self) -> None:
        rung, self._event = self._event, asyncio.Event()
        rung.set()


class Service:
    """The reference, the queue, and what scores between them."""

    def __init__(self, reference: Reference, queue: Queue, config: ServeConfig) -> None:
        self.config = config
        self.reference = reference
        self.model = reference.describe()
        self.queue = queue
        self.bell = Bell()
        self.draining = False
        self.scoring = reference.scoring(queue, self.bell.ring)

    def start(self) -> None:
        self.bell.attach(asyncio.get_running_loop())
        self.scoring.start()

    def drain(self) -> None:
        """Takes no new work and sends the long polls home."""
        self.draining = True
        self.bell.ring()

    def close(self) -> None:
        self.scoring.stop()
        self.queue.close()

    def not_ready_reason(self) -> str | None:
        """Why a batch would not be scored now, or None."""
        if self.draining:
            return "the server is shutting down"
        if not self.scoring.alive:
            return "the scoring loop has ended"
        try:
            self.queue.check()
        except (StorageFull, StorageBroken) as error:
            return f"the queue cannot be written: {error}"
        return None

    def admit(self, body: bytes) -> tuple[str, Admission]:
        """Checks and queues one upload, durably: its id and what became of it."""
        batch = self.read_rollout(body)
        upload = Upload(
            id=batch.id,
            content_hash=wire.content_hash(body),
            run=batch.run,
            epoch=batch.epoch,
            policy_version=batch.policy_version,
            prompt_tokens=len(batch.group.prompt_ids),
            completion_tokens=len(batch.group.completion_ids),
            completions=batch.group.size,
            body=body,
            to_score=self.reference.scores_uploads,
        )
        admission = self.queue.put(upload)
        self.scoring.ring()
        return batch.id, admission

    def read_rollout(self, body: bytes) -> RolloutBatch:
        """Decodes a rollout batch and checks it against the reference. Raises BatchError, TooLarge."""
        batch = wire.decode(body)
        if not isinstance(batch, RolloutBatch):
            raise BatchError("format", f"must be {wire.ROLLOUT_FORMAT!r}: a batch is uploaded before it is scored")
        self.reference.check_tokens(batch.group)
        return batch

    def tokenize(self, prompt: str, completions: Sequence[str]) -> TokenGroup:
        """Texts -> tokens, each apart and without special tokens. Raises BatchError when one is empty, NoModel."""
        return group_of(self.reference.encode(prompt), [self.reference.encode(text) for text in completions])

    def token_texts(self, ids: Sequence[int]) -> list[str | None]:
        return [self.reference.decode([token]) for token in ids]

    def describe_tokens(self, id: str) -> dict[str, Any] | None:
        """For looking: what `GET /v1/batches/{id}/tokens` shows, or None when there is no payload."""
        body = self.queue.payload(id)
        if body is None:
            return None
        batch = wire.decode(body)
        rollout = batch.rollout if isinstance(batch, ScoredBatch) else batch
        ref_logps = batch.ref_logps if isinstance(batch, ScoredBatch) else None
        cuts = np.cumsum(rollout.group.completion_lengths)[:-1]

        def rows(values: Any) -> list[list[float] | None]:
            return [None] * rollout.group.size if values is None else [part.tolist() for part in np.split(values, cuts)]

        sampler, reference = rows(rollout.sampler_logps), rows(ref_logps)
        return {
            "id": id,
            "prompt": {
                "text": self.reference.decode(rollout.group.prompt_ids.tolist()),
                "ids": rollout.group.prompt_ids.tolist(),
            },
            "rows": [
                {
                    "text": self.reference.decode(ids.tolist()),
                    "ids": ids.tolist(),
                    "tokens": self.token_texts(ids.tolist()),
                    "sampler_logps": sampler[i],
                    "ref_logps": reference[i],
                    "reward": _number(rollout.rewards[i]),
                    "rewards": {name: _number(part[i]) for name, part in rollout.reward_parts.items()},
                    "finished": bool(rollout.finished[i]),
                }
                for i, ids in enumerate(rollout.group.completions())
            ],
        }


def group_of(prompt_ids: Sequence[int], completions: Sequence[Sequence[int]]) -> TokenGroup:
    """Lists of ids -> a checked group. Raises BatchError."""
    return TokenGroup(
        _ids("prompt_ids", prompt_ids),
        _ids("completions", [token for row in completions for token in row]),
        np.array([len(row) for row in completions], dtype=np.int64),
    )


def _ids(name: str, values: Sequence[int]) -> np.ndarray:
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:
        raise BatchError(name, "must be token ids") from None


def _number(value: Any) -> float | None:
    """JSON has no NaN: a completion that could not be judged shows null."""
    return None if np.isnan(value) else float(value)
