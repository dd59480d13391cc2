"""Packed attention by PyTorch's variable-length kernel: one call for all spans, on a GPU."""

import numpy as np
import torch
from torch import Tensor

from shared.logprobs.attention import AttentionKind
from shared.logprobs.layout import PackedLayout

# What `torch.nn.attention.varlen.varlen_attn` calls. That adds an autograd function in Python, which takes a sixth of
# the time of a small step, and in PyTorch 2.11 it needs a copy of the keys for each query head.
_flash_attention = torch.ops.aten._flash_attention_forward


def has_kernel(dtype: torch.dtype, device: torch.device) -> bool:
    """True for half precision on CUDA. The self-test shows which GPUs and head sizes it supports."""
    return device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)


class VarlenAttention:
    """A `SpanAttention` for float16 and bfloat16 on CUDA, with sliding windows."""

    def __init__(self, layout: PackedLayout, *, dtype: torch.dtype, device: torch.device, kind: AttentionKind) -> None:
        if not has_kernel(dtype, device):
            raise NotImplementedError(f"varlen attention is for half precision on CUDA, not {dtype} on {device.type}")
        bounds = kind.bounds
        if kind.sinks or kind.softcap is not None or (bounds and (bounds.images or not bounds.slides)):
            raise NotImplementedError("varlen attention has no sinks, caps, chunks and images")
        # A span's last key is its last token's, so a window counted from there is one of places in the row.
        self._before = None if bounds is None else bounds.size - 1
        # The keys of a span are its prompt's tokens, then its own.
        spans = layout.spans
        keys = [part.indexes() for span in spans for part in ((span.prompt, span) if span.prompt else (span,))]
        lengths = [span.length for span in spans]
        key_lengths = [span.length + (span.prompt.length if span.prompt else 0) for span in spans]
        self._keys = torch.tensor(np.concatenate(keys), device=device)
        self._ends = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=device)
        self._key_ends = torch.tensor(np.cumsum([0, *key_lengths]), dtype=torch.int32, device=device)
        self._longest, self._longest_key = max(lengths), max(key_lengths)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        dropout: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if dropout:
            raise NotImplementedError("varlen attention has no dropout")
        output, *_ = _flash_attention(
            query.contiguous(),
            key.index_select(0, self._keys),
            value.index_select(0, self._keys),
            self._ends,
            self._key_ends,
            self._longest,
            self._longest_key,
            0.0,  # dropout
            True,  # causal, aligned at the last key: a completion attends to its whole prompt
            False,  # no mask to look at
            scale=scale,
            window_size_left=self._before,
        )
        return output
