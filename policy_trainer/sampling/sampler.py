"""The sampler protocol, and the parameters of one call."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from policy_trainer.config import SamplingConfig
from policy_trainer.data.completion import Completion
from policy_trainer.data.prompts import EncodedPrompt
from shared.batch import TokenGroup
from shared.errors import UserError


@dataclass(frozen=True)
class SamplingParams:
    """num_generations: completions per prompt. temperature: 0 is greedy. top_p 1, top_k 0, min_p 0 and
    repetition_penalty 1 are off."""

    num_generations: int
    max_completion_length: int
    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


def sampling_params(
    config: SamplingConfig, *, num_generations: int | None = None, temperature: float | None = None
) -> SamplingParams:
    """The configured parameters. The two arguments override them; only an argument can set temperature 0."""
    return SamplingParams(
        num_generations=config.num_generations if num_generations is None else num_generations,
        max_completion_length=config.max_completion_length,
        temperature=config.temperature if temperature is None else temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        repetition_penalty=config.repetition_penalty,
        stop=tuple(config.stop),
        stop_token_ids=tuple(config.stop_token_ids),
    )


class WeightsLost(UserError):
    """The engine no longer has the weights that were loaded. A worker then loads the newest and continues."""


class RunningBatch(Protocol):
    """Rows that are sampled together. Rows join and leave at any time."""

    def add(self, rows: Sequence[int], prompt: EncodedPrompt, max_tokens: int) -> None:
        """Starts a completion of at most max_tokens >= 1 tokens for each row. They share the prompt, which is computed
        once. rows: the caller's numbers, none of them in the batch."""
        ...

    def advance(self) -> list[tuple[int, Completion]]:
        """Samples on, and returns the rows that have ended, each with what was sampled since `add`.

        Returns at once if there are no rows, and otherwise soon, perhaps without any: the caller has other work, too.
        """
        ...

    def __len__(self) -> int:
        """Rows that have not ended."""
        ...


class Sampler(Protocol):
    def load(self, model: Path) -> None:
        """Loads the published weights in a Hugging Face model directory. Raises OSError if it cannot be read."""
        ...

    def logps(self, group: TokenGroup) -> np.ndarray:
        """(C,) float32 log-probs of a group's completion tokens under the loaded weights, at temperature 1."""
        ...

    def sample(self, prompts: Sequence[EncodedPrompt], params: SamplingParams, seed: int) -> list[list[Completion]]:
        """num_generations completions for each prompt, in the prompts' order."""
        ...

    def running_batch(self, params: SamplingParams, seed: int) -> AbstractContextManager[RunningBatch]:
        """An empty batch. num_generations and max_completion_length are not used."""
        ...


@runtime_checkable
class Sleeper(Protocol):
    """A sampler whose engine can release its memory on the device for a while. It keeps its weights."""

    def sleep(self) -> None: ...

    def wake_up(self) -> None:
        """Called before the sampler loads, samples or scores again."""
        ...
