"""Group advantages: functions of the raw rewards of one whole group. A chunk of a group would be normalised wrongly."""

import torch
from torch import Tensor


def group_advantages(rewards: Tensor, *, eps: float = 1e-4) -> Tensor:
    """(G,) raw rewards of one group -> (G,) advantages (r - mean) / (std + eps), float32 or wider.

    std is unbiased. A NaN reward takes no part in the statistics and gets 0; so does every reward of a group in which
    none differ, a group of one among them: the mean of equal numbers is rounded, and eps would magnify that.
    DeepSeekMath, outcome supervision (arXiv 2402.03300, 4.1.2).
    """
    rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
    if not has_variance(rewards):
        return torch.zeros_like(rewards)
    judged = ~rewards.isnan()
    known = rewards[judged]
    advantages = (rewards - known.mean()) / (known.std() + eps)
    return torch.where(judged, advantages, 0.0)


def has_variance(rewards: Tensor) -> bool:
    """Whether the judged rewards of a group differ: otherwise the group says nothing about what is better."""
    known = rewards[~rewards.isnan()]
    return bool(len(known) > 1 and (known != known[0]).any())
