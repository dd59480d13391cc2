"""The product's formulas, put together in float64 for completions that are written out: no model, no batch.

How the learner puts them together is proved in test_invariance.py.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from policy_trainer.algorithms.objective.advantages import ADVANTAGES, kl_penalty
from policy_trainer.algorithms.objective.aggregation import Totals, token_weights, update_mean
from policy_trainer.algorithms.objective.corrections import importance_sampling_weights
from policy_trainer.algorithms.objective.entropy import EntropyBonus, high_entropy
from policy_trainer.algorithms.objective.group import Group as TrainedGroup
from policy_trainer.algorithms.objective.group import LossInputs, RewardParts
from policy_trainer.algorithms.objective.kl import reverse_kl, with_teacher
from policy_trainer.algorithms.objective.loss import token_loss
from policy_trainer.config import LossConfig
from shared.batch import StepRewards
from tests.policy_trainer.groups import make_group
from tests.policy_trainer.proofs.oracle import Completion, Group, counts, teaches, trains


def loss_and_gradient(groups: Sequence[Group], config: LossConfig, max_tokens: int) -> tuple[float, list[float]]:
    """The loss of a step, and its gradient to the log-prob and the entropy of each token of all groups."""
    which_teach = [teaches(group, config) for group in groups]
    kept = [group for group, teaching in zip(groups, which_teach, strict=True) if teaching]
    everyone = [completion for group in kept for completion in group]
    if not everyone:
        return 0.0, [0.0] * sum(2 * len(completion.logps) for group in groups for completion in group)
    leaves = [
        torch.tensor([float(element) for completion in everyone for element in values(completion)]).requires_grad_()
        for values in TOKEN_VALUES
    ]
    loss = _loss(leaves[0], leaves[1], kept, everyone, config, max_tokens)
    loss.backward()
    gradient: list[float] = []
    for leaf in leaves:
        grads = iter(gradient_of(leaf).split([sum(len(completion.logps) for completion in group) for group in kept]))
        for group, teaching in zip(groups, which_teach, strict=True):
            gradient += next(grads).tolist() if teaching else [0.0] * sum(len(completion.logps) for completion in group)
    return loss.item(), gradient


# What the loss has a gradient to.
TOKEN_VALUES: tuple[Callable[[Completion], Sequence[Any]], ...] = (
    lambda completion: completion.logps,
    lambda completion: completion.entropies,
)


def gradient_of(leaf: Tensor) -> Tensor:
    """0 where the loss does not depend on it."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def token_advantages(groups: Sequence[Group], config: LossConfig) -> list[list[float]]:
    """Of every token of each group, in float64."""
    made = [_group(group, config) for group in groups]
    values = ADVANTAGES[config.advantage](made, config)
    return [with_teacher(row, group, config).tolist() for row, group in zip(values, made, strict=True)]


def _loss(
    logps: Tensor,
    entropies: Tensor,
    groups: Sequence[Group],
    everyone: list[Completion],
    config: LossConfig,
    max_tokens: int,
) -> Tensor:
    sequence_ids = torch.tensor([row for row, completion in enumerate(everyone) for _ in completion.logps])
    part = torch.tensor([trains(completion, config) for completion in everyone])
    mask = torch.tensor([trained for completion in everyone for trained in completion.mask]) & part[sequence_ids]
    sampler, old, reference = (
        torch.tensor([value for completion in everyone for value in getattr(completion, name)])
        for name in ("sampler", "old", "reference")
    )
    linear = config.old_logps == "log_linear"
    tokens = LossInputs(
        sequence_ids=sequence_ids,
        mask=mask,
        advantages=torch.tensor([value for group in token_advantages(groups, config) for value in group]),
        old_logps={"sampler": sampler, "recomputed": old, "current": None, "log_linear": sampler}[config.old_logps],
        ref_logps=reference,
        sampler_logps=sampler,
        staleness=torch.tensor([completion.staleness for completion in everyone])[sequence_ids] if linear else None,
        high_entropy=_high_entropy(entropies, mask, config),
    )
    learners = tokens.denominator(logps.detach()) if linear else old
    importance = importance_sampling_weights(learners, sampler, sequence_ids, mask, config)[0]
    tokens = replace(tokens, importance_weights=importance)
    totals = Totals(completions=int(part.sum()), tokens=int(mask.sum()), max_completion_length=max_tokens)
    weights = token_weights(config.aggregation, sequence_ids, mask, totals)
    bonus = EntropyBonus(config.entropy).applied * update_mean(entropies, tokens.explored, int(tokens.explored.sum()))
    observed = torch.tensor(np.concatenate([_group(group, config).observed for group in groups]))
    echo = config.echo_coef * update_mean(-logps, observed, int(observed.sum()))
    return (weights * token_loss(logps, tokens, config).loss).sum() - bonus + echo


def _high_entropy(entropies: Tensor, mask: Tensor, config: LossConfig) -> Tensor | None:
    """All tokens of the step as one group."""
    if config.top_entropy_quantile == 1:
        return None
    return torch.tensor(high_entropy([entropies.detach().numpy()], [mask.numpy()], config.top_entropy_quantile)[0])


def _group(group: Group, config: LossConfig) -> TrainedGroup:
    name = "sampler" if config.old_logps in ("sampler", "log_linear") else "old"
    ref, old, teacher = (
        np.array([value for completion in group for value in getattr(completion, field)])
        for field in ("reference", name, "teacher")
    )
    made = make_group(
        np.array([completion.reward if counts(completion, config) else math.nan for completion in group]),
        np.array([len(completion.logps) for completion in group]),
        loss_mask=np.array([trained for completion in group for trained in completion.mask]),
        kl_penalty=kl_penalty(ref, old, config) if config.penalises_rewards else None,
        reverse_kl=reverse_kl(old, teacher) if config.distillation else None,
        gradient_norms=np.array([norm for completion in group for norm in completion.norms]),
        steps=_steps(group) if config.advantage == "process" else None,
        parts=_parts(group) if config.advantage == "gdpo" else None,
    )
    return replace(made, sequence_mask=np.array([trains(completion, config) for completion in group]))


def _parts(group: Group) -> RewardParts:
    values = np.array([[reward for _, reward in completion.parts] for completion in group]).T
    return RewardParts(values, np.array([weight for weight, _ in group[0].parts]))


def _steps(group: Group) -> StepRewards:
    return StepRewards(
        rewards=np.array([reward for completion in group for reward, _ in completion.steps], np.float32),
        ends=np.array([end for completion in group for _, end in completion.steps], np.int64),
        counts=np.array([len(completion.steps) for completion in group], np.int64),
    )
