"""The learner: model and optimizer behind one verb, `step`."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from policy_trainer.advantages import group_advantages, has_variance
from policy_trainer.config import LossConfig, OptimizerConfig
from policy_trainer.loss import k3, sequence_mean_weights, token_loss
from shared.batch import ScoredBatch, TokenGroup
from shared.logprobs import LogprobForward


@dataclass(frozen=True)
class StepStats:
    """What one step saw and did. Means are over trained tokens where not said otherwise.

    groups: groups that trained; with none there was no update. kl: to the reference, before the update. not_finite:
    loss or gradient was not finite, and there was no update.
    """

    loss: float
    kl: float
    clip_fraction: float
    grad_norm: float
    lr: float
    groups: int
    tokens: int
    not_finite: bool


@dataclass(frozen=True, eq=False)
class _Group:
    """One group made ready for the loss: tensors over its C completion tokens."""

    tokens: TokenGroup
    temperature: float
    lengths: Tensor
    mask: Tensor
    trains: Tensor
    old_logps: Tensor
    ref_logps: Tensor
    advantages: Tensor


class Learner:
    """Trains `model` through `forward`, which computes its log-probs.

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
    ) -> None:
        self.model = model.eval()
        self._forward = forward
        self._loss = loss
        self._schedule = optimizer
        self._steps = steps
        self._micro_batch_tokens = micro_batch_tokens
        self.optimizer = torch.optim.AdamW(
            model.parameters(), betas=optimizer.betas, weight_decay=optimizer.weight_decay, foreach=True
        )

    def step(self, batches: Sequence[ScoredBatch], *, step: int) -> StepStats:
        """One update on whole groups. Without anything to learn from, or with a gradient that is not finite, none.

        step: how many steps came before. The learning rate depends on nothing else, so that resuming needs no state.
        """
        groups = [self._prepare(batch) for batch in batches if self._trains(batch)]
        completions = sum(int(group.trains.sum()) for group in groups)
        lr = self._schedule.lr * lr_factor(step, self._schedule, self._steps)
        self.optimizer.zero_grad(set_to_none=True)
        sums = torch.zeros(4, dtype=torch.float64)
        for micro_batch in _by_tokens(groups, self._micro_batch_tokens):
            sums += self._accumulate(micro_batch, completions)
        loss, kl, clipped, tokens = sums.tolist()
        norm = self._clip_gradients() if groups else 0.0
        not_finite = not (math.isfinite(loss) and math.isfinite(norm))
        # Without groups momentum alone would still move the weights.
        if groups and not not_finite:
            for parameters in self.optimizer.param_groups:
                # All of them: a checkpoint brings those of the run before it was resumed with other settings.
                parameters.update(lr=lr, betas=self._schedule.betas, weight_decay=self._schedule.weight_decay)
            self.optimizer.step()
        count = tokens or math.nan  # of no tokens there is no mean
        return StepStats(
            loss if groups else math.nan, kl / count, clipped / count, norm, lr, len(groups), int(tokens), not_finite
        )

    def _clip_gradients(self) -> float:
        """The norm that the gradients had before they were scaled down."""
        return float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._schedule.clip_norm))

    def kl(self, batches: Sequence[ScoredBatch]) -> float:
        """Mean k3 per token between the policy as it is and the reference, over whole batches; nothing is trained."""
        total, count = 0.0, 0
        with torch.no_grad():
            for batch in batches:
                logps = self._forward([batch.rollout.group], [batch.rollout.temperature])
                total += float(k3(_tensor(batch.ref_logps, logps.device) - logps).double().sum())
                count += len(logps)
        return total / max(count, 1)

    def _trains(self, batch: ScoredBatch) -> bool:
        rewards = torch.tensor(batch.rollout.rewards)
        return has_variance(rewards) or (not self._loss.drop_zero_variance and not bool(rewards.isnan().all()))

    def _prepare(self, batch: ScoredBatch) -> _Group:
        rollout, device = batch.rollout, self.model.device
        if rollout.sampler_logps is None:
            raise ValueError("a batch without sampler_logps cannot be trained on: the ratio is taken against them")
        lengths = torch.tensor(rollout.group.completion_lengths, device=device)
        rewards = _tensor(rollout.rewards, device)
        trains = ~rewards.isnan()
        mask = torch.repeat_interleave(trains, lengths)
        if rollout.loss_mask is not None:
            mask = mask & _tensor(rollout.loss_mask, device)
        advantages = group_advantages(rewards, eps=self._loss.advantage_eps)
        return _Group(
            tokens=rollout.group,
            temperature=rollout.temperature,
            lengths=lengths,
            mask=mask,
            trains=trains,
            old_logps=_tensor(rollout.sampler_logps, device),
            ref_logps=_tensor(batch.ref_logps, device),
            advantages=torch.repeat_interleave(advantages, lengths),
        )

    def _accumulate(self, groups: list[_Group], completions: int) -> Tensor:
        """Forward and backward of one micro-batch: float64 sums of loss, KL, clipped tokens and tokens."""

        def joined(name: str) -> Tensor:
            return torch.cat([getattr(group, name) for group in groups])

        mask = joined("mask")
        logps = self._forward([group.tokens for group in groups], [group.temperature for group in groups])
        per_token = token_loss(
            logps, joined("old_logps"), joined("ref_logps"), joined("advantages"), mask, clip=self._loss.clip
        )
        weights = sequence_mean_weights(joined("lengths"), mask, joined("trains"), completions=completions)
        loss = per_token.total(weights.to(logps.dtype), self._loss.beta)
        loss.backward()
        parts = (loss.detach(), per_token.kl.detach().sum(), per_token.clipped.sum(), mask.sum())
        return torch.stack([part.double().cpu() for part in parts])


def lr_factor(step: int, config: OptimizerConfig, steps: int) -> float:
    """Learning rate of a step as a fraction of the peak: a linear ramp times a linear decay over the run."""
    ramp = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    progress = min(1.0, step / max(steps - 1, 1))
    return ramp * (1 - (1 - config.final_lr_fraction) * progress)


def _by_tokens(groups: Sequence[_Group], limit: int) -> Iterator[list[_Group]]:
    """Whole groups in order, cut so that a micro-batch has at most `limit` tokens, unless one group alone has more."""
    micro_batch: list[_Group] = []
    for group in groups:
        if micro_batch and sum(g.tokens.tokens for g in micro_batch) + group.tokens.tokens > limit:
            yield micro_batch
            micro_batch = []
        micro_batch.append(group)
    if micro_batch:
        yield micro_batch


def _tensor(values: np.ndarray, device: torch.device) -> Tensor:
    return torch.tensor(values, device=device)
