"""The tokens among which a sampler drew, where top-k, top-p or min-p left some out.

The sampler draws from the model's probabilities, renormalised over them. vLLM has the same sampling masks, and so has
DeepSeek-V3.2 ("Keep Sampling Mask", 2512.02556).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class SamplingMask:
    """token_ids: int32 (S,), the kept tokens of each position, one position after another. counts: int64 (C,), sum S:
    how many each position has; 0 where no token was left out, as in text that was not sampled."""

    token_ids: NDArray[np.int32]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, kept: Sequence[NDArray[np.int32]]) -> "SamplingMask":
        """kept: the tokens of each position, none where no token was left out."""
        return cls(np.concatenate([np.zeros(0, np.int32), *kept]), np.array([len(ids) for ids in kept], np.int64))

    @classmethod
    def join(cls, masks: "Sequence[SamplingMask | None]", lengths: Sequence[int]) -> "SamplingMask | None":
        """The mask of all positions of some parts; None if no part has a mask. lengths: of the parts."""
        if all(mask is None for mask in masks):
            return None
        nothing = np.zeros(0, np.int32)
        return cls(
            np.concatenate([nothing if mask is None else mask.token_ids for mask in masks]),
            np.concatenate(
                [
                    np.zeros(length, np.int64) if mask is None else mask.counts
                    for mask, length in zip(masks, lengths, strict=True)
                ]
            ),
        )

    def split(self, ends: NDArray[np.int64]) -> "list[SamplingMask]":
        """The masks of consecutive positions. ends: of all parts but the last."""
        counts = np.split(self.counts, ends)
        ids = np.split(self.token_ids, np.cumsum([part.sum() for part in counts])[:-1])
        return [SamplingMask(*part) for part in zip(ids, counts, strict=True)]

    def keeps(self, ids: NDArray[np.int64]) -> bool:
        """Whether each of (C,) tokens is among those kept in its position."""
        hits = self.token_ids == np.repeat(ids.clip(-1, 2**31 - 1).astype(np.int32), self.counts)
        starts = (np.cumsum(self.counts) - self.counts)[self.counts > 0]
        return not len(starts) or bool(np.logical_or.reduceat(hits, starts).all())
