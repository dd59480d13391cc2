"""Sums over completions: in float64 where the device has it, since the order of summation then makes no difference in
float32."""

import torch
from torch import Tensor

from shared.devices import widest_float


def sequence_sums(values: Tensor, sequence_ids: Tensor) -> Tensor:
    """(C,) -> (C,) of `widest_float`: element i is the sum over completion i, and 0 past the last.

    There are at most C completions; reading their number would wait for the device.
    """
    zeros = torch.zeros(len(sequence_ids), dtype=widest_float(sequence_ids.device), device=sequence_ids.device)
    return zeros.index_add(0, sequence_ids, values.to(zeros.dtype))


def masked(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0)
