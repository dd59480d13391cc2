"""Leaves the tokens of sampling masks in logits, and takes all others out."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shared.batch import TokenGroup
from shared.sampling_mask import SamplingMask

# The logit of a token that was left out: its probability is exactly 0. It is finite, as is its square times the squared
# temperature, so that 0 times them is 0.
_LEFT_OUT = -1e15


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """ids: int32 (S,). counts: int64 (C,), how many each position has; 0 for all. ends: int64 (C + 1,) on the host,
    where those of a position begin and end."""

    ids: Tensor
    counts: Tensor
    ends: np.ndarray

    @classmethod
    def of(cls, mask: SamplingMask, device: torch.device) -> "KeptTokens":
        ids, counts = (torch.tensor(each, device=device) for each in (mask.token_ids, mask.counts))
        return cls(ids, counts, np.concatenate([[0], np.cumsum(mask.counts)]))

    def apply_(self, logits: Tensor, position: int, token: int) -> Tensor:
        """Changes (T, W) logits in place. position, token: of the first row and the first column."""
        length, width = logits.shape
        begin, end = int(self.ends[position]), int(self.ends[position + length])
        if begin == end:
            return logits
        counts = self.counts[position : position + length]
        # Without output_size it would wait for a GPU.
        rows = torch.repeat_interleave(counts, output_size=end - begin)
        columns = self.ids[begin:end].long() - token
        # The tokens of other tiles go to a column of their own: to pick out the others would wait for a GPU, too.
        columns = torch.where((columns >= 0) & (columns < width), columns, width)
        stays = (counts == 0)[:, None].repeat(1, width + 1)
        stays[rows, columns] = True
        return logits.masked_fill_(~stays[:, :width], _LEFT_OUT)


def kept_tokens(groups: Sequence[TokenGroup], device: torch.device) -> KeptTokens | None:
    """Of all completion tokens of the groups; None if no group has a mask."""
    lengths = [len(group.completion_ids) for group in groups]
    mask = SamplingMask.join([group.sampling_mask for group in groups], lengths)
    return None if mask is None else KeptTokens.of(mask, device)
