"""The sampler protocol, and the parameters of one call."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policy_trainer.config import CommonConfig, LoraConfig, SamplingConfig
from policy_trainer.data.completion import Completion
from policy_trainer.data.prompts import EncodedPrompt
from shared.batch import TokenGroup
from shared.client.connection import OnWait
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


# The sampler, and the sampled model; its weights are on the meta device if another program or library has them.
LoadedSampler: TypeAlias = tuple[Sampler, PreTrainedModel]


class ConfiguredSampler(Sampler, Protocol):
    """A sampler that the setting `sampler` can name, in `config/samplers.py` or as `module:Class`."""

    @classmethod
    def from_config(
        cls, config: CommonConfig, tokenizer: PreTrainedTokenizerBase, on_wait: OnWait, lora: LoraConfig
    ) -> LoadedSampler:
        """The sampler, with the weights of config.model.

        on_wait: called while a server does not answer; it may raise to give up. lora: of the adapters that will be
        loaded; its rank is 0 if whole models will be. Raises UserError for a model or an engine that cannot be used.
        """
        ...

    @classmethod
    def check_engine(cls, config: CommonConfig, lora_rank: int) -> None:
        """Raises UserError if this machine lacks the engine, or its server cannot be used. Loads no weights."""
        ...


@runtime_checkable
class Sleeper(Protocol):
    """A sampler whose engine can release its memory on the device for a while. It keeps its weights."""

    @classmethod
    def free_device(cls, config: CommonConfig) -> None:
        """The trainer calls it before its turn on the device: no worker may have put the engine to sleep."""
        ...

    def sleep(self) -> None: ...

    def wake_up(self) -> None:
        """Called before the sampler loads, samples or scores again."""
        ...
