"""Old-policy log-probs, for the ratio and for the KL penalty that is subtracted from the rewards."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from policy_trainer.config import LossConfig
from policy_trainer.objective.advantages import kl_penalty
from policy_trainer.objective.distillation import reverse_kl
from policy_trainer.objective.group import Group
from policy_trainer.objective.loss import LossTokens
from shared.batch import Array

Recompute = Callable[[Sequence[Group]], list[Array]]
"""Log-probs of groups, float32 (C,) each, under the policy before the first update of a step."""


class OldLogps(Protocol):
    def for_ratio(self, groups: Sequence[Group], recompute: Recompute) -> list[Array | None]:
        """Old log-probs of each group, float32 (C,); None means the current policy: the ratio is 1."""
        ...

    def of_learner(self, tokens: LossTokens, current: Tensor) -> Tensor:
        """The learner's log-probs, (C,), that an importance-sampling correction compares with the sampler's."""
        ...


class SamplerLogps:
    """The sampler's log-probs, which come with the batch."""

    def for_ratio(self, groups: Sequence[Group], recompute: Recompute) -> list[Array | None]:
        return [group.sampler_logps for group in groups]

    def of_learner(self, tokens: LossTokens, current: Tensor) -> Tensor:
        return current


class RecomputedLogps:
    """The learner's log-probs before the first of several updates."""

    def for_ratio(self, groups: Sequence[Group], recompute: Recompute) -> list[Array | None]:
        return [*recompute(groups)]

    def of_learner(self, tokens: LossTokens, current: Tensor) -> Tensor:
        return tokens.denominator(current)


class CurrentLogps:
    """The learner's current log-probs at each update."""

    def for_ratio(self, groups: Sequence[Group], recompute: Recompute) -> list[Array | None]:
        return [None] * len(groups)

    def of_learner(self, tokens: LossTokens, current: Tensor) -> Tensor:
        return current


class LogLinearLogps:
    """The sampler's log-probs, which each update moves towards its own."""

    def for_ratio(self, groups: Sequence[Group], recompute: Recompute) -> list[Array | None]:
        return [group.sampler_logps for group in groups]

    def of_learner(self, tokens: LossTokens, current: Tensor) -> Tensor:
        return tokens.denominator(current)


OLD_LOGPS: dict[str, OldLogps] = {
    "sampler": SamplerLogps(),
    "recomputed": RecomputedLogps(),
    "current": CurrentLogps(),
    "log_linear": LogLinearLogps(),
}


def choose_old_logps(loss: LossConfig, updates: int) -> OldLogps:
    """updates: number per step. With one, the recomputed log-probs equal the current ones: no extra forward."""
    return OLD_LOGPS["current" if loss.old_logps == "recomputed" and updates == 1 else loss.old_logps]


def with_old_logps(groups: Sequence[Group], loss: LossConfig, choice: OldLogps, recompute: Recompute) -> list[Group]:
    """The groups with their old log-probs; with their KL penalty, if it is subtracted from the rewards, and with their
    reverse KL to a teacher."""
    old_logps = choice.for_ratio(groups, recompute)
    groups = [replace(group, old_logps=own) for group, own in zip(groups, old_logps, strict=True)]
    if not loss.penalises_rewards and not loss.distillation:
        return groups
    # Both need old log-probs even where the ratio uses the current policy.
    known = [own for own in old_logps if own is not None] or recompute(groups)
    return [_with_kl(group, own, loss) for group, own in zip(groups, known, strict=True)]


def _with_kl(group: Group, old_logps: Array, loss: LossConfig) -> Group:
    if loss.penalises_rewards:
        assert group.ref_logps is not None
        group = replace(group, kl_penalty=kl_penalty(group.ref_logps, old_logps, loss))
    if group.teacher_logps is not None:
        group = replace(group, reverse_kl=reverse_kl(old_logps, group.teacher_logps))
    return group
