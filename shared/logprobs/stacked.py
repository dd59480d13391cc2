"""Packed attention by PyTorch's SDPA, on any device: blocks of queries of similar shape are stacked into one call.

One call per completion would be correct too, but call overhead would dominate for small models.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shared.logprobs.layout import Indexes, PackedLayout, Span

# The overhead of a call, expressed in attention scores (query times key): the padding that stacking may waste.
_CALL_SCORES = 4096
# Most scores of one call, unless a single block has more. Keeps masks and stacked keys small.
_STACK_SCORES = 2**21
# Most queries of one block. Smaller blocks have smaller masks and leave out more of the later keys.
_BLOCK_QUERIES = 512


@dataclass(frozen=True, eq=False)
class _Block:
    """The tokens `queries` attend to the tokens `keys`, subject to the mask."""

    queries: Indexes
    keys: Indexes
    causal: bool
    """Queries and keys are the same tokens of one span, so is_causal replaces the mask."""

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.queries), len(self.keys)


class StackedAttention:
    """A `SpanAttention` for any dtype and device."""

    def __init__(self, layout: PackedLayout, *, dtype: torch.dtype, device: torch.device) -> None:
        stacks = list(_stacked(_blocks(layout.spans)))
        owners = _owners(layout, device)
        self._stacks = [_Stack(stack, owners, dtype, device) for stack in stacks]
        # The index of each token in the concatenated outputs of all stacks.
        order = np.argsort(np.concatenate([block.queries for stack in stacks for block in stack]))
        outputs, start = [], 0
        for stack in self._stacks:
            outputs += [start + row * stack.width + np.arange(n) for row, n in enumerate(stack.lengths)]
            start += len(stack.lengths) * stack.width
        self._order = torch.tensor(np.concatenate(outputs)[order], device=device)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, dropout: float) -> Tensor:
        parts = [stack(query, key, value, scale, dropout) for stack in self._stacks]
        return torch.cat(parts).index_select(0, self._order)


class _Stack:
    """Blocks padded to one shape. Padding queries repeat a real one and are not read; padding keys are masked."""

    def __init__(
        self, blocks: Sequence[_Block], owners: tuple[Tensor, Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.lengths = [len(block.queries) for block in blocks]
        self.width = max(self.lengths)
        longest = max(len(block.keys) for block in blocks)
        queries = np.empty((len(blocks), self.width), np.int64)
        keys = np.full((len(blocks), longest), -1)
        for row, block in enumerate(blocks):
            queries[row] = block.queries[-1]
            queries[row, : len(block.queries)] = block.queries
            keys[row, : len(block.keys)] = block.keys
        self._rows = len(blocks)
        self._causal = blocks[0].causal
        self._queries, self._keys = torch.tensor(queries, device=device), torch.tensor(keys, device=device)
        self._mask = None if self._causal else _mask(self._queries, self._keys, owners, dtype)
        self._keys.clamp_(min=0)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, dropout: float) -> Tensor:
        """(N, H, D) -> (rows * width, H, E)."""
        output = F.scaled_dot_product_attention(
            self._gather(query, self._queries),
            self._gather(key, self._keys),
            self._gather(value, self._keys),
            attn_mask=self._mask,
            is_causal=self._causal,
            dropout_p=dropout,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output.transpose(1, 2).flatten(0, 1)

    def _gather(self, states: Tensor, indexes: Tensor) -> Tensor:
        """(N, H, D) -> (rows, H, width, D)."""
        return states.index_select(0, indexes.view(-1)).view(self._rows, -1, *states.shape[1:]).transpose(1, 2)


def _owners(layout: PackedLayout, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each token: the number of its span, and that of the span's prompt."""
    spans, lengths = layout.spans, [span.length for span in layout.spans]
    numbers = np.arange(len(spans))
    prompts = np.maximum.accumulate(np.where([span.prompt is None for span in spans], numbers, 0))
    return (
        torch.tensor(np.repeat(numbers, lengths), device=device),
        torch.tensor(np.repeat(prompts, lengths), device=device),
    )


def _mask(queries: Tensor, keys: Tensor, owners: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """(R, Q) and (R, K) token indexes, -1 for padding -> (R, 1, Q, K) mask: 0 where visible, else -inf.

    A token may attend to its prompt, and to its own span up to itself. owners: of `_owners`.
    """
    spans, prompts = owners
    query, key = queries[:, :, None], keys[:, None, :]
    span = spans[key.clamp(min=0)]
    visible = (key >= 0) & (key <= query) & ((span == spans[query]) | (span == prompts[query]))
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, -torch.inf)[:, None]


def _blocks(spans: Iterable[Span]) -> Iterator[_Block]:
    for prompt, completions in groupby(spans, key=lambda span: span.prompt):
        if prompt is None:
            yield from (_Block(span.indexes(), span.indexes(), causal=True) for span in completions)
            continue
        for first, last in _merged(list(completions), prompt.length // 4):
            for start in range(first, last, _BLOCK_QUERIES):
                queries = np.arange(start, min(start + _BLOCK_QUERIES, last))
                keys = np.concatenate([prompt.indexes(), np.arange(first, queries[-1] + 1)])
                yield _Block(queries, keys, causal=False)


def _merged(completions: Sequence[Span], limit: int) -> Iterator[tuple[int, int]]:
    """Token ranges [first, last): consecutive completions share a block while they have at most `limit` tokens.

    Otherwise each of many short completions would copy the keys of a long prompt.
    """
    first = completions[0].start
    for span, following in zip(completions, [*completions[1:], None], strict=True):
        if following is None or following.end - first > limit:
            yield first, span.end
            first = span.end


def _stacked(blocks: Iterable[_Block]) -> Iterator[list[_Block]]:
    """Stacks of similar blocks, largest first. A block joins a stack if its padding costs less than its own call."""
    stack: list[_Block] = []
    width = longest = 0
    for block in sorted(blocks, key=lambda block: (block.causal, *block.shape), reverse=True):
        queries, keys = block.shape
        grown = max(longest, keys)
        wasted = width * grown * (len(stack) + 1) - width * longest * len(stack) - queries * keys
        together = width * grown * (len(stack) + 1)
        if stack and block.causal == stack[0].causal and wasted <= _CALL_SCORES and together <= _STACK_SCORES:
            longest = grown
        else:
            if stack:
                yield stack
            stack, width, longest = [], queries, keys
        stack.append(block)
    yield stack
