"""Supervised steps: minimises the negative log-prob of given completions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from policy_trainer.config import OptimizerConfig
from policy_trainer.learner.micro_batches import cut
from policy_trainer.learner.optimizer import clip_gradients, make_weights, step_weights
from shared.batch import TokenGroup
from shared.logprobs import LogprobForward


@dataclass(frozen=True)
class SupervisedStats:
    """Statistics of one step.

    loss: nats a completion token, before the update. grad_norm: before clipping. not_finite: the loss or the gradient
    was not finite, and the update was skipped.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    not_finite: bool


class SupervisedLearner:
    """Trains a model on rows, each a prompt with one completion.

    The model stays in evaluation mode, without dropout, as in the learner of GRPO.
    """

    def __init__(
        self, model: PreTrainedModel, forward: LogprobForward, *, optimizer: OptimizerConfig, micro_batch_tokens: int
    ) -> None:
        self.model = model.eval()
        self.weights = make_weights(model, optimizer)
        self._forward = forward
        self._optimizer = optimizer
        self._micro_batch_tokens = micro_batch_tokens

    def step(self, rows: Sequence[TokenGroup], *, lr: float) -> SupervisedStats:
        """Makes one update. The loss is the mean over all completion tokens of the rows."""
        tokens = _completion_tokens(rows)
        self.weights.optimizer.zero_grad(set_to_none=True)
        losses = []
        for part in cut([row.tokens for row in rows], self._micro_batch_tokens):
            share = self._total(rows[part]) / tokens
            share.backward()
            losses.append(share.detach())
        loss = float(torch.stack(losses).sum())
        norm = clip_gradients(self.weights, self._optimizer)
        not_finite = not (math.isfinite(loss) and math.isfinite(norm))
        if not not_finite:
            step_weights(self.weights, self._optimizer, lr)
        return SupervisedStats(loss=loss, grad_norm=norm, learning_rate=lr, tokens=tokens, not_finite=not_finite)

    @torch.no_grad()
    def loss(self, rows: Sequence[TokenGroup]) -> float:
        """Mean loss of the rows, nats a completion token, without training."""
        parts = cut([row.tokens for row in rows], self._micro_batch_tokens)
        return sum(float(self._total(rows[part])) for part in parts) / _completion_tokens(rows)

    def _total(self, rows: Sequence[TokenGroup]) -> Tensor:
        return -self._forward(rows, [1.0] * len(rows)).sum()


def _completion_tokens(rows: Sequence[TokenGroup]) -> int:
    return sum(len(row.completion_ids) for row in rows)
