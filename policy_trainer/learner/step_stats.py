"""Statistics of a training step: summed over micro-batches on their device, and read once per update.

What is logged, and how the values of tokens become one number, is in the table of `policy_trainer/metrics.py`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from policy_trainer.algorithms.objective.group import Group
from policy_trainer.algorithms.surrogates.sums import masked
from policy_trainer.metrics import STEP_METRICS


@dataclass(frozen=True)
class StepStats:
    """Statistics of one step.

    metrics: by the names in `policy_trainer/metrics.py`, which explains them, and those of the surrogate's own. Means
    are over the tokens that train, in all iterations; NaN if none do. each_update: the metrics of each update, in
    order, skipped ones included. groups, tokens: that trained; with none there was no update. updates: of the
    optimizer. not_finite: a loss or gradient was not finite, and its update was skipped.
    """

    metrics: Mapping[str, float]
    each_update: Sequence[Mapping[str, float]]
    groups: int
    tokens: int
    updates: int
    not_finite: bool


class _Reduction(NamedTuple):
    """Makes one number of the values of a metric, (C,) for each micro-batch.

    part: (values, mask) -> the scalars of one micro-batch, `columns` in number. join: those of several micro-batches,
    ranks or updates, (N,) -> a scalar. result: (joined scalars, tokens that train, updates) -> the number. tokens is
    NaN if none train.
    """

    part: Callable[[Tensor, Tensor], tuple[Tensor, ...]]
    result: Callable[[Sequence[float], float, int], float]
    join: Callable[[Tensor], Tensor] = torch.sum
    columns: int = 1


def _weight_sums(weights: Float[Tensor, " C"], mask: Bool[Tensor, " C"]) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    weights = masked(weights, mask)
    return weights.sum(), weights.square().sum()


def _effective_size(sums: Sequence[float], tokens: float, updates: int) -> float:
    mean, mean_square = (value / tokens for value in sums)
    return mean**2 / (mean_square or math.nan)


def _end(ends: Sequence[float], tokens: float, updates: int) -> float:
    return ends[0] if tokens > 0 else math.nan


_REDUCTIONS = {
    "mean": _Reduction(
        lambda values, mask: (torch.where(mask, values, 0).sum(),), lambda sums, tokens, updates: sums[0] / tokens
    ),
    "min": _Reduction(lambda values, mask: (torch.where(mask, values, torch.inf).amin(),), _end, torch.amin),
    "max": _Reduction(lambda values, mask: (torch.where(mask, values, -torch.inf).amax(),), _end, torch.amax),
    "update": _Reduction(lambda value, mask: (value,), lambda sums, tokens, updates: sums[0] / updates),
    "effective_size": _Reduction(_weight_sums, _effective_size, columns=2),
}
# The metrics that every step has, without updates too.
_UNKNOWN = dict.fromkeys(("clip_ratio", *(name for name, each in STEP_METRICS.items() if each.reduction)), math.nan)
# Columns that are summed before those of the metrics.
_TOKENS, _EXPLORED_ENTROPY, _FIXED = 0, 1, 2


def _reduction(name: str) -> _Reduction:
    """That of the table. A metric that is not there is a surrogate's own: its mean is logged."""
    return _REDUCTIONS[STEP_METRICS[name].reduction if name in STEP_METRICS else "mean"]


@dataclass(frozen=True, eq=False)
class Sums:
    """Joined scalars of metrics. names: of the metrics. columns: the tokens that train, the sum of `explored_entropy`,
    and one or several of each metric, in order."""

    names: tuple[str, ...]
    columns: Float[Tensor, " K"]

    @property
    def tokens(self) -> int:
        return int(self.columns[_TOKENS])

    @property
    def explored_entropy(self) -> float:
        return float(self.columns[_EXPLORED_ENTROPY])

    def metrics(self, updates: int) -> dict[str, float]:
        """updates: how many are joined here."""
        tokens = self.tokens or math.nan  # without tokens there is no mean
        columns: Iterator[float] = iter(self.columns[_FIXED:].tolist())
        numbers = {**_UNKNOWN}
        for name in self.names:
            reduction = _reduction(name)
            numbers[name] = reduction.result([next(columns) for _ in range(reduction.columns)], tokens, updates)
        return numbers | {"clip_ratio": numbers["clip_ratio_low"] + numbers["clip_ratio_high"]}


