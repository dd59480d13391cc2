"""What one forward and backward takes in: whole groups of a step, ready for the loss, cut by a budget of tokens."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from policy_trainer.advantages import group_advantages, has_variance
from policy_trainer.config import LossConfig
from shared.batch import Array, ScoredBatch, TokenGroup


@dataclass(frozen=True, eq=False)
class Prepared:
    """One group as arrays. trains: bool (G,), completions that take part. mask: bool (C,), tokens that do. advantages:
    float32 (G,). old_logps, ref_logps: float32 (C,)."""

    group: TokenGroup
    temperature: float
    trains: Array
    mask: Array
    advantages: Array
    old_logps: Array
    ref_logps: Array


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Whole groups, joined. G counts their completions, C the tokens of these; tensors are on the learner's device.

    lengths: int64 (G,). trains: bool (G,). mask: bool (C,). old_logps, ref_logps, advantages: float32 (C,).
    """

    groups: list[TokenGroup]
    temperatures: list[float]
    lengths: Tensor
    trains: Tensor
    mask: Tensor
    old_logps: Tensor
    ref_logps: Tensor
    advantages: Tensor


def prepare(batches: Sequence[ScoredBatch], loss: LossConfig) -> list[Prepared]:
    """The groups that have something to teach, with their advantages.

    Computed for all groups at once, on the CPU: tensors as tiny as one group's cost more to launch than to compute.
    Raises ValueError for a batch without sampler_logps.
    """
    rewards = _padded([batch.rollout.rewards for batch in batches])
    judged = ~rewards.isnan()
    teaches = has_variance(rewards) if loss.drop_zero_variance else judged.any(dim=1)
    advantages = group_advantages(rewards, eps=loss.advantage_eps)
    rows = zip(batches, judged.numpy(), advantages.numpy(), teaches.tolist(), strict=True)
    return [_prepared(batch, trains, advantages) for batch, trains, advantages, teaches in rows if teaches]


def _prepared(batch: ScoredBatch, trains: Array, advantages: Array) -> Prepared:
    rollout = batch.rollout
    if rollout.sampler_logps is None:
        raise ValueError("a batch without sampler_logps cannot be trained on: the ratio is taken against them")
    size = rollout.group.size
    mask = np.repeat(trains[:size], rollout.group.completion_lengths)
    return Prepared(
        group=rollout.group,
        temperature=rollout.temperature,
        trains=trains[:size],
        mask=mask if rollout.loss_mask is None else mask & rollout.loss_mask,
        advantages=advantages[:size],
        old_logps=rollout.sampler_logps,
        ref_logps=batch.ref_logps,
    )


def micro_batches(groups: Sequence[Prepared], limit: int, device: torch.device) -> Iterator[MicroBatch]:
    """Cut so that each has at most `limit` tokens, unless one group alone has more."""
    for part in cut([group.group.tokens for group in groups], limit):
        yield _joined(groups[part], device)


def cut(sizes: Sequence[int], limit: int) -> Iterator[slice]:
    """Consecutive parts whose sizes sum to at most `limit`, unless one alone is more."""
    start, total = 0, 0
    for end, size in enumerate(sizes):
        if end > start and total + size > limit:
            yield slice(start, end)
            start, total = end, 0
        total += size
    if sizes:
        yield slice(start, len(sizes))


def _joined(groups: Sequence[Prepared], device: torch.device) -> MicroBatch:
    def joined(parts: Iterable[Array]) -> Tensor:
        return torch.from_numpy(np.concatenate(list(parts))).to(device)

    return MicroBatch(
        groups=[group.group for group in groups],
        temperatures=[group.temperature for group in groups],
        lengths=joined(group.group.completion_lengths for group in groups),
        trains=joined(group.trains for group in groups),
        mask=joined(group.mask for group in groups),
        old_logps=joined(group.old_logps for group in groups),
        ref_logps=joined(group.ref_logps for group in groups),
        advantages=joined(np.repeat(group.advantages, group.group.completion_lengths) for group in groups),
    )


def _padded(rewards: Sequence[Array]) -> Tensor:
    """Rewards of B groups as float32 (B, G), G the largest: NaN, which takes no part, fills up the others."""
    padded = np.full((len(rewards), max(map(len, rewards), default=1)), np.nan, np.float32)
    for row, own in zip(padded, rewards, strict=True):
        row[: len(own)] = own
    return torch.from_numpy(padded)
