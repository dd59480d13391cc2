"""Packed attention by PyTorch's SDPA, on any device: blocks of queries of similar shape are stacked into one call.

One call per completion would be correct too, but call overhead would dominate for small models.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shared.logprobs.attention import AttentionKind, Bounds
from shared.logprobs.layout import Indexes, PackedLayout, Span

# The overhead of a call, expressed in attention scores (query times key): the padding that stacking may waste.
_CALL_SCORES = 4096
# Most scores of one call, unless a single block has more. Keeps masks and stacked keys small.
_STACK_SCORES = 2**21
# Most queries of one block. Smaller blocks have smaller masks and leave out more of the later keys.
_BLOCK_QUERIES = 512
# Queries of one block at least, where a window cuts blocks.
_LEAST_QUERIES = 64
# Channels that carry sinks. One would do; a head's size stays a multiple of 8, which some kernels need.
_SINK_CHANNELS = 8


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
    """A `SpanAttention` for any dtype, device and kind."""

    def __init__(self, layout: PackedLayout, *, dtype: torch.dtype, device: torch.device, kind: AttentionKind) -> None:
        if kind.sinks and kind.softcap is not None:
            raise NotImplementedError("packed attention has not both sinks and a cap on scores")
        stacks = list(_stacked(_blocks(layout, kind)))
        tokens = _Tokens(layout, device)
        self._stacks = [_Stack(stack, tokens, dtype, device, kind) for stack in stacks]
        # The index of each token in the concatenated outputs of all stacks.
        order = np.argsort(np.concatenate([block.queries for stack in stacks for block in stack]))
        outputs, start = [], 0
        for stack in self._stacks:
            outputs += [start + row * stack.width + np.arange(n) for row, n in enumerate(stack.lengths)]
            start += len(stack.lengths) * stack.width
        self._order = torch.tensor(np.concatenate(outputs)[order], device=device)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        dropout: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if sinks is not None:
            factor = query.shape[2] ** -0.5 if scale is None else scale
            query, key, value = _with_sinks(query, key, value, sinks / factor)
            scale = factor
        parts = [stack(query, key, value, scale, dropout) for stack in self._stacks]
        return torch.cat(parts).index_select(0, self._order)


def _with_sinks(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Adds token N, the sink: its product with a query is that head's sink, and its value is 0. sinks: (H,).

    As one more key it needs nothing of SDPA's kernels. All of the product comes from a channel that other keys leave 0.
    """
    sink = sinks.to(query.dtype)[None, :, None].expand(len(query), -1, 1)
    query = torch.cat([query, sink, query.new_zeros(*query.shape[:2], _SINK_CHANNELS - 1)], dim=2)
    key = F.pad(key, (0, _SINK_CHANNELS, 0, 0, 0, 1))
    of_sink = torch.zeros_like(key)
    of_sink[-1, :, -_SINK_CHANNELS] = 1
    return query, key + of_sink, F.pad(value, (0, 0, 0, 0, 0, 1))


