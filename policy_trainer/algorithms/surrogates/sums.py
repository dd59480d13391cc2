"""Sums over the tokens of each completion. They are computed in float64 where the device supports it: the order of
summation then makes no difference after rounding to float32."""

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from shared.devices import widest_float


def sequence_sums(values: Shaped[Tensor, " C"], sequence_ids: Int64[Tensor, " C"]) -> Float[Tensor, " C"]:
    """In the dtype of `widest_float`: element i is the sum over completion i; the rest are 0.

    There are at most C completions. Reading their exact number would synchronise with the device.
    """
    zeros = torch.zeros(len(sequence_ids), dtype=widest_float(sequence_ids.device), device=sequence_ids.device)
    return zeros.index_add(0, sequence_ids, values.to(zeros.dtype))


def masked(values: Float[Tensor, " C"], mask: Bool[Tensor, " C"]) -> Float[Tensor, " C"]:
    return torch.where(mask, values, 0.0)
