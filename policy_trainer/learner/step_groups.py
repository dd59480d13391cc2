"""The groups of a step on their way to the loss: which of them teach, and with what advantages."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from policy_trainer.config import LossConfig
from policy_trainer.objective.advantages import JudgedGroup, advantages, has_variance, padded
from policy_trainer.objective.loss import KL_ESTIMATORS
from shared.batch import Array, RolloutBatch, ScoredBatch, TokenGroup

# With a reference's log-probs or, where the loss needs none, without.
Batch = RolloutBatch | ScoredBatch


@dataclass(frozen=True, eq=False)
class StepGroup:
    """One group, before its advantages are known. rewards: float32 (G,), NaN for completions that take no part.
    trains: bool (G,). varies: whether its raw rewards differ. teaches: whether it trains at all."""

    batch: Batch
    rewards: Array
    trains: Array
    varies: bool
    teaches: bool

    @property
    def rollout(self) -> RolloutBatch:
        return rollout_of(self.batch)


@dataclass(frozen=True, eq=False)
class Prepared:
    """One group as the loss takes it. trains: bool (G,), completions that train. mask: bool (C,), tokens that do.
    advantages: float32 (C,). old_logps, ref_logps, sampler_logps: float32 (C,), or None where they are not known."""

    group: TokenGroup
    temperature: float
    trains: Array
    mask: Array
    advantages: Array
    old_logps: Array | None
    ref_logps: Array | None
    sampler_logps: Array | None


def rollout_of(batch: Batch) -> RolloutBatch:
    return batch.rollout if isinstance(batch, ScoredBatch) else batch


def lack(batch: Batch, loss: LossConfig) -> str | None:
    """Why a batch cannot be trained on with this loss; None when it can."""
    rollout = rollout_of(batch)
    if rollout.sampler_logps is None and (loss.old_logps == "sampler" or loss.importance_sampling_correction != "none"):
        return "it has no sampler_logps, which the ratio or its correction is taken against"
    if loss.beta > 0 and not isinstance(batch, ScoredBatch):
        return "it has no ref_logps, which the KL penalty is taken to: it was uploaded to a server without a model"
    if loss.advantage == "process" and rollout.steps is None:
        return "it has no step_rewards, which process supervision is made of"
    return None


def judge(batches: Sequence[Batch], loss: LossConfig) -> list[StepGroup]:
    """What takes part, of every group of a step. Raises ValueError for a batch that the loss cannot be computed of."""
    for batch in batches:
        if reason := lack(batch, loss):
            raise ValueError(f"batch {rollout_of(batch).id} cannot be trained on: {reason}")
    rewards = [_rewards(rollout_of(batch), loss) for batch in batches]
    groups = [_judged(rollout_of(batch), own, loss) for batch, own in zip(batches, rewards, strict=True)]
    varies = has_variance(padded([group.signal for group in groups])).tolist()
    return [_step_group(*each, loss) for each in zip(batches, rewards, varies, strict=True)]


def prepare(groups: Sequence[StepGroup], loss: LossConfig, old_logps: Sequence[Array | None]) -> list[Prepared]:
    """The groups that teach, with their advantages: together the whole of a step.

    old_logps: float32 (C,) of each, under the policy before its first update on them; None where it was not asked.
    """
    penalties = [_penalty(*each, loss) for each in zip(groups, old_logps, strict=True)]
    judged = [_judged(group.rollout, group.rewards, loss, own) for group, own in zip(groups, penalties, strict=True)]
    values = advantages(judged, loss) if groups else []
    return [_prepared(*each) for each in zip(groups, values, old_logps, strict=True)]


def _rewards(rollout: RolloutBatch, loss: LossConfig) -> Array:
    """NaN for completions that take no part."""
    out = np.zeros(rollout.group.size, np.bool_)
    if loss.truncated == "drop":
        out |= ~rollout.finished
    if loss.advantage == "process" and rollout.steps is not None:
        out |= rollout.steps.unrewarded
    return np.where(out, np.float32(np.nan), rollout.rewards)


def _judged(rollout: RolloutBatch, rewards: Array, loss: LossConfig, penalty: Array | None = None) -> JudgedGroup:
    return JudgedGroup(
        rewards=rewards,
        lengths=rollout.group.completion_lengths,
        mask=rollout.loss_mask,
        penalty=penalty,
        steps=rollout.steps if loss.advantage == "process" else None,
    )


def _step_group(batch: Batch, rewards: Array, varies: bool, loss: LossConfig) -> StepGroup:
    trains = ~np.isnan(rewards)
    if loss.truncated == "mask":
        trains &= rollout_of(batch).finished
    return StepGroup(batch, rewards, trains, varies, bool(trains.any()) and (varies or not loss.drop_zero_variance))


def _penalty(group: StepGroup, old_logps: Array | None, loss: LossConfig) -> Array | None:
    """beta times the KL of each token, (C,), where it is taken off the rewards."""
    if not loss.penalises_rewards:
        return None
    assert old_logps is not None and isinstance(group.batch, ScoredBatch)
    # REINFORCE++ has the plain log-ratio there; what is in the loss besides is another matter.
    estimator = KL_ESTIMATORS["k1" if loss.advantage == "reinforce++" else loss.kl]
    x = torch.from_numpy(group.batch.ref_logps.astype(np.float64) - old_logps)
    return (loss.beta * estimator(x)).numpy()


def _prepared(group: StepGroup, values: Array, old_logps: Array | None) -> Prepared:
    rollout = group.rollout
    mask = np.repeat(group.trains, rollout.group.completion_lengths)
    return Prepared(
        group=rollout.group,
        temperature=rollout.temperature,
        trains=group.trains,
        mask=mask if rollout.loss_mask is None else mask & rollout.loss_mask,
        advantages=values,
        old_logps=old_logps,
        ref_logps=group.batch.ref_logps if isinstance(group.batch, ScoredBatch) else None,
        sampler_logps=rollout.sampler_logps,
    )
