"""Tables of a whole training step and of sampling."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks import measure
from benchmarks.gpu_logprobs import STEP_BAR, compared
from benchmarks.gpu_tables import PROMPT, SIZES, Ratio, Row, Setting, Taken, fitting, median_seconds
from benchmarks.sampling import SIDES as SAMPLERS
from benchmarks.sampling import Shape
from benchmarks.scoring import classic
from policy_trainer.config import LossConfig, OptimizerConfig, TrainConfig
from policy_trainer.learner.gradient_checkpointing import checkpoint_layers
from policy_trainer.learner.learner import Learner
from shared.batch import Batch, TokenGroup
from shared.logprobs import LogprobForward, choose_forward
from tests.policy_trainer.learner.steps import make_learner

STEP_GROUPS = 4
MASTERS: tuple[Literal["float32", "none"], ...] = ("float32", "none")
# By type of device: the model that samples, and the length of completions.
SAMPLED = {"cuda": ("0.5B", 128), "cpu": ("tiny", 16)}
PROMPTS, GROUP_SIZE = 8, 8


# ---------------------------------------------------------------- training steps


class ClassicForward:
    """The classic way as a `LogprobForward` for the learner. Entropies are zeros."""

    name = "classic"

    def __init__(self, model: PreTrainedModel) -> None:
        self._score = classic(model)

    def __call__(self, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> Tensor:
        return self._score(groups).float()

    def with_entropy(
        self, groups: Sequence[TokenGroup], temperatures: Sequence[float], *, entropy_grad: bool = True
    ) -> tuple[Tensor, Tensor]:
        logps = self(groups, temperatures)
        return logps, torch.zeros_like(logps)


# The forward and the micro_batch_tokens of each side: with 1, the classic side works group by group.
FORWARDS: dict[str, tuple[Callable[[PreTrainedModel], LogprobForward], int]] = {
    "ours": (choose_forward, TrainConfig.model_fields["micro_batch_tokens"].default),
    "classic": (ClassicForward, 1),
}


def step_rows(setting: Setting, size: str) -> Iterator[Row]:
    """Each side has a model and an optimizer of its own, one after the other: both at once would not fit."""
    for masters in MASTERS:
        taken = {side: fitting(setting.meter, partial(measure_step, setting, size, side, masters)) for side in FORWARDS}
        yield {"": f"{size}, masters: {masters}", **compared(taken, setting.least(size, STEP_BAR))}


def measure_step(setting: Setting, size: str, side: str, masters: Literal["float32", "none"]) -> Taken:
    """The peak excludes the model's weights and includes masters, moments and gradients."""
    model = setting.make_model(size)
    checkpoint_layers(model)
    make_forward, micro_batch_tokens = FORWARDS[side]
    forward = make_forward(model)
    batches = make_batches(forward, setting.make_groups(size, STEP_GROUPS))
    learners: list[Learner] = []

    def start() -> None:
        optimizer = OptimizerConfig(master_weights=masters)
        settings: dict[str, Any] = {"max_steps": 100, "micro_batch_tokens": micro_batch_tokens}
        learners.append(make_learner(model, forward, loss=LossConfig(), optimizer=optimizer, **settings))
        for number in range(2):  # the second step has the peak, since moments exist then
            learners[0].step(batches, step=number)

    mib = setting.meter.peak_mib(start)
    seconds = median_seconds(setting.meter, {side: lambda: learners[0].step(batches, step=2)})
    return Taken(seconds[side], mib)


def make_batches(forward: LogprobForward, groups: Sequence[TokenGroup]) -> list[Batch]:
    """Batches of a policy that equals its reference."""
    generator, batches = np.random.default_rng(0), []
    for group in groups:
        with torch.inference_mode():
            logps = forward([group], [1.0]).float().cpu().numpy()
        rewards = generator.normal(size=group.size).astype(np.float32)
        scored = {"sampler_logps": logps, "ref_logps": logps, "reference_version": "0"}
        batches.append(replace(measure.batch_of(group), rewards=rewards, **scored))
    return batches


# ---------------------------------------------------------------- sampling


def sampler_rows(setting: Setting) -> Iterator[Row]:
    size, new_tokens = SAMPLED[setting.meter.device.type]
    model = setting.make_model(size)
    vocabulary = SIZES[size].vocab_size
    length = round(setting.meter.scale * PROMPT)
    prompts = np.random.default_rng(0).integers(2, vocabulary, (PROMPTS, length)).tolist()  # 0 is PAD, 1 is EOS
    shape = Shape(size, lambda: model, lambda: prompts, GROUP_SIZE, new_tokens, setting.meter.repetitions)
    sides = {name: make(shape) for name, make in SAMPLERS.items()}
    tokens = {name: sum(len(completion.ids) for completion in side.sample(0)) for name, side in sides.items()}
    seconds = median_seconds(setting.meter, {name: partial(side.sample, 0) for name, side in sides.items()})
    rate = {name: tokens[name] / seconds[name] for name in sides}
    for name in sides:
        row: Row = {"": f"{size}, {PROMPTS * GROUP_SIZE} sequences", "side": name, "tokens": tokens[name]}
        yield row | {"tokens/s": rate[name], "ours is": Ratio(rate["ours"] / rate[name])}
