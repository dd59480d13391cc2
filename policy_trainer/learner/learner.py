"""The learner: model and optimizer behind one verb, `step`."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from policy_trainer.config import LossConfig, OptimizerConfig
from policy_trainer.learner.micro_batches import MicroBatch, cut, micro_batches, shares, totals
from policy_trainer.learner.optimizer import clip_gradients, lr_factor, make_weights, step_weights
from policy_trainer.learner.step_groups import Batch, Prepared, StepGroup, judge, prepare, rollout_of
from policy_trainer.learner.step_stats import StepStats, Update, added, step_stats, tally
from policy_trainer.objective.aggregation import Totals, token_weights
from policy_trainer.objective.corrections import CorrectionStats, correction
from policy_trainer.objective.loss import LossTokens, k3, token_loss
from shared.batch import Array, ScoredBatch
from shared.logprobs import LogprobForward


class Learner:
    """Trains `model` through `forward`, which computes its log-probs.

    num_iterations: passes over the groups of a step. minibatches: parts of each pass, with an update for each part.
    max_completion_length: where completions are cut off; the `constant` mean is taken over it.
    The model stays in evaluation mode: dropout would make the policy differ from itself, and KL at step 0 from 0.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        forward: LogprobForward,
        *,
        loss: LossConfig,
        optimizer: OptimizerConfig,
        steps: int,
        micro_batch_tokens: int,
        max_completion_length: int,
        num_iterations: int = 1,
        minibatches: int = 1,
    ) -> None:
        self.model = model.eval()
        self._forward = forward
        self._loss = loss
        self._schedule = optimizer
        self._steps = steps
        self._micro_batch_tokens = micro_batch_tokens
        self._max_completion_length = max_completion_length
        self._num_iterations = num_iterations
        self._minibatches = minibatches
        # With a single update the policy before it is the policy: its log-probs need no forward of their own.
        self._recomputes = loss.old_logps == "recomputed" and num_iterations * minibatches > 1
        self._against_itself = not self._recomputes and loss.old_logps != "sampler"
        self.weights = make_weights(model, optimizer)

    def step(self, batches: Sequence[Batch], *, step: int) -> StepStats:
        """Trains on whole groups. Without anything to learn from, or with a gradient that is not finite, no update.

        step: how many steps came before. The learning rate depends on nothing else, so that resuming needs no state.
        Raises ValueError for a batch that lacks what the loss needs.
        """
        judged = judge(batches, self._loss)
        teaching = [group for group in judged if group.teaches]
        groups = prepare(teaching, self._loss, self._old_logps(teaching))
        if self._against_itself:  # what a penalty was taken with is no matter of the ratio
            groups = [replace(group, old_logps=None) for group in groups]
        lr = self._schedule.learning_rate * lr_factor(step, self._schedule, self._steps)
        parts = shares(len(groups), self._minibatches)
        updates = [self._update(groups[part], lr) for _ in range(self._num_iterations) for part in parts]
        return step_stats(judged, groups, updates, num_iterations=self._num_iterations, learning_rate=lr)

    def _old_logps(self, groups: Sequence[StepGroup]) -> list[Array | None]:
        """Of each group, (C,): by what its ratio or its penalty is taken with; None where that is the policy as it is.

        Packed as the updates will pack them: half precision depends on it.
        """
        if self._loss.old_logps == "sampler":
            return [group.rollout.sampler_logps for group in groups]
        if not (self._recomputes or self._loss.penalises_rewards):
            return [None] * len(groups)
        return [own for part in shares(len(groups), self._minibatches) for own in self._logps(groups[part])]

    @torch.no_grad()
    def _logps(self, groups: Sequence[StepGroup]) -> list[Array]:
        """Log-probs under the policy as it is."""
        tokens, logps = [group.rollout.group for group in groups], []
        for part in cut([group.tokens for group in tokens], self._micro_batch_tokens):
            own = self._forward(tokens[part], [group.rollout.temperature for group in groups[part]]).cpu().numpy()
            logps += np.split(own, np.cumsum([len(group.completion_ids) for group in tokens[part]])[:-1])
        return logps

    def _update(self, groups: Sequence[Prepared], lr: float) -> Update:
        """One update on these groups, unless loss or gradient is not finite."""
        total = totals(groups, self._max_completion_length)
        self.weights.optimizer.zero_grad(set_to_none=True)
        tallies = [
            self._accumulate(micro_batch, total)
            for micro_batch in micro_batches(groups, self._micro_batch_tokens, self.model.device)
        ]
        update = Update(added(tallies), clip_gradients(self.weights, self._schedule))
        if update.finite:
            step_weights(self.weights, self._schedule, lr)
        return update

    def _accumulate(self, micro_batch: MicroBatch, total: Totals) -> Tensor:
        """Forward and backward of one micro-batch, and its tally."""
        logps, entropy = self._forward.with_entropy(micro_batch.groups, micro_batch.temperatures)
        tokens, gap, corrected = self._against(micro_batch, logps.detach())
        per_token = token_loss(logps, tokens, self._loss)
        weights = token_weights(self._loss.aggregation, tokens.rows, tokens.mask, micro_batch.trains, total)
        loss = (weights.to(logps.dtype) * per_token.loss).sum()
        loss.backward()
        return tally(loss.detach(), per_token, entropy, tokens.mask, gap, corrected)

    def _against(self, micro_batch: MicroBatch, logps: Tensor) -> tuple[LossTokens, Tensor, CorrectionStats]:
        """What the loss takes, with what it is compared with; how far the sampler is off; and what would correct it,
        which is told of though it may not be asked for."""
        tokens, sampler_logps = micro_batch.tokens, micro_batch.sampler_logps
        before = logps
        if self._recomputes:
            assert tokens.old_logps is not None
            before = tokens.old_logps
        if sampler_logps is None:
            unknown = torch.full_like(logps, torch.nan)
            return tokens, unknown, CorrectionStats(unknown, torch.zeros_like(tokens.mask))
        gap = (before - sampler_logps).abs()
        weights, stats = correction(before, sampler_logps, tokens.rows, tokens.mask, self._loss)
        return (
            (tokens if self._loss.importance_sampling_correction == "none" else replace(tokens, correction=weights)),
            gap,
            stats,
        )

    def kl(self, batches: Sequence[Batch]) -> float:
        """Mean k3 per token between the policy as it is and the reference, over whole batches; nothing is trained. NaN
        where a batch came without ref_logps."""
        total, count = 0.0, 0
        with torch.no_grad():
            for batch in batches:
                if not isinstance(batch, ScoredBatch):
                    return math.nan
                logps = self._forward([batch.rollout.group], [batch.rollout.temperature])
                total += float(k3(torch.tensor(batch.ref_logps, device=logps.device) - logps).double().sum())
                count += len(logps)
        return total / max(count, 1)

    def noise_floor(self, batches: Sequence[Batch]) -> float:
        """Mean k3 per token between the policy and itself: packed as in training, and each group alone, in two halves.

        A KL to the reference that is no larger says nothing. It is 0 but for rounding in float32; half precision
        depends on the shapes that a device multiplies. Halves, since large groups are packed alone anyway.
        """
        rollouts = [rollout_of(batch) for batch in batches]
        groups = [(rollout.group, rollout.temperature) for rollout in rollouts]
        total, count = 0.0, 0
        with torch.no_grad():
            for part in cut([group.tokens for group, _ in groups], self._micro_batch_tokens):
                packed = self._forward(*zip(*groups[part], strict=True))
                halves = [(half, temperature) for group, temperature in groups[part] for half in group.halves()]
                alone = torch.cat([self._forward([half], [temperature]) for half, temperature in halves])
                total += float(k3(packed - alone).double().sum())
                count += len(packed)
        return total / max(count, 1)
