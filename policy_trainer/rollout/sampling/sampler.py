"""The protocols of samplers, and the sampling parameters of one call."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policy_trainer.config import CommonConfig, LoraConfig, SamplingConfig
from policy_trainer.config.sampling import MOST_KEPT
from policy_trainer.data.completion import Completion
from policy_trainer.data.prompts import EncodedPrompt
from shared.batch import TokenGroup
from shared.client.retry import OnWait
from shared.errors import UserError


@dataclass(frozen=True)
class SamplingParams:
    """num_generations: completions per prompt. temperature: 0 is greedy. top_p 1, top_k 0, min_p 0 and
    repetition_penalty 1 turn these off. sampling_masks: completions have one each; temperature is then above 0."""

    num_generations: int
    max_completion_length: int
    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    sampling_masks: bool = False


def training_params(config: CommonConfig) -> SamplingParams:
    """Parameters of the completions that are trained on."""
    sampling = config.sampling
    params = sampling_params(sampling)
    if not (sampling.leaves_tokens_out and config.sampler_traits.sampling_masks):
        return params
    return replace(params, sampling_masks=True, top_k=sampling.top_k or MOST_KEPT)


def sampling_params(
    config: SamplingConfig, *, num_generations: int | None = None, temperature: float | None = None
) -> SamplingParams:
    """Returns the configured parameters. The arguments override them; only an argument can set temperature to 0."""
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
    """A batch of sequences that are sampled together. Each sequence is a row; rows join and leave at any time."""

    def add(self, rows: Sequence[int], prompt: EncodedPrompt, max_tokens: int) -> None:
        """Starts a completion of at most max_tokens >= 1 tokens for each row. The rows share one prefill of the prompt.
        rows: numbers that the caller chooses, none of which is in the batch yet."""
        ...

    def advance(self) -> list[tuple[int, Completion]]:
        """Continues sampling, and returns the finished rows, each with what was sampled since `add`.

        It returns at once if there are no rows, and otherwise soon, perhaps with an empty list: the caller has other
        work to do in between.
        """
        ...

    def __len__(self) -> int:
        """The number of unfinished rows."""
        ...


class Sampler(Protocol):
    """Samples rows that join and leave a running batch; `sample` is a function on top of it.

    An engine that only completes whole prompts can complete all rows of its batch in one `advance`:

        class Batch:
            def __init__(self): self.rows = []
            def __len__(self): return len(self.rows)
            def add(self, rows, prompt, max_tokens): self.rows += [(row, prompt, max_tokens) for row in rows]
            def advance(self):
                rows, self.rows = self.rows, []
                return [(row, complete(prompt, max_tokens)) for row, prompt, max_tokens in rows]

    and its `running_batch` returns `contextlib.nullcontext(Batch())`.
    """

    def load(self, model: Path) -> None:
        """Loads published weights from a Hugging Face model directory. Raises OSError if it cannot be read."""
        ...

    def logps(self, group: TokenGroup) -> np.ndarray:
        """Returns float32 (C,): log-probs of a group's completion tokens under the loaded weights, at temperature 1."""
        ...

    def running_batch(self, params: SamplingParams, seed: int) -> AbstractContextManager[RunningBatch]:
        """Opens an empty batch. It ignores num_generations and max_completion_length of the parameters: `add` says how
        many rows there are and how long they may become.

        Each completion has the log-prob of every token at params.temperature, if that is above 0: the loss needs them.
        """
        ...


def sample(
    sampler: Sampler,
    prompts: Sequence[EncodedPrompt],
    params: SamplingParams,
    seed: int,
    on_progress: Callable[[int], None] = lambda ended: None,
) -> list[list[Completion]]:
    """Samples num_generations completions for each prompt. Returns them in the order of the prompts.

    on_progress: called after each token with the number of completions that have ended; may raise.
    """
    size = params.num_generations
    ended: dict[int, Completion] = {}
    with sampler.running_batch(params, seed) as batch:
        for place, prompt in enumerate(prompts):
            batch.add(range(place * size, (place + 1) * size), prompt, params.max_completion_length)
        while len(batch):
            ended |= dict(batch.advance())
            on_progress(len(ended))
    return [[ended[place * size + row] for row in range(size)] for place in range(len(prompts))]


# The sampler, and the model that it samples from, on the meta device if another process or library holds the weights.
LoadedSampler: TypeAlias = tuple[Sampler, PreTrainedModel]


class ConfiguredSampler(Sampler, Protocol):
    """A sampler that the setting `sampler` can name: one from `config/samplers.py`, or a `module:Class`."""

    @classmethod
    def from_config(
        cls, config: CommonConfig, tokenizer: PreTrainedTokenizerBase, on_wait: OnWait, lora: LoraConfig
    ) -> LoadedSampler:
        """Creates the sampler, with the weights of config.model.

        on_wait: called while a server does not answer; it may raise to give up. lora: settings of the adapters that
        will be loaded; their rank is 0 if whole models will be. Raises UserError if the model or the engine cannot be
        used.
        """
        ...

    @classmethod
    def check_engine(cls, config: CommonConfig, lora_rank: int) -> None:
        """Raises UserError if this machine lacks the engine, or its server cannot be used. Loads no weights."""
        ...


@runtime_checkable
class Sleeper(Protocol):
    """A sampler whose engine can release its device memory for a while (vLLM's sleep mode), and keeps its weights."""

    @classmethod
    def free_device(cls, config: CommonConfig) -> None:
        """Releases the engine's device memory before the trainer's turn on the device. The trainer calls it, since
        perhaps no worker has put the engine to sleep."""
        ...

    def sleep(self) -> None: ...

    def wake_up(self) -> None:
        """Called before the sampler loads, samples or scores again."""
        ...
