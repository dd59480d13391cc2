"""Makes the groups of a step from batches: their rewards, the completions that take part, their old log-probs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np
from jaxtyping import Float, Float32

from policy_trainer.algorithms.objective.advantages import gradient_norms, kl_penalty
from policy_trainer.algorithms.objective.group import Group, RewardParts
from policy_trainer.algorithms.objective.kl import reverse_kl
from policy_trainer.config import LossConfig, ReferenceSource
from shared.batch import Array, Batch

# Weights of rewards, by name.
PartWeights = Mapping[str, float]
Recompute = Callable[[Sequence[Group]], list[Array]]
"""Log-probs of groups, float32 (C,) each, under the policy before the first update of a step."""


def missing_input(
    batch: Batch, loss: LossConfig, reference: ReferenceSource = "server", weights: PartWeights = MappingProxyType({})
) -> str | None:
    """Why the batch lacks an input that the loss needs; None if it can be trained on. reference: the source of its
    log-probs. weights: of the rewards, which gdpo takes apart."""
    if batch.sampler_logps is None and loss.needs_sampler_logps:
        return (
            "it has no sampler_logps, which the ratio, the importance-sampling correction or the mismatch penalty needs"
        )
    if loss.beta > 0 and reference == "server" and batch.ref_logps is None:
        return "it has no ref_logps, which the KL penalty needs: it was uploaded to a server without a model"
    if loss.distillation and teacher_logps(batch, loss, reference) is None:
        return "it has no teacher_logps, which distillation needs: no teacher was on the server that scored it"
    if loss.advantage == "process" and batch.steps is None:
        return "it has no step_rewards, which process supervision needs"
    weighing = {name for name, weight in weights.items() if weight}
    if loss.advantage == "gdpo" and (lost := weighing - batch.reward_parts.keys()):
        return f"it has no reward/{min(lost)}, which gdpo normalises: its worker's rewards are not the trainer's"
    return None


def make_group(
    batch: Batch,
    loss: LossConfig,
    reference: ReferenceSource = "server",
    step: int = 0,
    weights: PartWeights = MappingProxyType({}),
) -> Group:
    """The batch as a group. step: steps made before the one that trains on it. weights: of the rewards, by name.

    Raises ValueError for a batch that lacks what the loss needs.
    """
    if reason := missing_input(batch, loss, reference, weights):
        raise ValueError(f"batch {batch.id} cannot be trained on: {reason}")
    rewards = _rewards(batch, loss)
    versions = batch.policy_versions
    versions = np.full(batch.group.size, batch.policy_version) if versions is None else versions
    return Group(
        tokens=batch.group,
        temperature=batch.temperature,
        rewards=rewards,
        sequence_mask=~np.isnan(rewards) & (batch.finished | (loss.truncated != "mask")),
        loss_mask=batch.loss_mask,
        steps=batch.steps if loss.advantage == "process" else None,
        parts=RewardParts.of(batch.reward_parts, weights) if loss.advantage == "gdpo" else None,
        sampler_logps=batch.sampler_logps,
        ref_logps=batch.ref_logps,
        # The weights after n steps have the version n.
        staleness=np.maximum(step - versions, 0) if loss.old_logps == "log_linear" else None,
        teacher_logps=teacher_logps(batch, loss, reference),
    )


def teacher_logps(batch: Batch, loss: LossConfig, reference: ReferenceSource) -> Float32[np.ndarray, " C"] | None:
    """The log-probs of the server's second model, or of its only one if the KL penalty does not use it.

    None if the batch lacks them or the loss ignores them. reference: of the KL penalty.
    """
    if not loss.distillation or batch.ref_logps is None:
        return None
    penalised = loss.beta > 0 and reference == "server"
    return batch.ref_logps if batch.teacher_logps is None and not penalised else batch.teacher_logps


def trains(group: Group, loss: LossConfig) -> bool:
    """Whether a group has a completion to train on, and rewards that differ if the loss needs that."""
    return bool(group.sequence_mask.any()) and (group.has_variance or not loss.needs_variance)


def _rewards(batch: Batch, loss: LossConfig) -> Float32[np.ndarray, " G"]:
    """NaN for completions that take no part."""
    left_out = np.zeros(batch.group.size, np.bool_)
    if loss.truncated == "drop":
        left_out |= ~batch.finished
    if loss.advantage == "process" and batch.steps is not None:
        left_out |= batch.steps.unrewarded
    return np.where(left_out, np.float32(np.nan), batch.rewards)


def with_old_logps(groups: Sequence[Group], loss: LossConfig, recompute: Recompute) -> list[Group]:
    """The groups with the old log-probs that `loss.old_logps` names; None means the current policy: the ratio is 1.

    They also get the KL penalty if it is subtracted from the rewards, the reverse KL if there is a teacher, and the
    gradient norms if the advantage uses them.
    """
    # log_linear begins with the sampler's: token_loss interpolates from these.
    old_logps: Sequence[Array | None] = [group.sampler_logps for group in groups]
    current = recompute(groups) if loss.old_logps == "recomputed" or loss.needs_gradient_norms else []
    if loss.old_logps == "current":
        old_logps = [None] * len(groups)
    elif loss.old_logps == "recomputed":
        old_logps = current
    groups = [replace(group, old_logps=values) for group, values in zip(groups, old_logps, strict=True)]
    if loss.needs_gradient_norms:
        halved = recompute([replace(group, temperature=group.temperature / 2) for group in groups])
        norms = map(gradient_norms, current, halved)
        groups = [replace(group, gradient_norms=values) for group, values in zip(groups, norms, strict=True)]
    if not loss.penalises_rewards and not loss.distillation:
        return groups
    # Both need old log-probs even where the ratio uses the current policy.
    known = [values for values in old_logps if values is not None] or current or recompute(groups)
    return [_with_kl(group, values, loss) for group, values in zip(groups, known, strict=True)]


def _with_kl(group: Group, old_logps: Float[np.ndarray, " C"], loss: LossConfig) -> Group:
    if loss.penalises_rewards:
        assert group.ref_logps is not None
        group = replace(group, kl_penalty=kl_penalty(group.ref_logps, old_logps, loss))
    if group.teacher_logps is not None:
        group = replace(group, reverse_kl=reverse_kl(old_logps, group.teacher_logps))
    return group
