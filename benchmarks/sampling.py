"""Sampling groups of completions: ours compared with transformers' generate.

Tokens are those of the completions up to and including EOS; computation for rows that have ended does not count. Each
side is a process with one thread, and the sides take turns.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from benchmarks import measure
from policy_trainer.cli.demo.base_model import cached_base_model, make_tokenizer
from policy_trainer.config import DataConfig
from policy_trainer.data.completion import Completion, group_tokens
from policy_trainer.data.prompts import EncodedPrompt, PromptEncoder
from policy_trainer.data.tasks.arithmetic import Arithmetic
from policy_trainer.rollout.sampling.hf import HFSampler
from policy_trainer.rollout.sampling.sampler import SamplingParams, sample
from shared.logprobs import PlainForward
from shared.models import load_model

PAD, EOS = 0, 1


@dataclass(frozen=True)
class Shape:
    name: str
    make_model: Callable[[], PreTrainedModel]
    make_prompts: Callable[[], list[list[int]]]
    num_generations: int
    max_completion_length: int
    repetitions: int

    def config(self, *, sampled: bool, **outputs: bool) -> GenerationConfig:
        choice: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} if sampled else {}
        return GenerationConfig(
            do_sample=sampled,
            max_new_tokens=self.max_completion_length,
            num_return_sequences=self.num_generations if sampled else 1,
            pad_token_id=PAD,
            eos_token_id=EOS,
            **choice,
            **outputs,
        )


class Side(Protocol):
    def sample(self, seed: int) -> list[Completion]:
        """All completions, sampled at temperature 1; without log-probs where a side captures none."""
        ...

    def greedy(self) -> list[Completion]:
        """One for each prompt."""
        ...


class Ours:
    def __init__(self, shape: Shape) -> None:
        model = shape.make_model()
        assert model.generation_config is not None
        model.generation_config.eos_token_id = EOS
        self._sampler = HFSampler(model, SimpleNamespace(eos_token_id=EOS))  # type: ignore[arg-type]
        self._prompts = shape.make_prompts()
        self._shape = shape

    def _sample(self, params: SamplingParams, seed: int) -> list[Completion]:
        return [
            completion
            for group in sample(self._sampler, list(map(EncodedPrompt, self._prompts)), params, seed)
            for completion in group
        ]

    def sample(self, seed: int) -> list[Completion]:
        return self._sample(SamplingParams(self._shape.num_generations, self._shape.max_completion_length, 1.0), seed)

    def greedy(self) -> list[Completion]:
        return self._sample(SamplingParams(1, self._shape.max_completion_length, 0.0), 0)


class Generate:
    """transformers' generate, without log-probs."""

    def __init__(self, shape: Shape) -> None:
        self._model: Any = shape.make_model()
        self._shape = shape
        prompts = shape.make_prompts()
        self._width = max(map(len, prompts))
        self._ids = torch.tensor([[PAD] * (self._width - len(prompt)) + prompt for prompt in prompts])
        self._mask = torch.tensor([[0] * (self._width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        device = self._model.device
        self._ids, self._mask = self._ids.to(device), self._mask.to(device)

    def _generate(self, *, sampled: bool, **outputs: bool) -> Any:
        config = self._shape.config(sampled=sampled, return_dict_in_generate=True, **outputs)
        with torch.inference_mode():
            return self._model.generate(self._ids, attention_mask=self._mask, generation_config=config)

    def sample(self, seed: int) -> list[Completion]:
        torch.manual_seed(seed)
        output = self._generate(sampled=True)
        return cut(output.sequences[:, self._width :])

    def greedy(self) -> list[Completion]:
        output = self._generate(sampled=False)
        return cut(output.sequences[:, self._width :])


class GenerateWithLogps(Generate):
    """transformers' generate, with log-probs computed at the end from the logits of all steps."""

    def sample(self, seed: int) -> list[Completion]:
        torch.manual_seed(seed)
        output = self._generate(sampled=True, output_logits=True)
        ids = output.sequences[:, self._width :]
        logps = torch.stack(output.logits, dim=1).log_softmax(dim=2).gather(2, ids[:, :, None])[:, :, 0]
        return cut(ids, logps)


SIDES: dict[str, Callable[[Shape], Side]] = {
    "ours": Ours,
    "generate": GenerateWithLogps,
    "generate, no log-probs": Generate,
}


def cut(ids: Tensor, logps: Tensor | None = None) -> list[Completion]:
    """Completions up to and including EOS."""
    rows = ids.cpu().numpy()
    ended = rows == EOS
    lengths = np.where(ended.any(1), ended.argmax(1) + 1, rows.shape[1])
    kept = np.zeros((len(rows), 0), np.float32) if logps is None else logps.cpu().numpy()
    return [Completion(rows[i, :n], kept[i, :n], bool(ended[i].any())) for i, n in enumerate(lengths)]


_BASE_MODELS = Path("runs/base_models")


def demo_model() -> PreTrainedModel:
    directory = cached_base_model(_BASE_MODELS, 0, lambda done, total: None)
    return load_model(str(directory), revision=None, device="cpu", dtype="float32")


def demo_prompts(count: int) -> list[list[int]]:
    encoder, task = PromptEncoder(make_tokenizer(), DataConfig()), Arithmetic(0)
    return [encoder.encode(task.problem(i)).ids for i in range(count)]


def random_prompts(count: int, length: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(2, measure.VOCABULARY, (count, length)).tolist()


def alike_prompts(count: int, length: int, shared: int) -> list[list[int]]:
    """Prompts whose first `shared` tokens are the same, as with a system prompt and tools."""
    prompts = random_prompts(count, length)
    return [prompts[0][:shared] + prompt[shared:] for prompt in prompts]


def demo_shape(prompts: int, repetitions: int) -> Shape:
    name = f"demo, {prompts} x 8"
    return Shape(name, demo_model, partial(demo_prompts, prompts), 8, max_completion_length=40, repetitions=repetitions)


SHAPES = (
    demo_shape(2, 30),
    demo_shape(8, 30),
    demo_shape(16, 30),
    Shape("25M, P 400, 1 x 8", measure.model_25m, partial(random_prompts, 1, 400), 8, 128, repetitions=3),
    Shape("25M, P 400, 360 alike, 8 x 4", measure.model_25m, partial(alike_prompts, 8, 400, 360), 4, 32, repetitions=3),
)


_sides: dict[str, Side] = {}


def _start(side: str, shape: Shape) -> None:
    _sides["this"] = SIDES[side](shape)


def _rate(seed: int) -> float:
    """Tokens a second of one round."""
    began = time.perf_counter()
    completions = _sides["this"].sample(seed)
    return sum(len(completion.ids) for completion in completions) / (time.perf_counter() - began)


def _error(shape: Shape) -> float:
    """Largest distance of a captured log-prob from float64; NaN if none was captured."""
    completions, prompts = _sides["this"].sample(0), shape.make_prompts()
    if not len(completions[0].logps):
        return float("nan")
    size = len(completions) // len(prompts)
    groups = [
        group_tokens(EncodedPrompt(prompt), completions[i * size : (i + 1) * size]) for i, prompt in enumerate(prompts)
    ]
    with torch.inference_mode():
        forward = PlainForward(shape.make_model().double())
        exact = forward([tokens for tokens, _, _ in groups], [1.0] * len(groups)).numpy()
    assert exact.dtype == np.float64
    return float(np.abs(np.concatenate([logps for _, logps, _ in groups]) - exact).max())


def _greedy() -> list[list[int]]:
    return [completion.ids.tolist() for completion in _sides["this"].greedy()]


def rows_of(shape: Shape) -> list[list[str]]:
    processes = {side: measure.Child(_start, side, shape) for side in SIDES}
    rate = measure.median_figures(
        {side: partial(process.call, _rate) for side, process in processes.items()}, shape.repetitions
    )
    errors = {side: process.call(_error, shape) for side, process in processes.items()}
    greedy = {side: process.call(_greedy) for side, process in processes.items()}
    for process in processes.values():
        process.close()
    return [
        [
            shape.name,
            side,
            f"{rate[side]:,.0f}",
            f"{rate['ours'] / rate[side]:.2f}x",
            "-" if np.isnan(errors[side]) else f"{errors[side]:.0e}",
            "the same" if greedy[side] == greedy["generate"] else "different",
        ]
        for side in SIDES
    ]


def run() -> None:
    measure.show(
        "Sampling, float32, one thread (bar at 8 x 8: 2x generate); error: of log-probs, from float64",
        ["", "side", "tokens/s", "ours is", "log-probs' error", "greedy tokens"],
        [row for shape in SHAPES for row in rows_of(shape)],
    )
