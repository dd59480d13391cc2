"""What one forward and backward takes in: whole groups of a step, ready for the loss, cut by a budget of tokens."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from policy_trainer.learner.step_groups import Prepared
from policy_trainer.objective.aggregation import Totals
from policy_trainer.objective.loss import LossTokens
from shared.batch import Array, TokenGroup


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Whole groups, joined. G counts their completions, C the tokens of these; tensors are on the learner's device.

    trains: bool (G,). tokens: (C,) each; old_logps, ref_logps and sampler_logps, float32 (C,), are None where a group
    has none.
    """

    groups: list[TokenGroup]
    temperatures: list[float]
    trains: Tensor
    tokens: LossTokens
    sampler_logps: Tensor | None


def totals(groups: Sequence[Prepared], max_completion_length: int) -> Totals:
    """Of the update that these groups make."""
    return Totals(
        completions=sum(int(group.trains.sum()) for group in groups),
        tokens=sum(int(group.mask.sum()) for group in groups),
        max_completion_length=max_completion_length,
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


def shares(count: int, parts: int) -> list[slice]:
    """Consecutive parts of almost equal size; none of them is empty, so that there may be fewer."""
    ends = [count * part // parts for part in range(parts + 1)]
    return [slice(start, end) for start, end in pairwise(ends) if end > start]


def _joined(groups: Sequence[Prepared], device: torch.device) -> MicroBatch:
    def joined(parts: Iterable[Array]) -> Tensor:
        return torch.from_numpy(np.concatenate(list(parts))).to(device)

    def known(of: Callable[[Prepared], Array | None]) -> Tensor | None:
        parts = [part for group in groups if (part := of(group)) is not None]
        return joined(parts) if len(parts) == len(groups) else None

    lengths = np.concatenate([group.group.completion_lengths for group in groups])
    return MicroBatch(
        groups=[group.group for group in groups],
        temperatures=[group.temperature for group in groups],
        trains=joined(group.trains for group in groups),
        tokens=LossTokens(
            rows=joined([np.repeat(np.arange(len(lengths)), lengths)]),
            mask=joined(group.mask for group in groups),
            advantages=joined(group.advantages for group in groups),
            old_logps=known(lambda group: group.old_logps),
            ref_logps=known(lambda group: group.ref_logps),
        ),
        sampler_logps=known(lambda group: group.sampler_logps),
    )
