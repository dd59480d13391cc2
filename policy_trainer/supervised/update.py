"""One update of the weights, from the losses of its micro-batches."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from policy_trainer.config import OptimizerConfig
from policy_trainer.learner.optimizer import Weights, clip_gradients, step_weights


@dataclass(frozen=True)
class Update:
    """loss: before the update. grad_norm: before clipping. not_finite: one of them was not, and nothing was updated."""

    loss: float
    grad_norm: float
    not_finite: bool


def update(weights: Weights, optimizer: OptimizerConfig, shares: Iterable[Tensor], lr: float) -> Update:
    """Makes one step. shares: the shares of the micro-batches in the loss; each is computed when it is its turn."""
    weights.optimizer.zero_grad(set_to_none=True)
    losses = []
    for share in shares:
        share.backward()
        losses.append(share.detach())
    loss = float(torch.stack(losses).sum())
    norm = clip_gradients(weights, optimizer)
    not_finite = not (math.isfinite(loss) and math.isfinite(norm))
    if not not_finite:
        step_weights(weights, optimizer, lr)
    return Update(loss, norm, not_finite)
