"""Packed attention by PyTorch's variable-length kernel: one call for all spans, on a GPU."""

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from shared.logprobs.layout import PackedLayout


def has_kernel(dtype: torch.dtype, device: torch.device) -> bool:
    """True for half precision on CUDA. The self-test finds out which GPUs and head sizes the kernel supports."""
    return device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)


class VarlenAttention:
    """A `SpanAttention` for float16 and bfloat16 on CUDA."""

    def __init__(self, layout: PackedLayout, *, dtype: torch.dtype, device: torch.device) -> None:
        if not has_kernel(dtype, device):
            raise NotImplementedError(f"varlen attention is for half precision on CUDA, not {dtype} on {device.type}")
        # The keys of a span are its prompt's tokens, then its own.
        self.longest_row = layout.longest_row
        spans = layout.spans
        keys = [part.indexes() for span in spans for part in ((span.prompt, span) if span.prompt else (span,))]
        lengths = [span.length for span in spans]
        key_lengths = [span.length + (span.prompt.length if span.prompt else 0) for span in spans]
        self._keys = torch.tensor(np.concatenate(keys), device=device)
        self._ends = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=device)
        self._key_ends = torch.tensor(np.cumsum([0, *key_lengths]), dtype=torch.int32, device=device)
        self._longest, self._longest_key = max(lengths), max(key_lengths)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, dropout: float) -> Tensor:
        if dropout:
            raise NotImplementedError("varlen attention has no dropout")
        return varlen_attn(  # type: ignore[return-value]
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
