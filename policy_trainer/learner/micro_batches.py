"""Micro-batches: whole groups, joined into the tensors of one forward and backward, up to a budget of tokens.

One process computes all groups of a step; the ranks of a sharded policy compute a share each.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from policy_trainer.algorithms.objective.aggregation import Totals
from policy_trainer.algorithms.objective.group import Group, LossInputs
from shared.batch import Array, TokenGroup


def totals(groups: Sequence[Group], max_completion_length: int) -> Totals:
    """The totals of an update on these groups."""
    return Totals(
        completions=sum(int(group.sequence_mask.sum()) for group in groups),
        tokens=sum(int(group.mask.sum()) for group in groups),
        max_completion_length=max_completion_length,
        explored=sum(int(group.explored.sum()) for group in groups),
        observed=sum(int(group.observed.sum()) for group in groups),
    )


def cut(sizes: Sequence[int], limit: int) -> Iterator[slice]:
    """Consecutive parts whose sizes sum to at most `limit`; a larger size is a separate part."""
    start, total = 0, 0
    for end, size in enumerate(sizes):
        if end > start and total + size > limit:
            yield slice(start, end)
            start, total = end, 0
        total += size
    if sizes:
        yield slice(start, len(sizes))


def split_evenly(count: int, parts: int) -> list[slice]:
    """Consecutive parts of almost equal size. No part is empty, so there may be fewer than `parts`."""
    ends = [count * part // parts for part in range(parts + 1)]
    return [slice(start, end) for start, end in pairwise(ends) if end > start]


def join(groups: Sequence[Group], device: torch.device) -> LossInputs:
    """The tokens of whole groups as one micro-batch on `device`; C counts the completion tokens of all.

    old_logps, ref_logps, staleness and high_entropy are None if any group has none. sampler_logps are NaN in groups
    that have none.
    """

    def joined(parts: Iterable[Array]) -> Tensor:
        return torch.from_numpy(np.concatenate(list(parts))).to(device)

    def joined_if_known(parts: Iterable[Array | None]) -> Tensor | None:
        known = [part for part in parts if part is not None]
        return joined(known) if len(known) == len(groups) else None

    def sampler_logps(group: Group) -> Array:
        return np.full(len(group.mask), np.nan, np.float32) if group.sampler_logps is None else group.sampler_logps

    lengths = np.concatenate([group.lengths for group in groups])
    return LossInputs(
        sequence_ids=joined([np.repeat(np.arange(len(lengths)), lengths)]),
        mask=joined(group.mask for group in groups),
        advantages=joined(group.advantages for group in groups),
        old_logps=joined_if_known(group.old_logps for group in groups),
        ref_logps=joined_if_known(group.ref_logps for group in groups),
        sampler_logps=joined(map(sampler_logps, groups)),
        staleness=joined_if_known(
            None if group.staleness is None else np.repeat(group.staleness, group.lengths) for group in groups
        ),
        high_entropy=joined_if_known(group.high_entropy for group in groups),
    )


class Ranks:
    """Decides which groups of a step this process computes: here all of them. A sharded policy's ranks override it."""

    def parts(self, groups: Sequence[TokenGroup], limit: int) -> Iterator[tuple[Sequence[int], bool]]:
        """This rank's forwards, each at most `limit` tokens or one larger group: as many as every other rank's.

        Each is the places of its groups in the step, and whether it counts: a forward that does not count has no
        weight, and only keeps this rank in step with the others. Take the next after the backward of this one.
        """
        for part in cut([group.tokens for group in groups], limit):
            yield range(part.start, part.stop), True

    def gather(self, tensor: Shaped[Tensor, "*shape"]) -> list[Shaped[Tensor, "*shape"]]:
        """The CPU tensors that the ranks passed, in the order of the ranks."""
        return [tensor]
