"""The learning rate of a step: a pure function of its number, so that resuming needs no state."""

import math
from collections.abc import Callable

from policy_trainer.config import OptimizerConfig


def lr_factor(step: int, config: OptimizerConfig, steps: int) -> float:
    """Learning rate of a step as a fraction of the peak: a linear ramp times a decay over the whole run."""
    warmup = max(config.warmup_steps, math.ceil(config.warmup_ratio * steps))
    ramp = min(1.0, (step + 1) / warmup) if warmup else 1.0
    progress = min(1.0, step / max(steps - 1, 1))
    return ramp * (1 - (1 - config.min_lr_rate) * SCHEDULES[config.lr_scheduler_type](progress))


def _linear(progress: float) -> float:
    return progress


def _cosine(progress: float) -> float:
    return (1 - math.cos(math.pi * progress)) / 2


# How much of the decay is done, in [0, 1], after a part of the run.
SCHEDULES: dict[str, Callable[[float], float]] = {"linear": _linear, "cosine": _cosine}
