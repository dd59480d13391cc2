"""The learner: model and optimizer behind one verb, `step`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from policy_trainer.config import LossConfig, OptimizerConfig
from policy_trainer.loss import k3, sequence_mean_weights, token_loss
from policy_trainer.micro_batches import MicroBatch, cut, micro_batches, prepare
from policy_trainer.weights import make_weights
from shared.batch import ScoredBatch
from shared.logprobs import LogprobForward


@dataclass(frozen=True)
class StepStats:
    """What one step saw and did. Means are over trained tokens where not said otherwise.

    groups: groups that trained; with none there was no update. kl: to the reference, before the update. entropy: of the
    policy, in nats, before the update. not_finite: loss or gradient was not finite, and there was no update.
    """

    loss: float
    kl: float
    entropy: float
    clip_fraction: float
    grad_norm: float
    lr: float
    groups: int
    tokens: int
    not_finite: bool


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
        self.weights = make_weights(model, optimizer)

    def step(self, batches: Sequence[ScoredBatch], *, step: int) -> StepStats:
        """One update on whole groups. Without anything to learn from, or with a gradient that is not finite, none.

        step: how many steps came before. The learning rate depends on nothing else, so that resuming needs no state.
        """
        groups = prepare(batches, self._loss)
        completions = sum(int(group.trains.sum()) for group in groups)
        lr = self._schedule.lr * lr_factor(step, self._schedule, self._steps)
        self.weights.optimizer.zero_grad(set_to_none=True)
        parts = [
            self._accumulate(micro_batch, completions)
            for micro_batch in micro_batches(groups, self._micro_batch_tokens, self.model.device)
        ]
        # Read once all of them are under way: a device would stand still meanwhile.
        sums = sum((part.cpu() for part in parts), torch.zeros(5, dtype=torch.float64))
        loss, kl, entropy, clipped, tokens = sums.tolist()
        norm = self._clip_gradients() if groups else 0.0
        not_finite = not (math.isfinite(loss) and math.isfinite(norm))
        # Without groups momentum alone would still move the weights.
        if groups and not not_finite:
            self._update(lr)
        count = tokens or math.nan  # of no tokens there is no mean
        return StepStats(
            loss=loss if groups else math.nan,
            kl=kl / count,
            entropy=entropy / count,
            clip_fraction=clipped / count,
            grad_norm=norm,
            lr=lr,
            groups=len(groups),
            tokens=int(tokens),
            not_finite=not_finite,
        )

    def _clip_gradients(self) -> float:
        """The norm that the gradients had before they were scaled down."""
        return float(torch.nn.utils.clip_grad_norm_(self.weights.stepped.values(), self._schedule.clip_norm))

    def _update(self, lr: float) -> None:
        for group in self.weights.optimizer.param_groups:
            # All of them: a checkpoint brings those of the run before it was resumed with other settings.
            group.update(lr=lr, betas=self._schedule.betas, weight_decay=self._schedule.weight_decay)
        self.weights.step()

    def kl(self, batches: Sequence[ScoredBatch]) -> float:
        """Mean k3 per token between the policy as it is and the reference, over whole batches; nothing is trained."""
        total, count = 0.0, 0
        with torch.no_grad():
            for batch in batches:
                logps = self._forward([batch.rollout.group], [batch.rollout.temperature])
                total += float(k3(torch.tensor(batch.ref_logps, device=logps.device) - logps).double().sum())
                count += len(logps)
        return total / max(count, 1)

    def noise_floor(self, batches: Sequence[ScoredBatch]) -> float:
        """Mean k3 per token between the policy and itself: packed as in training, and each group alone, in two halves.

        A KL to the reference that is no larger says nothing. It is 0 but for rounding in float32; half precision
        depends on the shapes that a device multiplies. Halves, since large groups are packed alone anyway.
        """
        groups = [(batch.rollout.group, batch.rollout.temperature) for batch in batches]
        total, count = 0.0, 0
        with torch.no_grad():
            for part in cut([group.tokens for group, _ in groups], self._micro_batch_tokens):
                packed = self._forward(*zip(*groups[part], strict=True))
                halves = [(half, temperature) for group, temperature in groups[part] for half in group.halves()]
                alone = torch.cat([self._forward([half], [temperature]) for half, temperature in halves])
                total += float(k3(packed - alone).double().sum())
                count += len(packed)
        return total / max(count, 1)

    def _accumulate(self, micro_batch: MicroBatch, completions: int) -> Tensor:
        """Forward and backward of one micro-batch: sums of loss, KL, entropy, clipped tokens and tokens."""
        mask = micro_batch.mask
        logps, entropy = self._forward.with_entropy(micro_batch.groups, micro_batch.temperatures)
        per_token = token_loss(
            logps, micro_batch.old_logps, micro_batch.ref_logps, micro_batch.advantages, mask, clip=self._loss.clip
        )
        weights = sequence_mean_weights(micro_batch.lengths, mask, micro_batch.trains, completions=completions)
        loss = per_token.total(weights.to(logps.dtype), self._loss.beta)
        loss.backward()
        kl, trained_entropy = per_token.kl.detach().sum(), torch.where(mask, entropy, 0.0).sum()
        sums = (loss.detach(), kl, trained_entropy, per_token.clipped.sum(), mask.sum())
        return torch.stack([part.to(logps.dtype) for part in sums])


def lr_factor(step: int, config: OptimizerConfig, steps: int) -> float:
    """Learning rate of a step as a fraction of the peak: a linear ramp times a linear decay over the run."""
    ramp = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    progress = min(1.0, step / max(steps - 1, 1))
    return ramp * (1 - (1 - config.final_lr_fraction) * progress)
