"""Group advantages: functions of the raw rewards of whole groups. A chunk of a group would be normalised wrongly."""

import torch
from torch import Tensor


def group_advantages(rewards: Tensor, *, eps: float = 1e-4) -> Tensor:
    """(..., G) raw rewards, a group in each row -> (..., G) advantages (r - mean) / (std + eps), float32 or wider.

    std is unbiased. A NaN reward takes no part in the statistics and gets 0; so does every reward of a group in which
    none differ, a group of one among them: the mean of equal numbers is rounded, and eps would magnify that. So
    smaller groups are padded with NaN. DeepSeekMath, outcome supervision (arXiv 2402.03300, 4.1.2).
    """
    judged = ~rewards.isnan()
    counts = judged.sum(-1, keepdim=True)
    known = torch.where(judged, rewards.double(), 0.0)  # in float32 the sum of squares might overflow
    deviations = torch.where(judged, known - known.sum(-1, keepdim=True) / counts, 0.0)
    std = (deviations.square().sum(-1, keepdim=True) / (counts - 1)).sqrt()
    advantages = torch.where(has_variance(rewards)[..., None], deviations / (std + eps), 0.0)
    return advantages.to(torch.promote_types(rewards.dtype, torch.float32))


def has_variance(rewards: Tensor) -> Tensor:
    """(..., G) -> bool (...): whether the judged rewards of a group differ, and so say what is better."""
    unknown = rewards.isnan()
    highest = rewards.masked_fill(unknown, -torch.inf).amax(-1)
    return highest > rewards.masked_fill(unknown, torch.inf).amin(-1)
