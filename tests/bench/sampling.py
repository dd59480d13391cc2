"""Sampling groups of completions: ours beside transformers' generate and its continuous batching.

Tokens are those of the completions up to and including EOS; computation for rows that have ended does not count. Each
side is a process with one thread, and the sides take turns. Continuous batching keeps its manager between rounds and
gets a cache of the right size: making one with the defaults takes seconds.
"""

import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from policy_trainer.config import DataConfig
from policy_trainer.data.completion import group_tokens
from policy_trainer.data.prompts import PromptEncoder
from policy_trainer.demo.base_model import cached_base_model, make_tokenizer
from policy_trainer.tasks.arithmetic import Arithmetic
from shared.logprobs import PlainForward
from shared.models import load_model
from tests.bench import measure
from tests.bench.samplers import SIDES, ContinuousBatching, Shape, Side

_BASE_MODELS = Path("runs/base_models")


def demo_model() -> PreTrainedModel:
    directory = cached_base_model(_BASE_MODELS, 0, lambda done, total: None)
    return load_model(str(directory), revision=None, device="cpu", dtype="float32")


def demo_prompts(count: int) -> list[list[int]]:
    encoder, task = PromptEncoder(make_tokenizer(), DataConfig()), Arithmetic(0)
    return [encoder.encode(task.problem(i)) for i in range(count)]


def random_prompts(count: int, length: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(2, measure.VOCABULARY, (count, length)).tolist()


def demo_shape(prompts: int, repetitions: int) -> Shape:
    name = f"demo, {prompts} x 8"
    return Shape(name, demo_model, partial(demo_prompts, prompts), 8, max_completion_length=40, repetitions=repetitions)


SHAPES = (
    demo_shape(2, 30),
    demo_shape(8, 30),
    demo_shape(16, 30),
    Shape("25M, P 400, 1 x 8", measure.model_25m, partial(random_prompts, 1, 400), 8, 128, repetitions=3),
)


class Process:
    """One side in a process of its own."""

    def __init__(self, side: str, shape: Shape) -> None:
        self._pool = ProcessPoolExecutor(1, get_context("spawn"), initializer=_start, initargs=(side, shape))

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._pool.submit(function, *arguments).result()

    def close(self) -> None:
        self(_stop)
        self._pool.shutdown()


_sides: dict[str, Side] = {}


def _start(side: str, shape: Shape) -> None:
    torch.set_num_threads(1)
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
    groups = [group_tokens(prompt, completions[i * size : (i + 1) * size]) for i, prompt in enumerate(prompts)]
    with torch.inference_mode():
        forward = PlainForward(shape.make_model().double())
        exact = forward([tokens for tokens, _, _ in groups], [1.0] * len(groups)).numpy()
    assert exact.dtype == np.float64
    return float(np.abs(np.concatenate([logps for _, logps, _ in groups]) - exact).max())


def _greedy() -> list[list[int]]:
    return [completion.ids.tolist() for completion in _sides["this"].greedy()]


def _stop() -> None:
    side = _sides.pop("this")
    if isinstance(side, ContinuousBatching):
        side.close()


def rows_of(shape: Shape) -> list[list[str]]:
    processes = {side: Process(side, shape) for side in SIDES}
    rates: dict[str, list[float]] = {side: [] for side in SIDES}
    for seed in range(shape.repetitions + 1):
        for side, process in processes.items():
            rates[side].append(process(_rate, seed))
    errors = {side: process(_error, shape) for side, process in processes.items()}
    greedy = {side: process(_greedy) for side, process in processes.items()}
    for process in processes.values():
        process.close()
    rate = {side: statistics.median(taken[1:]) for side, taken in rates.items()}  # the first round warms up
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
    # The thread of continuous batching reads its number of threads from here.
    os.environ["OMP_NUM_THREADS"] = "1"
    measure.show(
        "Sampling, float32, one thread (bar at 8 x 8: 2x generate); error: of log-probs, from float64",
        ["", "side", "tokens/s", "ours is", "log-probs' error", "greedy tokens"],
        [row for shape in SHAPES for row in rows_of(shape)],
    )
