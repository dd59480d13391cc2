"""Old-policy log-probs, for the ratio and for the KL penalty that is subtracted from the rewards."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from policy_trainer.config import LossConfig
from policy_trainer.objective.advantages import kl_penalty
from policy_trainer.objective.group import Group, LossInputs
from policy_trainer.objective.kl import reverse_kl
from shared.batch import Array

Recompute = Callable[[Sequence[Group]], list[Array]]
"""Log-probs of groups, float32 (C,) each, under the policy before the first update of a step."""


def with_old_logps(groups: Sequence[Group], loss: LossConfig, recompute: Recompute) -> list[Group]:
    """The groups with the old log-probs that `loss.old_logps` names.

    They also get the KL penalty if it is subtracted from the rewards, and the reverse KL if there is a teacher.
    """
    old_logps = _old_logps(groups, loss, recompute)
    groups = [replace(group, old_logps=values) for group, values in zip(groups, old_logps, strict=True)]
    if not loss.penalises_rewards and not loss.distillation:
        return groups
    # Both need old log-probs even where the ratio uses the current policy.
    known = [values for values in old_logps if values is not None] or recompute(groups)
    return [_with_kl(group, values, loss) for group, values in zip(groups, known, strict=True)]


def _old_logps(groups: Sequence[Group], loss: LossConfig, recompute: Recompute) -> Sequence[Array | None]:
    """float32 (C,) of each group; None means the current policy: the ratio is 1."""
    if loss.old_logps == "current":
        return [None] * len(groups)
    if loss.old_logps == "recomputed":
        return recompute(groups)
    return [group.sampler_logps for group in groups]  # log_linear: token_loss interpolates from these


def learner_logps(tokens: LossInputs, current: Tensor, loss: LossConfig) -> Tensor:
    """(C,): the learner's log-probs, which an importance-sampling correction compares with the sampler's."""
    return current if loss.old_logps == "sampler" else tokens.denominator(current)


def _with_kl(group: Group, old_logps: Array, loss: LossConfig) -> Group:
    if loss.penalises_rewards:
        assert group.ref_logps is not None
        group = replace(group, kl_penalty=kl_penalty(group.ref_logps, old_logps, loss))
    if group.teacher_logps is not None:
        group = replace(group, reverse_kl=reverse_kl(old_logps, group.teacher_logps))
    return group
