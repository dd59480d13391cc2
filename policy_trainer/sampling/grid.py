"""Rows of several groups, laid out so that each group is one matrix."""

import torch
from torch import Tensor


class Grid:
    """n groups by P places, as many as the largest group has rows. What stands in the other places nobody reads.

    Each row has K heads, and each head is a matrix (r, D); a group's matrix has those of all its rows, head by head.
    """

    def __init__(self, groups: Tensor, heads: int) -> None:
        """groups: (B,) the group of each row, from 0 to n - 1, none without a row."""
        counts = groups.bincount()
        places = int(counts.max())
        order = groups.argsort(stable=True)
        sorted_groups = groups[order]
        place = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[sorted_groups]
        head = torch.arange(heads, device=order.device)
        cells = (sorted_groups[:, None] * heads + head) * places + place[:, None]
        matrices = order[:, None] * heads + head
        self._matrices = len(counts) * heads
        self._spread = order.new_zeros(self._matrices * places)
        self._spread[cells] = matrices
        self._collect = order.new_empty(len(order) * heads)
        self._collect[matrices] = cells

    def spread(self, x: Tensor) -> Tensor:
        """(B K, r, D) -> (n K, P r, D)."""
        return x.index_select(0, self._spread).view(self._matrices, -1, x.shape[2])

    def collect(self, x: Tensor) -> Tensor:
        """(n K, P r, D) -> (B K, r, D)."""
        return x.view(len(self._spread), -1, x.shape[2]).index_select(0, self._collect)