@torch.no_grad()
def micro_batch_sums(
    values: Mapping[str, Shaped[Tensor, " C"] | Shaped[Tensor, ""]],
    mask: Bool[Tensor, " C"],
    explored_entropy: Float[Tensor, ""],
) -> Sums:
    """The sums of one micro-batch, on its device.

    values: by the name of the metric, `loss` among them: numbers or bools; a scalar where the metric's reduction is
    `update`, of which the update has the sum. mask: tokens that train. explored_entropy: the micro-batch's part of the
    mean entropy of the tokens that loss.top_entropy_quantile selects.
    """
    parts = [part for name, each in values.items() for part in _reduction(name).part(each, mask)]
    columns = [part.to(values["loss"].dtype) for part in (mask.sum(), explored_entropy, *parts)]
    return Sums(tuple(values), torch.stack(columns))


def joined(parts: Sequence[Sums]) -> Sums:
    """The sums of several micro-batches, ranks or updates, float64 on the CPU. Call it after all are launched: reading
    one waits for the device."""
    names = parts[0].names
    together = torch.stack([part.columns.cpu().double() for part in parts])
    joins = [torch.sum] * _FIXED
    for reduction in map(_reduction, names):
        joins += [reduction.join] * reduction.columns
    # Column by column: PyTorch sums those of a matrix in an order that depends on how many there are.
    return Sums(names, torch.stack([join(column) for join, column in zip(joins, together.T, strict=True)]))


@dataclass(frozen=True, eq=False)
class Update:
    """One update, or one that was skipped because it was not finite. sums: those of its micro-batches, joined.
    entropy_coef: coefficient of the entropy bonus after it."""

    sums: Sums
    grad_norm: float
    entropy_coef: float

    @property
    def metrics(self) -> dict[str, float]:
        mine = {"grad_norm": self.grad_norm, "entropy_coef": self.entropy_coef}
        return self.sums.metrics(updates=1) | mine

    @property
    def finite(self) -> bool:
        return math.isfinite(self.grad_norm) and math.isfinite(self.metrics["loss"])


def step_stats(
    groups: Sequence[Group],
    trained: Sequence[Group],
    updates: Sequence[Update],
    *,
    of_pass: int,
    learning_rates: Sequence[float],
) -> StepStats:
    """groups: all of the step. trained: those that trained. updates: of all iterations. of_pass: updates of one
    whole iteration. learning_rates: of the updates that the step would have if all groups trained."""
    advantages = np.concatenate([np.zeros(0), *(group.completion_advantages for group in trained)])
    advantages = advantages[~np.isnan(advantages)]
    metrics = joined([update.sums for update in updates]).metrics(len(updates)) if updates else _UNKNOWN
    metrics = metrics | {
        "advantage_std": float(np.std(advantages)) if len(advantages) else math.nan,
        "frac_reward_zero_std": float(np.mean([not group.has_variance for group in groups])) if groups else math.nan,
        "grad_norm": float(np.mean([update.grad_norm for update in updates])) if updates else 0.0,
        "learning_rate": learning_rates[-1],
    }
    return StepStats(
        metrics=metrics,
        each_update=[_of_update(update, rate) for update, rate in zip(updates, learning_rates, strict=False)],
        groups=len(trained),
        tokens=sum(update.sums.tokens for update in updates[:of_pass]),
        updates=sum(update.finite for update in updates),
        not_finite=not all(update.finite for update in updates),
    )


def _of_update(update: Update, learning_rate: float) -> dict[str, float]:
    known = update.metrics | {"learning_rate": learning_rate}
    return {name: known[name] for name, metric in STEP_METRICS.items() if metric.each_update}
