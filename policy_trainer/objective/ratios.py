"""Ratios of the policy to the one that it is compared with: per token, or one for all tokens of a completion.

Sums over completions are taken in float64, so that the order in which a device adds them up is not seen in float32.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# exp of more overflows float32 where it is multiplied; a ratio of e^30 is far outside of every clip.
MAX_EXPONENT = 30.0


def log_ratio(level: str, difference: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
    """(C,) differences of log-probs -> (C,) logarithms of the ratio, at most MAX_EXPONENT; 0 where masked, whatever
    stood there: masking after the exponential would leave NaN gradients behind.

    level: a name of RATIOS. rows: int64 (C,), the completion of each token. mask: bool (C,).
    """
    return masked(RATIOS[level](masked(difference, mask), rows, mask), mask).clamp(max=MAX_EXPONENT)


def _token(difference: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
    return difference


def _sequence(difference: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
    """GSPO (arXiv 2507.18071, eq. 7): the geometric mean over a completion."""
    means = row_sums(difference, rows) / row_sums(mask, rows).clamp(min=1)
    return means[rows].to(difference.dtype)


def _sequence_sum(difference: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
    """The ratio of whole completions: the product over their tokens."""
    return row_sums(difference, rows)[rows].to(difference.dtype)


RATIOS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "token": _token,
    "sequence": _sequence,
    "sequence_sum": _sequence_sum,
}


def row_sums(values: Tensor, rows: Tensor) -> Tensor:
    """(C,) -> float64 (C,): at place i the sum over completion i. There are no more completions than tokens, and to ask
    a device how many would mean to wait for it."""
    return torch.zeros(len(rows), dtype=torch.float64, device=rows.device).index_add(0, rows, values.double())


def masked(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0)
