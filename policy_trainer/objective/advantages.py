"""Advantages: functions of the raw rewards of whole groups. A chunk of a group would be normalised wrongly.

All groups of a step go in at once, on the CPU: some are standardised over the whole step, and tensors as tiny as one
group's cost more to launch than to compute.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from policy_trainer.config import LossConfig
from shared.batch import Array, StepRewards


@dataclass(frozen=True, eq=False)
class JudgedGroup:
    """What an advantage may depend on, of one group.

    rewards: floating (G,), NaN for completions that take no part. lengths: int64 (G,). mask: bool (C,), tokens that may
    be trained on; all of them where there is none. penalty: floating (C,), beta times the KL of each token where it is
    taken off the rewards. steps: for process supervision.
    """

    rewards: Array
    lengths: Array
    mask: Array | None = None
    penalty: Array | None = None
    steps: StepRewards | None = None

    @property
    def signal(self) -> Array:
        """The numbers that are compared: of completions, or (S,) of their steps where there are any."""
        if self.steps is None:
            return self.rewards
        return np.where(np.repeat(np.isnan(self.rewards), self.steps.counts), np.nan, self.steps.rewards)


def advantages(groups: Sequence[JudgedGroup], config: LossConfig) -> list[Array]:
    """Of every token of each group: float32 (C,), 0 in completions that take no part."""
    return [values.astype(np.float32) for values in ADVANTAGES[config.advantage](groups, config)]


def has_variance(rewards: Tensor) -> Tensor:
    """(..., G) -> bool (...): whether the judged rewards of a group differ, and so say what is better."""
    unknown = rewards.isnan()
    highest = rewards.masked_fill(unknown, -torch.inf).amax(-1)
    return highest > rewards.masked_fill(unknown, torch.inf).amin(-1)


def padded(rows: Sequence[Array]) -> Tensor:
    """Rows of values as float64 (B, n), n the longest: NaN, which takes no part, fills up the others. In float32 a sum
    of squares might overflow."""
    filled = np.full((len(rows), max([1, *map(len, rows)])), np.nan)
    for row, own in zip(filled, rows, strict=True):
        row[: len(own)] = own
    return torch.from_numpy(filled)


def _outcome(groups: Sequence[JudgedGroup], config: LossConfig) -> list[Array]:
    """r - mean r, scaled: outcome supervision (DeepSeekMath, arXiv 2402.03300, 4.1.2); unscaled, Dr. GRPO's
    (2503.20783)."""
    rewards = _of_completions(groups)
    return _spread(groups, deviations(rewards) / _divisor(rewards, config))


def _rloo(groups: Sequence[JudgedGroup], config: LossConfig) -> list[Array]:
    """r - the mean of the others (RLOO, arXiv 2402.14740): deviations from the mean of all, times n / (n - 1)."""
    rewards = _of_completions(groups)
    judged = (~rewards.isnan()).sum(-1, keepdim=True)
    apart = deviations(rewards) * judged / (judged - 1).clamp(min=1)
    return _spread(groups, apart / _divisor(rewards, config))


def _process(groups: Sequence[JudgedGroup], config: LossConfig) -> list[Array]:
    """The sum of the normalised rewards of all steps that end at a token or after it (DeepSeekMath, 4.1.3)."""
    rewards = padded([group.signal for group in groups])
    normalised = (deviations(rewards) / _divisor(rewards, config)).numpy()
    return [_from_steps(group, row) for group, row in zip(groups, normalised, strict=True)]


def _from_steps(group: JudgedGroup, rewards: Array) -> Array:
    assert group.steps is not None
    values, starts = np.zeros(group.lengths.sum()), np.cumsum(group.lengths) - group.lengths
    values[np.repeat(starts, group.steps.counts) + group.steps.ends] = rewards[: len(group.steps.rewards)]
    return _to_go(values, group.lengths)


def _reinforce_plus_plus(groups: Sequence[JudgedGroup], config: LossConfig) -> list[Array]:
    """The reward at the last token less a penalty at each, summed up from the end, and standardised over all tokens of
    the step (REINFORCE++, arXiv 2501.03262, 3.1 and 3.2)."""
    returns = [_returns(group) for group in groups]
    known = np.concatenate([np.where(_trained(group), row, np.nan) for group, row in zip(groups, returns, strict=True)])
    tokens = torch.from_numpy(known)[None]
    standardised = (deviations(tokens) / _divisor(tokens, config))[0].numpy()
    return np.split(standardised, np.cumsum([len(row) for row in returns])[:-1])


def _returns(group: JudgedGroup) -> Array:
    values = np.zeros(group.lengths.sum()) if group.penalty is None else -_masked(group.penalty, group)
    values[np.cumsum(group.lengths) - 1] += np.nan_to_num(group.rewards)
    return _to_go(values, group.lengths)


def _trained(group: JudgedGroup) -> Array:
    judged = np.repeat(~np.isnan(group.rewards), group.lengths)
    return judged if group.mask is None else judged & group.mask


ADVANTAGES: dict[str, Callable[[Sequence[JudgedGroup], LossConfig], list[Array]]] = {
    "outcome": _outcome,
    "process": _process,
    "dr_grpo": _outcome,
    "rloo": _rloo,
    "reinforce++": _reinforce_plus_plus,
}


def deviations(rewards: Tensor) -> Tensor:
    """(..., n) -> float64 (..., n), from the mean of a row. NaN takes no part and gets 0; so does every row in which no
    two differ: the mean of equal numbers is rounded, and a scale would magnify that."""
    judged = ~rewards.isnan()
    known = torch.where(judged, rewards.double(), 0.0)
    means = known.sum(-1, keepdim=True) / judged.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(judged & has_variance(rewards)[..., None], known - means, 0.0)


def _divisor(rewards: Tensor, config: LossConfig) -> Tensor:
    return _SCALES[config.scale](rewards, config)


def _of_group(rewards: Tensor, config: LossConfig) -> Tensor:
    return _std(rewards, config) + config.advantage_eps


def _of_batch(rewards: Tensor, config: LossConfig) -> Tensor:
    return _std(rewards.flatten(), config) + config.advantage_eps


def _of_nothing(rewards: Tensor, config: LossConfig) -> Tensor:
    return torch.ones(())


_SCALES = {"group": _of_group, "batch": _of_batch, "none": _of_nothing}


def _std(rewards: Tensor, config: LossConfig) -> Tensor:
    """(..., n) -> (..., 1), of the rewards that are not NaN."""
    count = (~rewards.isnan()).sum(-1, keepdim=True) - int(config.advantage_std == "unbiased")
    return (deviations(rewards).square().sum(-1, keepdim=True) / count.clamp(min=1)).sqrt()


def _of_completions(groups: Sequence[JudgedGroup]) -> Tensor:
    """Rewards, (B, G), each less the penalty of its completion."""
    return padded([group.rewards - _penalties(group) for group in groups])


def _penalties(group: JudgedGroup) -> Array | float:
    if group.penalty is None:
        return 0.0
    return np.add.reduceat(_masked(group.penalty, group), np.cumsum(group.lengths) - group.lengths)


def _masked(values: Array, group: JudgedGroup) -> Array:
    values = values.astype(np.float64)
    return values if group.mask is None else np.where(group.mask, values, 0.0)


def _spread(groups: Iterable[JudgedGroup], completions: Tensor) -> list[Array]:
    rows = completions.numpy()
    return [np.repeat(row[: len(group.lengths)], group.lengths) for group, row in zip(groups, rows, strict=True)]


def _to_go(values: Array, lengths: Array) -> Array:
    """(C,) -> (C,): at each token the sum from there to the end of its completion."""
    total = np.cumsum(values[::-1])[::-1]
    after = np.append(total, 0.0)[np.cumsum(lengths)]
    return total - np.repeat(after, lengths)
