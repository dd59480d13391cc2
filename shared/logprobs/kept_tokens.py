"""Leaves the tokens of sampling masks in logits, and takes all others out."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shared.batch import TokenGroup
from shared.sampling_mask import SamplingMask

# The logit of a token that was left out: its probability is exactly 0. It is finite, so that 0 times it is 0; its
# square times the squared temperature is, too.
_LEFT_OUT = -1e15


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """ids: int64 (S,). rows: int64 (S,), the position of each. ends: int64 (C + 1,) on the host, where those of a
    position begin and end. masked: bool (C,), whether a position has left tokens out."""

    ids: Tensor
    rows: Tensor
    ends: np.ndarray
    masked: Tensor

    @classmethod
    def of(cls, mask: SamplingMask, device: torch.device) -> "KeptTokens":
        return cls(
            torch.tensor(mask.token_ids, dtype=torch.int64, device=device),
            torch.tensor(mask.positions, device=device),
            np.concatenate([[0], np.cumsum(mask.counts)]),
            torch.tensor(mask.counts > 0, device=device),
        )

    def apply_(self, logits: Tensor, position: int, token: int) -> Tensor:
        """Changes (T, W) logits in place. position, token: of the first row and the first column."""
        length, width = logits.shape
        begin, end = int(self.ends[position]), int(self.ends[position + length])
        if begin == end:
            return logits
        rows, columns = self.rows[begin:end] - position, self.ids[begin:end] - token
        # The tokens of other tiles go to a column of their own: picking out the others would wait for a GPU.
        columns = torch.where((columns >= 0) & (columns < width), columns, width)
        stays = (~self.masked[position : position + length, None]).repeat(1, width + 1)
        stays[rows, columns] = True
        return logits.masked_fill_(~stays[:, :width], _LEFT_OUT)


def kept_tokens(groups: Sequence[TokenGroup], device: torch.device) -> KeptTokens | None:
    """Of all completion tokens of the groups; None if no group has a mask."""
    lengths = [len(group.completion_ids) for group in groups]
    mask = SamplingMask.join([group.sampling_mask for group in groups], lengths)
    return None if mask is None else KeptTokens.of(mask, device)
