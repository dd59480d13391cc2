"""Advantages: functions of the raw rewards of whole groups. Part of a group would be normalised wrongly.

All groups of a step are computed together, on the CPU: some advantages are standardised over the whole step, and with
one small tensor per group the overhead of each operation would exceed its computation.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from policy_trainer.algorithms.objective.functions import call_advantage
from policy_trainer.algorithms.objective.group import Group, differ
from policy_trainer.algorithms.objective.kl import KL_ESTIMATORS, with_teacher
from policy_trainer.config import LossConfig
from shared.batch import Array
from shared.errors import UserError

# Added to sums of squared gradient norms, against a division by zero; verl's.
_NO_GRADIENT = 1e-8


def advantages(groups: Sequence[Group], config: LossConfig) -> list[Array]:
    """Returns the advantage of every token, one float32 array (C,) per group; 0 in completions that are left out.

    Raises ValueError if a group lacks an input that a setting needs, UserError if a user's function fails.
    """
    if not groups:
        return []
    for name, needed in (
        ("kl_penalty", config.penalises_rewards),
        ("reverse_kl", config.distillation > 0),
        ("gradient_norms", config.needs_gradient_norms),
    ):
        if needed and any(getattr(group, name) is None for group in groups):
            raise ValueError(f"{name}: a group has none; add it with with_old_logps before its advantages are computed")
    rewarded = ADVANTAGES.get(config.advantage, call_advantage)(groups, config)
    values = [with_teacher(row, group, config) for row, group in zip(rewarded, groups, strict=True)]
    return [row.astype(np.float32) for row in values]


def kl_penalty(ref_logps: Array, old_logps: Array, config: LossConfig) -> Array:
    """Returns beta times the KL of each token, float64 (C,). It is subtracted from the rewards (loss.kl_in = reward or
    both)."""
    # REINFORCE++ subtracts the plain log-ratio (k1), whatever loss.kl is.
    estimator = KL_ESTIMATORS["k1" if config.advantage == "reinforce++" else config.kl]
    return (config.beta * estimator(torch.from_numpy(ref_logps.astype(np.float64) - old_logps))).numpy()


def _padded(rows: Sequence[Array]) -> Tensor:
    """Stacks rows as float64 (B, n), padded to the length of the longest with NaN, which statistics ignore. In float32
    a sum of squares might overflow."""
    filled = np.full((len(rows), max([1, *map(len, rows)])), np.nan)
    for target, row in zip(filled, rows, strict=True):
        target[: len(row)] = row
    return torch.from_numpy(filled)


def _outcome(groups: Sequence[Group], config: LossConfig) -> list[Array]:
    """r - mean r. Scaled, it is outcome supervision (DeepSeekMath, arXiv 2402.03300, 4.1.2); unscaled, Dr. GRPO
    (2503.20783)."""
    rewards = _completion_rewards(groups)
    return _to_tokens(groups, deviations(rewards) / _divisor(rewards, config))


def _rloo(groups: Sequence[Group], config: LossConfig) -> list[Array]:
    """r minus the mean of the group's other rewards (RLOO, arXiv 2402.14740): the deviation from the mean of all, times
    n / (n - 1)."""
    rewards = _completion_rewards(groups)
    count = (~rewards.isnan()).sum(-1, keepdim=True)
    leave_one_out = deviations(rewards) * count / (count - 1).clamp(min=1)
    return _to_tokens(groups, leave_one_out / _divisor(rewards, config))


def _maxrl(groups: Sequence[Group], config: LossConfig) -> list[Array]:
    """(r - mean r) / mean r (MaxRL, arXiv 2602.02710), or 0 where all rewards are 0. With rewards of 0 and 1 it is an
    unbiased gradient of a sum of pass@k, which tends to that of the log-likelihood of a correct answer.

    Raises UserError for a negative reward: a negative mean would reverse the sign of the advantages.
    """
    rewards = _completion_rewards(groups)
    if (negative := rewards[rewards < 0]).numel():
        raise UserError(
            f"loss.advantage: maxrl divides by the mean reward, so rewards must be 0 or more, got {negative[0]:g}",
            "leave out the rewards that punish, or use loss.advantage = outcome",
        )
    means = rewards.nanmean(-1, keepdim=True)
    return _to_tokens(groups, deviations(rewards) / means.where(means > 0, 1.0))


def _process(groups: Sequence[Group], config: LossConfig) -> list[Array]:
    """Gives each token the sum of the normalised rewards of the steps that end there or later (DeepSeekMath, 4.1.3)."""
    rewards = _padded([group.compared_rewards for group in groups])
    normalised = (deviations(rewards) / _divisor(rewards, config)).numpy()
    return [_steps_to_tokens(group, row) for group, row in zip(groups, normalised, strict=True)]


def _steps_to_tokens(group: Group, rewards: Array) -> Array:
    assert group.steps is not None
    values, starts = np.zeros(group.lengths.sum()), np.cumsum(group.lengths) - group.lengths
    values[np.repeat(starts, group.steps.counts) + group.steps.ends] = rewards[: len(group.steps.rewards)]
    return _rewards_to_go(values, group.lengths)


def _reinforce_plus_plus(groups: Sequence[Group], config: LossConfig) -> list[Array]:
    """Returns-to-go of the reward, which is at the last token, minus the KL penalty of each token, standardised over
    all tokens of the step (REINFORCE++, arXiv 2501.03262, 3.1 and 3.2)."""
    returns = [_returns(group) for group in groups]
    takes_part = [_masked(np.repeat(~np.isnan(group.rewards), group.lengths), group) for group in groups]
    tokens = torch.from_numpy(np.where(np.concatenate(takes_part), np.concatenate(returns), np.nan))[None]
    standardised = (deviations(tokens) / _divisor(tokens, config))[0].numpy()
    return np.split(standardised, np.cumsum([len(row) for row in returns])[:-1])


def gradient_norms(logps: Array, halved: Array) -> Array:
    """(C,) log-probs of tokens at the temperature and at half of it, by the same weights -> float64 (C,): the squared
    norm of the gradient of each log-prob with respect to the logits divided by the temperature.

    It is 1 - 2 p + sum p_j^2, p being the token's probability. Half the temperature doubles the logits, so that
    log sum p_j^2 = logsumexp(2 z) - 2 logsumexp(z) = 2 log p - log p at half the temperature.
    """
    logps, halved = logps.astype(np.float64), halved.astype(np.float64)
    return np.maximum(1 - 2 * np.exp(logps) + np.exp(2 * logps - halved), 0)


def _optimal_token_baseline(groups: Sequence[Group], config: LossConfig) -> list[Array]:
    """Returns-to-go minus a baseline for each place: the mean of the group's returns there, each weighted by the sum of
    its completion's squared gradient norms up to that place (The Optimal Token Baseline, arXiv 2602.07078).

    Places count sampled tokens only. Where only one completion reaches a place, the baseline is 0, as in verl.
    """
    return [_above_baseline(group) for group in groups]


def _above_baseline(group: Group) -> Array:
    assert group.gradient_norms is not None
    sampled = _masked(np.repeat(~np.isnan(group.rewards), group.lengths), group).astype(np.bool_)
    places = (_sums_so_far(sampled.astype(np.int64), group.lengths) - 1)[sampled]
    weights = _sums_so_far(np.where(sampled, group.gradient_norms, 0), group.lengths)[sampled]
    returns = _returns(group)[sampled]
    baselines = np.bincount(places, weights * returns) / (np.bincount(places, weights) + _NO_GRADIENT)
    baselines[np.bincount(places) == 1] = 0
    values = np.zeros(len(sampled))
    values[sampled] = returns - baselines[places]
    return values


def _gdpo(groups: Sequence[Group], config: LossConfig) -> list[Array]:
    """Normalises each reward within its group, and standardises their weighted sum over the step (GDPO, arXiv
    2601.05242). The plain sum would give completions whose rewards differ the same advantage if their totals are equal.
    A reward that a completion lacks adds nothing."""
    totals = _padded([_normalised_sum(group, config) for group in groups])
    together = totals.reshape(1, -1)
    return _to_tokens(groups, (deviations(together) / _divisor(together, config)).reshape(totals.shape))


def _normalised_sum(group: Group, config: LossConfig) -> Array:
    """Returns the weighted sum of each completion's normalised rewards, (G,); NaN for completions that are left
    out."""
    assert group.parts is not None
    parts = torch.from_numpy(group.compared_rewards.astype(np.float64))
    normalised = (deviations(parts) / (_std(parts, config) + config.advantage_eps)).numpy()
    return np.where(np.isnan(group.rewards), np.nan, group.parts.weights @ normalised)


def _returns(group: Group) -> Array:
    values = np.zeros(group.lengths.sum()) if group.kl_penalty is None else -_masked(group.kl_penalty, group)
    values[np.cumsum(group.lengths) - 1] += np.nan_to_num(group.rewards)
    return _rewards_to_go(values, group.lengths)


def _nothing(groups: Sequence[Group], config: LossConfig) -> list[Array]:
    """Returns zeros: the advantage comes only from the teacher (on-policy distillation)."""
    return [np.zeros(group.lengths.sum()) for group in groups]


ADVANTAGES: dict[str, Callable[[Sequence[Group], LossConfig], list[Array]]] = {
    "outcome": _outcome,
    "process": _process,
    "dr_grpo": _outcome,
    "rloo": _rloo,
    "reinforce++": _reinforce_plus_plus,
    "gdpo": _gdpo,
    "distill": _nothing,
    "maxrl": _maxrl,
    "optimal_token_baseline": _optimal_token_baseline,
}


def deviations(rewards: Tensor) -> Tensor:
    """(..., n) -> float64 (..., n): the deviation of each reward from the mean of its row. NaN is ignored and gets 0. A
    row of equal rewards gets 0 too: the mean is rounded, and scaling would magnify the difference."""
    rewarded = ~rewards.isnan()
    known = torch.where(rewarded, rewards.double(), 0.0)
    means = known.sum(-1, keepdim=True) / rewarded.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(rewarded & torch.from_numpy(differ(rewards.numpy())), known - means, 0.0)


def _divisor(rewards: Tensor, config: LossConfig) -> Tensor:
    if config.scale == "none":
        return torch.ones(())
    return _std(rewards.flatten() if config.scale == "batch" else rewards, config) + config.advantage_eps


def _std(rewards: Tensor, config: LossConfig) -> Tensor:
    """(..., n) -> (..., 1): the standard deviation of each row. NaN is ignored."""
    count = (~rewards.isnan()).sum(-1, keepdim=True) - int(config.advantage_std == "unbiased")
    return (deviations(rewards).square().sum(-1, keepdim=True) / count.clamp(min=1)).sqrt()


def _completion_rewards(groups: Sequence[Group]) -> Tensor:
    """Returns the rewards, float64 (B, G), each minus the KL penalty of its completion."""
    rows = []
    for group in groups:
        rewards, starts = group.rewards, np.cumsum(group.lengths) - group.lengths
        if group.kl_penalty is not None:
            rewards = rewards - np.add.reduceat(_masked(group.kl_penalty, group), starts)
        rows.append(rewards)
    return _padded(rows)


def _masked(values: Array, group: Group) -> Array:
    """(C,) -> (C,): sets the values of tokens that loss_mask excludes to 0."""
    return values if group.loss_mask is None else np.where(group.loss_mask, values, 0)


def _to_tokens(groups: Iterable[Group], completions: Tensor) -> list[Array]:
    rows = zip(groups, completions.numpy(), strict=True)
    return [np.repeat(row[: len(group.lengths)], group.lengths) for group, row in rows]


def _sums_so_far(values: Array, lengths: Array) -> Array:
    """(C,) -> (C,): each value becomes the sum from the beginning of the completion to its token."""
    total = np.cumsum(values)
    before = np.append(0, total)[np.cumsum(lengths) - lengths]
    return total - np.repeat(before, lengths)


def _rewards_to_go(values: Array, lengths: Array) -> Array:
    """(C,) -> (C,): each value becomes the sum from its token to the end of the completion."""
    total = np.cumsum(values[::-1])[::-1]
    after = np.append(total, 0.0)[np.cumsum(lengths)]
    return total - np.repeat(after, lengths)
