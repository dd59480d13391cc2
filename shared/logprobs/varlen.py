"""Packed attention by PyTorch's variable-length kernel: one call for all spans, on a GPU."""

import inspect
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared.logprobs.layout import PackedLayout

varlen_attn: Any
try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # PyTorch before 2.10
    varlen_attn = None


def has_kernel(dtype: torch.dtype, device: torch.device) -> bool:
    """True for half precision on CUDA, from PyTorch 2.11. The self-test shows which GPUs and head sizes it supports."""
    return device.type == "cuda" and dtype in (torch.float16, torch.bfloat16) and _kernel_takes("window_size")


class VarlenAttention:
    """A `SpanAttention` for float16 and bfloat16 on CUDA."""

    def __init__(self, layout: PackedLayout, *, dtype: torch.dtype, device: torch.device) -> None:
        if not has_kernel(dtype, device):
            raise NotImplementedError(
                f"varlen attention is for half precision on CUDA from PyTorch 2.11, "
                f"not {dtype} on {device.type} with {torch.__version__}"
            )
        # The keys of a span are its prompt's tokens, then its own.
        spans = layout.spans
        keys = [part.indexes() for span in spans for part in ((span.prompt, span) if span.prompt else (span,))]
        lengths = [span.length for span in spans]
        key_lengths = [span.length + (span.prompt.length if span.prompt else 0) for span in spans]
        self._keys = torch.tensor(np.concatenate(keys), device=device)
        self._ends = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=device)
        self._key_ends = torch.tensor(np.cumsum([0, *key_lengths]), dtype=torch.int32, device=device)
        self._longest, self._longest_key = max(lengths), max(key_lengths)
        self._attend = varlen_attn if _kernel_takes("enable_gqa") else _attend_with_equal_heads

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, dropout: float) -> Tensor:
        if dropout:
            raise NotImplementedError("varlen attention has no dropout")
        return self._attend(
            query.contiguous(),
            key.index_select(0, self._keys),
            value.index_select(0, self._keys),
            self._ends,
            self._key_ends,
            self._longest,
            self._longest_key,
            scale=scale,
            window_size=(-1, 0),  # causal, aligned at the last key: a completion attends to its whole prompt
            enable_gqa=query.shape[1] != key.shape[1],
        )


def _kernel_takes(option: str) -> bool:
    """True if this PyTorch has the kernel, with this option: `window_size` since 2.11, `enable_gqa` since 2.12."""
    return varlen_attn is not None and option in inspect.signature(varlen_attn).parameters


def _attend_with_equal_heads(
    query: Tensor, key: Tensor, value: Tensor, *lengths: Any, enable_gqa: bool, **options: Any
) -> Tensor:
    """`varlen_attn` of PyTorch 2.11, which has no `enable_gqa`: each query head gets a copy of its keys and values."""
    if enable_gqa:
        key, value = (states.repeat_interleave(query.shape[1] // states.shape[1], 1) for states in (key, value))
    return varlen_attn(query, key, value, *lengths, **options)
