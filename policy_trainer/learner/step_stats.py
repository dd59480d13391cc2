"""What a training step saw and did, added up over its micro-batches where they are, and read once an update."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from policy_trainer.learner.step_groups import Prepared, StepGroup
from policy_trainer.objective.corrections import CorrectionStats
from policy_trainer.objective.loss import TokenLoss
from policy_trainer.objective.ratios import masked

_SUMS = (
    "loss", "kl", "entropy", "clipped_low", "clipped_high", "ratio", "gap", "cut", "weight", "weight_squared", "tokens",
)  # fmt: skip
# The least ratio as the largest of negative ones.
_MAXIMA = ("ratio_negative", "ratio", "gap")


@dataclass(frozen=True)
class StepStats:
    """What one step saw and did. Means are over trained tokens, in all passes, where not said otherwise; NaN of none.

    loss: mean over updates. kl: to the reference, by loss.kl, as it was before each update; NaN where a batch came
    without ref_logps. entropy: of the policy, in nats, likewise. clip_ratio: of both bounds. ratio_*: before
    truncation. sampling_logp_difference_*: |log-prob - the sampler's|, the former of old_logps = recomputed, else of the policy; NaN
    where unknown. importance_sampling_ratio_mean: mean of exp of that difference, before truncation: of the correction's weights,
    and of what they would be without one. effective_sample_size: (sum w)^2 / (n sum w^2) of these, in (0, 1].
    importance_sampling_clip_ratio: share of tokens whose weight was truncated or became 0. advantage_std: over completions that train.
    frac_reward_zero_std: share of the step's groups. grad_norm: before scaling down, mean over updates. groups, tokens: that
    trained; with none there was no update. updates: of the optimizer. not_finite: a loss or gradient was not, and there
    was no update on it.
    """

    loss: float
    kl: float
    entropy: float
    clip_ratio: float
    clip_ratio_low: float
    clip_ratio_high: float
    ratio_min: float
    ratio_mean: float
    ratio_max: float
    effective_sample_size: float
    sampling_logp_difference_mean: float
    sampling_logp_difference_max: float
    importance_sampling_ratio_mean: float
    importance_sampling_clip_ratio: float
    advantage_std: float
    frac_reward_zero_std: float
    grad_norm: float
    learning_rate: float
    groups: int
    tokens: int
    updates: int
    not_finite: bool


@dataclass(frozen=True)
class Update:
    """One update, or what would have been one. tally: as `tally` has it."""

    tally: Tensor
    grad_norm: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.grad_norm) and math.isfinite(float(self.tally[0]))


@torch.no_grad()
def tally(
    loss: Tensor, tokens: TokenLoss, entropy: Tensor, mask: Tensor, gap: Tensor, corrected: CorrectionStats
) -> Tensor:
    """Sums over one micro-batch and then maxima, as one tensor on its device. loss: scalar; all else (C,).

    gap: |log-prob - the sampler's|.
    """
    kept, gap = masked(corrected.weights, mask), masked(gap, mask)
    sums = (
        loss, masked(tokens.kl, mask).sum(), masked(entropy, mask).sum(), tokens.clipped_low.sum(),
        tokens.clipped_high.sum(), masked(tokens.ratio, mask).sum(), gap.sum(), (corrected.cut & mask).sum(),
        kept.sum(), kept.square().sum(), mask.sum(),
    )  # fmt: skip
    maxima = (torch.where(mask, -tokens.ratio, -torch.inf).amax(), masked(tokens.ratio, mask).amax(), gap.amax())
    return torch.stack([part.to(loss.dtype) for part in (*sums, *maxima)])


def added(tallies: Sequence[Tensor]) -> Tensor:
    """One tally of several, float64 on the CPU. Called once all of them are under way: a device would stand still."""
    together = torch.stack([part.cpu().double() for part in tallies])
    count = len(_SUMS)
    return torch.cat([together[:, :count].sum(0), together[:, count:].amax(0)])


def step_stats(
    judged: Sequence[StepGroup],
    groups: Sequence[Prepared],
    updates: Sequence[Update],
    *,
    num_iterations: int,
    learning_rate: float,
) -> StepStats:
    """judged: all groups of the step. groups: those that trained. updates: in all passes."""
    total = added([update.tally for update in updates]) if updates else torch.zeros(len(_SUMS) + len(_MAXIMA))
    sums = dict(zip(_SUMS, total.tolist(), strict=False))
    count = sums["tokens"] or math.nan  # of no tokens there is no mean
    least, most, widest = (total[len(_SUMS) :] * (count / count)).tolist()
    means = {name: value / count for name, value in sums.items()}
    return StepStats(
        loss=sums["loss"] / len(updates) if updates else math.nan,
        kl=means["kl"],
        entropy=means["entropy"],
        clip_ratio=means["clipped_low"] + means["clipped_high"],
        clip_ratio_low=means["clipped_low"],
        clip_ratio_high=means["clipped_high"],
        ratio_min=-least,
        ratio_mean=means["ratio"],
        ratio_max=most,
        effective_sample_size=means["weight"] ** 2 / (means["weight_squared"] or math.nan),
        sampling_logp_difference_mean=means["gap"],
        sampling_logp_difference_max=widest,
        importance_sampling_ratio_mean=means["weight"],
        importance_sampling_clip_ratio=means["cut"],
        advantage_std=_advantage_std(groups),
        frac_reward_zero_std=float(np.mean([not group.varies for group in judged])) if judged else math.nan,
        grad_norm=float(np.mean([update.grad_norm for update in updates])) if updates else 0.0,
        learning_rate=learning_rate,
        groups=len(groups),
        tokens=int(sums["tokens"]) // num_iterations,
        updates=sum(update.finite for update in updates),
        not_finite=not all(update.finite for update in updates),
    )


def _advantage_std(groups: Sequence[Prepared]) -> float:
    """Of the completions that train, each with the mean over its tokens; the population's."""
    if not groups:
        return math.nan
    lengths = np.concatenate([group.group.completion_lengths for group in groups])
    values = np.concatenate([group.advantages for group in groups]).astype(np.float64)
    means = np.add.reduceat(values, np.cumsum(lengths) - lengths) / lengths
    return float(means[np.concatenate([group.trains for group in groups])].std())
