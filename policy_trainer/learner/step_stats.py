"""Statistics of a training step: summed over micro-batches on their device, and read once per update."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from policy_trainer.objective.group import Group
from policy_trainer.objective.loss import TokenLoss
from policy_trainer.surrogates.sums import masked, sequence_sums

_SUMS = (
    "loss", "kl", "entropy", "clipped_low", "clipped_high", "ratio", "logp_difference", "weight_clipped", "weight",
    "weight_squared", "untrusted", "explored_entropy", "aux_loss", "policy_loss", "tokens",
)  # fmt: skip
# A minimum is kept as the largest negative value.
_MAXIMA = (
    "ratio_negative", "ratio", "logp_difference", "clipped_low_negative", "clipped_high", "weight_negative", "weight",
)  # fmt: skip
# The metrics of the surrogate come after these.
_FIXED = len(_SUMS) + len(_MAXIMA)


@dataclass(frozen=True)
class UpdateStats:
    """Statistics of one update of a step, named as in StepStats. If the update was skipped, its loss or grad_norm is
    not finite. entropy_coef: coefficient of the entropy bonus after the update."""

    loss: float
    policy_loss: float
    aux_loss: float
    kl: float
    entropy: float
    entropy_coef: float
    clip_ratio: float
    clip_ratio_low: float
    clip_ratio_low_min: float
    clip_ratio_high: float
    clip_ratio_high_max: float
    grad_norm: float
    learning_rate: float


@dataclass(frozen=True)
class StepStats:
    """Statistics of one step. Means are over tokens that train, in all iterations, unless said otherwise; NaN if
    none do.

    loss: mean over updates. policy_loss: without the entropy bonus and the routers' loss. aux_loss: of a mixture's
    routers, the same mean; NaN if the loss has none. kl: to the reference, estimated by loss.kl before each update;
    NaN where a batch came without ref_logps. entropy: of the policy before each update, in nats. clip_ratio: of both
    bounds; clip_ratio_low_min, clip_ratio_high_max: the smallest and the largest share of a completion's tokens, in any
    update. ratio_*: before truncation. sampling_logp_difference_*: |log-prob - the sampler's|, of the log-probs before
    the step where old_logps = recomputed or log_linear, else of the current ones; NaN where unknown.
    importance_sampling_ratio_*: of the correction weights w before truncation, logged even when the correction is off.
    effective_sample_size: (sum w)^2 / (n sum w^2), in (0, 1]. importance_sampling_clip_ratio: share of tokens whose
    weight was truncated or became 0. masked_ratio: share of tokens whose surrogate a mask of loss.mask took away.
    advantage_std: over completions with a token that trains. frac_reward_zero_std: share of the step's groups.
    grad_norm: before clipping, mean over updates. learning_rate: of the last update. groups, tokens: that trained; with
    none there was no update. updates: of the optimizer. not_finite: a loss or gradient was not finite, and its update
    was skipped. each_update: in order, skipped ones included. surrogate_metrics: means by their names.
    """

    loss: float
    policy_loss: float
    aux_loss: float
    kl: float
    entropy: float
    clip_ratio: float
    clip_ratio_low: float
    clip_ratio_low_min: float
    clip_ratio_high: float
    clip_ratio_high_max: float
    ratio_min: float
    ratio_mean: float
    ratio_max: float
    effective_sample_size: float
    sampling_logp_difference_mean: float
    sampling_logp_difference_max: float
    importance_sampling_ratio_min: float
    importance_sampling_ratio_mean: float
    importance_sampling_ratio_max: float
    importance_sampling_clip_ratio: float
    masked_ratio: float
    advantage_std: float
    frac_reward_zero_std: float
    grad_norm: float
    learning_rate: float
    groups: int
    tokens: int
    updates: int
    not_finite: bool
    each_update: tuple[UpdateStats, ...]
    surrogate_metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Update:
    """One update, or one that was skipped because it was not finite. sums: as `summed` returns them. entropy_coef:
    coefficient of the entropy bonus after it."""

    sums: Tensor
    grad_norm: float
    entropy_coef: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.grad_norm) and math.isfinite(float(self.sums[0]))

    @property
    def tokens(self) -> int:
        return int(self.sums[_SUMS.index("tokens")])

    @property
    def explored_entropy(self) -> float:
        """Before the update: mean over the tokens of loss.top_entropy_quantile, in nats."""
        return float(self.sums[_SUMS.index("explored_entropy")])


@torch.no_grad()
def micro_batch_sums(
    loss: Tensor,
    explored_entropy: Tensor,
    aux_loss: Tensor,
    policy_loss: Tensor,
    tokens: TokenLoss,
    entropy: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    logp_difference: Tensor,
    importance: Sequence[Tensor],
) -> Tensor:
    """Sums over one micro-batch, maxima, and sums of the surrogate's metrics, as one tensor on its device.

    loss, explored_entropy, aux_loss, policy_loss: scalars, of which the update has the sum; all else (C,).
    logp_difference: |log-prob - the sampler's|. importance: the correction's weights before truncation; bool, where one
    was truncated.
    """
    weights, clipped = importance
    weights, difference = masked(weights, mask), masked(logp_difference, mask)
    sums = (
        loss, masked(tokens.kl, mask).sum(), masked(entropy, mask).sum(), tokens.clipped_low.sum(),
        tokens.clipped_high.sum(), masked(tokens.ratio, mask).sum(), difference.sum(),
        clipped.sum(), weights.sum(), weights.square().sum(), tokens.untrusted.sum(),
        explored_entropy, aux_loss, policy_loss, mask.sum(),
    )  # fmt: skip
    lengths = sequence_sums(mask, sequence_ids)
    low, high = (sequence_sums(clip, sequence_ids) / lengths for clip in (tokens.clipped_low, tokens.clipped_high))
    maxima = (
        torch.where(mask, -tokens.ratio, -torch.inf).amax(), masked(tokens.ratio, mask).amax(), difference.amax(),
        torch.where(lengths > 0, -low, -torch.inf).amax(), torch.where(lengths > 0, high, 0).amax(),
        torch.where(mask, -weights, -torch.inf).amax(), weights.amax(),
    )  # fmt: skip
    metrics = (values.sum() for values in tokens.metrics.values())
    return torch.stack([part.to(loss.dtype) for part in (*sums, *maxima, *metrics)])


def summed(parts: Sequence[Tensor]) -> Tensor:
    """The sums of several micro-batches or updates, float64 on the CPU. Call it after all are launched: reading
    one waits for the device."""
    together = torch.stack([part.cpu().double() for part in parts])
    sums, maxima, metrics = together.tensor_split([len(_SUMS), _FIXED], dim=1)
    return torch.cat([sums.sum(0), maxima.amax(0), metrics.sum(0)])


def step_stats(
    groups: Sequence[Group],
    trained: Sequence[Group],
    updates: Sequence[Update],
    *,
    of_pass: int,
    learning_rates: Sequence[float],
    routed: bool,
    metrics: Sequence[str] = (),
) -> StepStats:
    """groups: all of the step. trained: those that trained. updates: of all iterations. of_pass: updates of one
    whole iteration. learning_rates: of the updates that the step would have if all groups trained. routed: whether the
    loss has an aux_loss. metrics: the names of the surrogate's metrics, which are left out without updates."""
    total = summed([update.sums for update in updates]) if updates else torch.zeros(_FIXED)
    names = metrics if updates else ()
    sums, largest = _named(total)
    count = sums["tokens"] or math.nan  # without tokens there is no mean
    means = {name: value / count for name, value in sums.items()}
    advantages = np.concatenate([np.zeros(0), *(group.completion_advantages for group in trained)])
    advantages = advantages[~np.isnan(advantages)]
    return StepStats(
        loss=sums["loss"] / len(updates) if updates else math.nan,
        policy_loss=sums["policy_loss"] / len(updates) if updates else math.nan,
        aux_loss=sums["aux_loss"] / len(updates) if updates and routed else math.nan,
        kl=means["kl"],
        entropy=means["entropy"],
        clip_ratio=means["clipped_low"] + means["clipped_high"],
        clip_ratio_low=means["clipped_low"],
        clip_ratio_low_min=-largest["clipped_low_negative"],
        clip_ratio_high=means["clipped_high"],
        clip_ratio_high_max=largest["clipped_high"],
        ratio_min=-largest["ratio_negative"],
        ratio_mean=means["ratio"],
        ratio_max=largest["ratio"],
        effective_sample_size=means["weight"] ** 2 / (means["weight_squared"] or math.nan),
        sampling_logp_difference_mean=means["logp_difference"],
        sampling_logp_difference_max=largest["logp_difference"],
        importance_sampling_ratio_min=-largest["weight_negative"],
        importance_sampling_ratio_mean=means["weight"],
        importance_sampling_ratio_max=largest["weight"],
        importance_sampling_clip_ratio=means["weight_clipped"],
        masked_ratio=means["untrusted"],
        advantage_std=float(np.std(advantages)) if len(advantages) else math.nan,
        frac_reward_zero_std=float(np.mean([not group.has_variance for group in groups])) if groups else math.nan,
        grad_norm=float(np.mean([update.grad_norm for update in updates])) if updates else 0.0,
        learning_rate=learning_rates[-1],
        groups=len(trained),
        tokens=sum(update.tokens for update in updates[:of_pass]),
        updates=sum(update.finite for update in updates),
        not_finite=not all(update.finite for update in updates),
        each_update=tuple(
            _update_stats(update, lr, routed) for update, lr in zip(updates, learning_rates, strict=False)
        ),
        surrogate_metrics={name: value / count for name, value in zip(names, total[_FIXED:].tolist(), strict=True)},
    )