class _Stack:
    """Blocks padded to one shape. Padding queries repeat a real one and are not read; padding keys are masked."""

    def __init__(
        self,
        blocks: Sequence[_Block],
        tokens: "_Tokens",
        dtype: torch.dtype,
        device: torch.device,
        kind: AttentionKind,
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
        self._softcap = kind.softcap
        self._queries, self._keys = torch.tensor(queries, device=device), torch.tensor(keys, device=device)
        self._mask = None if self._causal else _mask(self._queries, self._keys, tokens, dtype, kind.bounds)
        self._keys.clamp_(min=0)
        if kind.sinks:
            self._keys = F.pad(self._keys, (0, 1), value=tokens.count)
            self._mask = F.pad(self._mask, (0, 1))  # type: ignore[arg-type]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, dropout: float) -> Tensor:
        """(N, H, D) -> (rows * width, H, E)."""
        query, key, value = (
            self._gather(query, self._queries),
            self._gather(key, self._keys),
            self._gather(value, self._keys),
        )
        if self._softcap is not None:
            assert self._mask is not None  # `_blocks` makes no other blocks then
            output = _capped_attention(query, key, value, self._mask, scale, self._softcap, dropout)
        else:
            output = F.scaled_dot_product_attention(
                query,
                key,
                value,
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


def _capped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float | None,
    softcap: float,
    dropout: float,
) -> Tensor:
    """SDPA with a cap on scores, which it does not know. (R, H, Q, D), (R, K, T, D), (R, K, T, E) -> (R, H, Q, E)."""
    rows, heads, width, channels = query.shape
    keys = key.shape[1]
    grouped = query.reshape(rows, keys, -1, channels) * (scale or channels**-0.5)
    scores = softcap * torch.tanh(grouped @ key.transpose(2, 3) / softcap)
    scores = scores.view(rows, heads, width, -1) + mask
    weights = F.dropout(
        scores.softmax(dim=3, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype), dropout
    )
    return (weights.view(rows, keys, -1, scores.shape[3]) @ value).view(rows, heads, width, -1)


class _Tokens:
    """What a mask depends on, for each token of a layout: int64 (N,), on the device once a mask asks for it."""

    def __init__(self, layout: PackedLayout, device: torch.device) -> None:
        self.count = layout.tokens
        self._layout, self._device = layout, device
        self._lengths = [span.length for span in layout.spans]

    @cached_property
    def spans(self) -> Tensor:
        """The number of the token's span."""
        return self._tensor(np.repeat(np.arange(len(self._lengths)), self._lengths))

    @cached_property
    def prompts(self) -> Tensor:
        """The number of its prompt's span."""
        begins = [number if span.prompt is None else 0 for number, span in enumerate(self._layout.spans)]
        return self._tensor(np.repeat(np.maximum.accumulate(begins), self._lengths))

    @cached_property
    def places(self) -> Tensor:
        """Its place in its row."""
        return self._tensor(self._layout.places)

    @cached_property
    def images(self) -> Tensor:
        """The number of its image, or -1."""
        assert self._layout.images is not None
        return self._tensor(self._layout.images)

    def _tensor(self, values: Indexes) -> Tensor:
        return torch.tensor(values, device=self._device)


def _mask(queries: Tensor, keys: Tensor, tokens: _Tokens, dtype: torch.dtype, bounds: Bounds | None) -> Tensor:
    """(R, Q) and (R, K) token indexes, -1 for padding -> (R, 1, Q, K) mask: 0 where visible, else -inf.

    A token may attend to its prompt, and to its own span up to itself, within the bounds.
    """
    query, key = queries[:, :, None], keys[:, None, :]
    existing = key.clamp(min=0)
    span = tokens.spans[existing]
    before = key <= query
    if bounds is not None and bounds.images:
        before |= (tokens.images[existing] == tokens.images[query]) & (tokens.images[query] >= 0)
    visible = (key >= 0) & before & ((span == tokens.spans[query]) | (span == tokens.prompts[query]))
    if bounds is not None:
        visible &= bounds.visible(tokens.places[query], tokens.places[existing])
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, -torch.inf)[:, None]


def _blocks(layout: PackedLayout, kind: AttentionKind) -> Iterator[_Block]:
    places = layout.places
    # A token reaches this many tokens back, itself among them.
    reach = min(kind.bounds.size, layout.tokens) if kind.bounds else layout.tokens
    most = max(_LEAST_QUERIES, min(_BLOCK_QUERIES, reach))
    ahead = kind.bounds is not None and kind.bounds.images
    plain = not kind.sinks and kind.softcap is None and not ahead
    for prompt, spans in groupby(layout.spans, key=lambda span: span.prompt):
        if prompt is None:
            for span in spans:
                if plain and span.length <= reach:
                    yield _Block(span.indexes(), span.indexes(), causal=True)
                    continue
                for start in range(span.start, span.end, most):
                    end = min(start + most, span.end)
                    first, last = max(span.start, start - reach + 1), span.end if ahead else end
                    yield _Block(np.arange(start, end), np.arange(first, last), causal=False)
            continue
        for first, last in _merged(list(spans), min(prompt.length, reach) // 4):
            for start in range(first, last, most):
                queries = np.arange(start, min(start + most, last))
                prompt_first = prompt.start + max(0, places[queries].min() - reach + 1)
                offset = places[start] - prompt.length  # in its completion
                first_key = first if kind.bounds is None else start - min(offset, reach - 1)
                keys = np.concatenate([np.arange(prompt_first, prompt.end), np.arange(first_key, queries[-1] + 1)])
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
