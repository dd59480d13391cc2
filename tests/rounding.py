"""The error that rounding may cause: the bound of tests that cannot run in float64."""

import torch
from torch import Tensor


def rounding(largest: float | Tensor, *, layers: int = 2, dtype: torch.dtype = torch.float32) -> float:
    """The error that rounding in `dtype` may leave in numbers of up to `largest` that passed a model of these layers.

    largest: the largest log-prob, which is about the size of the logits, or the norm of the gradient.

    A layer rounds about 16 times in a row: norms, projections, rotations, scores, softmax, residual sums. A dot product
    of n terms, whatever the order of its sum, errs by about sqrt(n) / 2 units of the last place, 4 for the n = 64 of
    tiny models. That makes 64 eps a layer, and the head counts as one more. Processors, libraries and thread counts
    differ only in the order of sums and in the last bits of exponentials. Measured errors are a sixth of this or less;
    a wrong computation is off by whole nats.
    """
    if isinstance(largest, Tensor):
        largest = largest.detach()
    return 64 * torch.finfo(dtype).eps * (layers + 1) * float(largest)