def _named(total: Tensor) -> tuple[dict[str, float], dict[str, float]]:
    """The sums and the maxima, by name. Without tokens the maxima are NaN."""
    sums: dict[str, float] = dict(zip(_SUMS, total.tolist(), strict=False))
    known = 1.0 if sums["tokens"] else math.nan
    return sums, dict(zip(_MAXIMA, (total[len(_SUMS) : _FIXED] * known).tolist(), strict=True))


def _update_stats(update: Update, learning_rate: float, routed: bool) -> UpdateStats:
    sums, largest = _named(update.sums)
    count = sums["tokens"] or math.nan
    low, high = sums["clipped_low"] / count, sums["clipped_high"] / count
    return UpdateStats(
        loss=sums["loss"],
        policy_loss=sums["policy_loss"],
        aux_loss=sums["aux_loss"] if routed else math.nan,
        kl=sums["kl"] / count,
        entropy=sums["entropy"] / count,
        entropy_coef=update.entropy_coef,
        clip_ratio=low + high,
        clip_ratio_low=low,
        clip_ratio_low_min=-largest["clipped_low_negative"],
        clip_ratio_high=high,
        clip_ratio_high_max=largest["clipped_high"],
        grad_norm=update.grad_norm,
        learning_rate=learning_rate,
    )
