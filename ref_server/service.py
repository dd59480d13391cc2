"""What the server does, without HTTP: admits batches after checking them against the model, scores, describes."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ref_server.config import ServeConfig
from ref_server.queue.interface import Admission, Queue, StorageBroken, StorageFull, Upload
from ref_server.scoring import Scorer, ScoringLoop
from shared import wire
from shared.batch import BatchError, RolloutBatch, ScoredBatch, TokenGroup
from shared.logprobs import choose_forward, embedding_rows
from shared.models import context_length, tokenizer_fingerprint

log = structlog.get_logger()


class TooLarge(ValueError):
    """A batch is longer than the server or the model takes."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field} {message}")
        self.field = field


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
    """The reference model, the queue, and the loop between them."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        queue: Queue,
        config: ServeConfig,
    ) -> None:
        forward = choose_forward(model)
        self.config = config
        self.tokenizer = tokenizer
        self.model = ModelInfo(
            name=config.model,
            revision=config.revision,
            vocabulary_size=embedding_rows(model),
            context_length=context_length(model),
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(model.device),
            reference_version=0,
            max_batch_tokens=config.max_batch_tokens,
            tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
            forward=forward.name,
        )
        log.info("reference model ready", **{k: v for k, v in vars(self.model).items() if k != "tokenizer_fingerprint"})
        self.queue = queue
        self.bell = Bell()
        self.draining = False
        self.scoring = ScoringLoop(
            Scorer(forward),
            self.queue,
            reference_version=str(self.model.reference_version),
            tokens_per_forward=config.scoring_tokens,
            on_ready=self.bell.ring,
        )

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
        )
        admission = self.queue.put(upload)
        self.scoring.ring()
        return batch.id, admission

    def read_rollout(self, body: bytes) -> RolloutBatch:
        """Decodes a rollout batch and checks it against the model. Raises BatchError, TooLarge."""
        batch = wire.decode(body)
        if not isinstance(batch, RolloutBatch):
            raise BatchError("format", f"must be {wire.ROLLOUT_FORMAT!r}: a batch is uploaded before it is scored")
        self.check_tokens(batch.group)
        return batch

    def check_tokens(self, group: TokenGroup) -> None:
        """Ids within the vocabulary, then lengths within what server and model take."""
        for name, ids in (("prompt_ids", group.prompt_ids), ("completion_ids", group.completion_ids)):
            if ids.min() < 0 or ids.max() >= self.model.vocabulary_size:
                raise BatchError(name, f"must lie in [0, {self.model.vocabulary_size}), the reference's vocabulary")
        if group.tokens > self.model.max_batch_tokens:
            raise TooLarge(
                "completion_ids",
                f"and the prompt have {group.tokens} tokens; max_batch_tokens is {self.model.max_batch_tokens}",
            )
        if self.model.context_length is not None and group.longest_row > self.model.context_length:
            raise TooLarge(
                "completion_lengths",
                f"and the prompt make a row of {group.longest_row} tokens; "
                f"the model's context is {self.model.context_length}",
            )

    def tokenize(self, prompt: str, completions: Sequence[str]) -> TokenGroup:
        """Texts -> tokens, each apart and without special tokens. Raises BatchError when one is empty."""
        texts = [self.tokenizer.encode(text, add_special_tokens=False) for text in (prompt, *completions)]
        return group_of(texts[0], texts[1:])

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        return [str(self.tokenizer.decode([token])) for token in ids]

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
                "text": self.tokenizer.decode(rollout.group.prompt_ids.tolist()),
                "ids": rollout.group.prompt_ids.tolist(),
            },
            "rows": [
                {
                    "text": self.tokenizer.decode(ids.tolist()),
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
