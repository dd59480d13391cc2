"""Linear layers whose weights are laid out once for the products that decoding makes.

A product of a few rows on a CPU otherwise lays out the whole weight again each time, which takes as long as the
arithmetic. PyTorch's inductor does the same to frozen models (weight prepacking), with these operators of oneDNN.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.devices import multiplies_bfloat16

# Bytes of all layers together at most: they are a second copy. The other layers stay as they are.
PREPACKED_BYTES = 2**31
# Numbers of a weight from which it pays: calling the operator takes 12 microseconds.
_LEAST = 100_000

# (…, K) inputs -> (…, N) outputs of a linear layer.
_Product = Callable[[Tensor], Tensor]


@contextmanager
def prepacked(model: nn.Module) -> Iterator[None]:
    """Within the block the model computes with its present weights, without gradients. Nothing changes on a GPU."""
    layers: list[nn.Linear] = []
    left = PREPACKED_BYTES
    try:
        for layer in model.modules():
            if not _can_be_packed(layer) or layer.weight.nbytes > left:
                continue
            product = _pack(layer)
            if _agrees(layer, product):
                layer.forward = product  # type: ignore[method-assign]
                layers.append(layer)
                left -= layer.weight.nbytes
        yield
    finally:
        for layer in layers:
            del layer.forward


def _can_be_packed(layer: nn.Module) -> TypeGuard[nn.Linear]:
    # A subclass may quantise or divide the weight, and a forward of the instance's own may do anything.
    if type(layer) is not nn.Linear or "forward" in vars(layer) or not torch.backends.mkldnn.is_available():
        return False
    weight = layer.weight
    fast = weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and multiplies_bfloat16(weight.device))
    return fast and weight.device.type == "cpu" and weight.numel() >= _LEAST


def _pack(layer: nn.Linear) -> _Product:
    return partial(_product, torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach()), layer)


def _product(packed: Tensor, layer: nn.Linear, inputs: Tensor) -> Tensor:
    if inputs.dtype != layer.weight.dtype:
        return F.linear(inputs, layer.weight, layer.bias)
    return torch.ops.mkldnn._linear_pointwise(inputs, packed, layer.bias, "none", [], "")


@torch.no_grad()
def _agrees(layer: nn.Linear, product: _Product) -> bool:
    """Whether the operator computes what PyTorch does: kernels of a processor's newest instructions have been wrong.

    The inputs are rows of the weight itself: numbers of its size.
    """
    inputs = layer.weight.detach()[:2]
    expected = F.linear(inputs, layer.weight, layer.bias)
    bound = torch.finfo(expected.dtype).eps ** 0.5 * float(expected.abs().max())
    return bool((product(inputs) - expected).abs().max() <= bound)
