"""Decoders: compute the logits of one token per row and step, after prompts that were prefilled once per group.

Most use a custom attention function, over keys and values that grow in place. All rows end at the same column, so
only the columns before a row's first token are masked, and what a layer's bounds leave out.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel

from policy_trainer.rollout.sampling.kv_cache import (
    GrowableLayer,
    PrefilledPrompts,
    RowLayer,
    has_keys,
    make_row_layer,
    padding_bias,
    select_rows,
)
from shared.logprobs.attention import Bounds, attention_of, bounds_of, refuse_extras, set_attention

ATTENTION = "tandem_decoding"
# Without a mask function, whose call takes 1% of a small model's step.
_FULL_ATTENTION = "tandem_decoding_full"
# Shorter prompts are copied: reading so few tokens G times costs less than combining two parts of attention.
_COPIED_TOKENS = 64
# The decoder whose step is being computed.
_decoding: ContextVar["AttentionDecoder"] = ContextVar("decoding")


class Decoding(Enum):
    """How a model can be decoded, the fastest way first; the values name them in logs and errors.

    SHARED: rows may share a long prompt's keys and values. COPIED: each row has its own. REPEATED: the same in
    transformers' cache, which serves layers that use neither its attention interface nor its states. Then rows cannot
    join others.
    """

    SHARED = "shared prompts"
    COPIED = "copied prompts"
    REPEATED = "transformers' cache"

    @property
    def joins(self) -> bool:
        return self is not Decoding.REPEATED


def make_decoder(model: PreTrainedModel, prompts: PrefilledPrompts, groups: Tensor, decoding: Decoding) -> "Decoder":
    """The fastest decoder for B rows. groups: int64 (B,) in ascending order, the prompt that each row continues.

    decoding: what the model supports, see choice.py.
    """
    if decoding is Decoding.REPEATED:
        return RepeatedCacheDecoder(model, prompts, groups)
    if decoding is Decoding.SHARED and prompts.mask.shape[1] > _COPIED_TOKENS:
        return SharedPromptDecoder(model, prompts, groups)
    layers = [make_row_layer(layer, groups, shared=None) for layer in prompts.cache.layers]
    return CopiedPromptDecoder(
        model, layers, prompts.cache_name, prompts.positions[groups], prompts.starts[groups], prompts.mask.shape[1]
    )


@contextmanager
def use_attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Sets the attention implementation, and restores the previous one: the same model may be in training."""
    previous = attention_of(model)
    set_attention(model, name)
    try:
        yield
    finally:
        set_attention(model, previous)


def fill_slots(kept: Tensor, count: int) -> Tensor:
    """bool (B,), which rows of a batch are kept, `count` of them -> int64 (count,), those rows in their new order.

    Tail rows fill the freed slots, so that few rows move.
    """
    rows = kept.nonzero()[:, 0]
    slots = torch.arange(count, device=rows.device)
    slots[~kept[:count]] = rows[rows >= count]
    return slots


@dataclass(frozen=True, eq=False)
class _Reach:
    """What is left of all columns in layers with bounds, in one step.

    size: only the last so many columns are reached. bias: (n, 1, size) to add to their scores, for each of the
    decoder's prompts or rows. None if each of them reaches all of these, but padding.
    """

    size: int
    bias: Tensor | None


@dataclass(frozen=True, eq=False)
class _Scoring:
    """How a layer's scores become weights. See `AttentionKind`; sinks: (H,)."""

    softcap: float | None = None
    sinks: Tensor | None = None

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """(M, r, D), (M, T, D) -> (M, r, T)."""
        scores = torch.bmm(query, key.transpose(1, 2))
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)

    def weights(self, scores: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
        """(B K, r, T) scores of B rows -> their weights."""
        if self.sinks is None:
            return scores.softmax(dim=2, dtype=torch.float32).to(dtype)
        sinks = self.sinks.to(scores.dtype).expand(rows, -1).reshape(*scores.shape[:2], 1)
        return torch.cat([scores, sinks], dim=2).softmax(dim=2, dtype=torch.float32)[:, :, :-1].to(dtype)


_PLAIN = _Scoring()


class AttentionDecoder(ABC):
    """Decodes B rows with a model whose layers all use transformers' attention interface, or keep states. Rows can be
    dropped.

    attention: name of the attention implementation that the model must use in the next step.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[Any],
        cache_name: str,
        positions: Tensor,
        starts: Tensor,
        width: int,
    ) -> None:
        """layers: of the rows' cache, see `make_row_layer`. cache_name: see PrefilledPrompts. positions: int64 (B, 1),
        of each row's last token. starts: int64 (n,), the column of the first token of each row, or of each prompt that
        rows share. width: the number of columns so far."""
        self._model = model
        self._positions = positions
        self._starts = starts
        self._padding = padding_bias(starts, width, model.dtype)
        self._cache, self._cache_name = Cache(layers=[*layers]), cache_name
        self._width = width
        self.attention = ATTENTION
        self._bounded = False

    def select(self, rows: Tensor) -> None:
        """Keeps only these rows, int64 (B',), in this order."""
        self._positions = self._positions[rows]
        moved = (rows != torch.arange(len(rows), device=rows.device)).nonzero()[:, 0]
        for layer in self._cache.layers:
            if isinstance(layer, RowLayer):
                layer.select(len(rows), rows[moved], moved)

    def step(self, tokens: Tensor) -> Tensor:
        """int64 (B,) tokens, one per row -> (B, V) logits of the next tokens."""
        self._positions = self._positions + 1
        self._width += 1
        token = _decoding.set(self)
        try:
            output = self._model(
                input_ids=tokens[:, None],
                position_ids=self._positions,
                use_cache=True,
                **{self._cache_name: self._cache},
            )
        finally:
            _decoding.reset(token)
        if not self._bounded:  # the first step has asked for all masks
            self.attention = _FULL_ATTENTION
        return output.logits[:, -1]

    def reach(self, bounds: Bounds) -> _Reach:
        """What the next tokens attend to within these bounds."""
        self._bounded = True
        bias = None if bounds.slides else _bounds_bias(bounds, self._starts, self._width, self._model.dtype)
        return _Reach(bounds.size, bias)

    @abstractmethod
    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, reach: _Reach | None, scoring: _Scoring
    ) -> Tensor:
        """Scaled queries (B, H, 1, D), and the rows' keys (B K, T, D) and values (B K, T, E) of a layer ->
        (B, 1, H, E)."""


def decoding_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Implements transformers' attention interface. attention_mask: of `decoding_mask`."""
    if attention_mask is not None and not isinstance(attention_mask, _Reach):
        raise NotImplementedError("this model has an attention mask of its own")
    softcap, sinks = options.pop("softcap", None), options.pop("s_aux", None)
    scoring = _PLAIN if softcap is None and sinks is None else _Scoring(softcap, sinks)
    refuse_extras(options)
    query = query * (query.shape[3] ** -0.5 if scaling is None else scaling)
    key, value = key.flatten(0, 1), value.flatten(0, 1)
    layer: Any = module.layer_idx
    return _decoding.get().attend(layer, query, key, value, attention_mask, scoring), None


def decoding_mask(
    *,
    mask_function: Callable[..., Tensor],
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **options: Any,
) -> Any:
    """Implements transformers' mask interface: a `_Reach`, or None where a token attends to all before it."""
    bounds = bounds_of(mask_function, local_size, skip=allow_is_causal_skip)
    return None if bounds is None else _decoding.get().reach(bounds)


AttentionInterface.register(ATTENTION, decoding_attention)
AttentionMaskInterface.register(ATTENTION, decoding_mask)
AttentionInterface.register(_FULL_ATTENTION, decoding_attention)


class RepeatedCacheDecoder:
    """Repeats the prompts in transformers' cache, once per row. Works for every architecture with a cache.

    Attributes and methods are those of AttentionDecoder.
    """

    def __init__(self, model: PreTrainedModel, prompts: PrefilledPrompts, groups: Tensor) -> None:
        self.attention = attention_of(model)
        self._model = model
        self._cache, self._cache_name, self._attends = prompts.cache, prompts.cache_name, prompts.attends
        self._mask, self._positions = prompts.mask, prompts.positions
        self.select(groups)

    def select(self, rows: Tensor) -> None:
        select_rows(self._cache, rows)
        self._mask, self._positions = self._mask[rows], self._positions[rows]

    def step(self, tokens: Tensor) -> Tensor:
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=1)
        self._positions = self._positions + 1
        output = self._model(
            input_ids=tokens[:, None],
            # A model with only recurrent layers would multiply the new token by the mask of all tokens.
            attention_mask=self._mask if self._attends else None,
            position_ids=self._positions,
            use_cache=True,
            **{self._cache_name: self._cache},
        )
        self._cache = getattr(output, self._cache_name)
        return output.logits[:, -1]


class CopiedPromptDecoder(AttentionDecoder):
    """Each row has a copy of its prompt's keys and values: fastest for short prompts. Rows may join at any time."""

    def join(self, prompts: PrefilledPrompts, groups: Tensor) -> None:
        """Adds a row after each of the prompts in `groups`, int64 (R,). The longest of all rows begins at column 0."""
        width = max(self._width - int(self._starts.min()), prompts.mask.shape[1])
        for layer, prompt in zip(self._cache.layers, prompts.cache.layers, strict=True):
            if isinstance(layer, RowLayer):
                layer.join(prompt, groups, width)
        added = prompts.starts[groups] + (width - prompts.mask.shape[1])
        self._starts = torch.cat([self._starts + (width - self._width), added])
        self._positions = torch.cat([self._positions, prompts.positions[groups]])
        self._width = width
        self._padding = padding_bias(self._starts, width, self._model.dtype)

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self._starts = self._starts[rows]
        if self._padding is not None:
            self._padding = self._padding[rows]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, reach: _Reach | None, scoring: _Scoring
    ) -> Tensor:
        bias = self._padding
        if reach is not None:
            key, value = key[:, -reach.size :], value[:, -reach.size :]
            if reach.bias is not None:
                bias = reach.bias
            elif bias is not None:
                bias = bias[:, :, self._width - key.shape[1] :]
        return _attend(query, key, value, bias, scoring)


def _attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scoring: _Scoring) -> Tensor:
    """Attention of rows that share nothing. bias: (B, 1, P) to add to the scores of the first P columns."""
    rows, heads, _, width = query.shape
    scores = scoring.scores(query.reshape(len(key), -1, width), key)
    if bias is not None:
        scores.view(rows, heads, -1)[:, :, : bias.shape[2]].add_(bias)
    return torch.bmm(scoring.weights(scores, rows, value.dtype), value).view(rows, 1, heads, -1)


def _bounds_bias(bounds: Bounds, starts: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """(n, 1, T) to add to the scores of the last T columns, at most the bounds' size. starts: int64 (n,)."""
    columns = torch.arange(max(0, width - bounds.size), width, device=starts.device)
    places, last = columns - starts[:, None], width - 1 - starts[:, None]
    hidden = (places < 0) | ~bounds.visible(last, places)
    return torch.zeros(hidden.shape, dtype=dtype, device=starts.device).masked_fill_(hidden, -torch.inf)[:, None]


class SharedPromptDecoder(AttentionDecoder):
    """A group shares one copy of its prompt's keys and values: a step neither copies nor reads a prompt G times.

    Attention over two parts, prompt and completion, as in Hydragen (Juravsky et al., 2024).
    """

    def __init__(self, model: PreTrainedModel, prompts: PrefilledPrompts, groups: Tensor) -> None:
        """groups: int64 (B,), the prompt that each row continues; every prompt occurs."""
        self._groups = groups
        self._prompt_width = prompts.mask.shape[1]
        # The prompts' keys and values, (n, K, P, D), of each layer that keeps some, by its number.
        self._prompts = {
            number: (layer.keys.contiguous(), layer.values.contiguous())
            for number, layer in enumerate(prompts.cache.layers)
            if has_keys(layer)
        }
        layers = [make_row_layer(layer, groups, shared=self._prompt_width) for layer in prompts.cache.layers]
        self._rows: dict[int, GrowableLayer] = {number: layers[number] for number in self._prompts}
        positions = prompts.positions[groups]
        super().__init__(model, layers, prompts.cache_name, positions, prompts.starts, self._prompt_width)
        self._layouts = self._make_layouts()

    def copied(self) -> CopiedPromptDecoder:
        """A decoder of the same rows that others can join. This one cannot be used any more."""
        for number, (keys, values) in self._prompts.items():
            self._rows[number].prepend(keys[self._groups], values[self._groups])
        layers, starts = self._cache.layers, self._starts[self._groups]
        return CopiedPromptDecoder(self._model, layers, self._cache_name, self._positions, starts, self._width)

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        prompts, self._groups = self._groups[rows].unique(return_inverse=True)
        if len(prompts) < len(self._starts):
            self._prompts = {
                number: (keys[prompts], values[prompts]) for number, (keys, values) in self._prompts.items()
            }
            self._starts = self._starts[prompts]
        if self._padding is not None:
            self._padding = self._padding[prompts]
        self._layouts = self._make_layouts()

    def _make_layouts(self) -> "dict[int, GroupLayout]":
        """A layout for each number of key heads that a layer has."""
        return {
            heads: GroupLayout(self._groups, heads) for heads in {keys.shape[1] for keys, _ in self._prompts.values()}
        }

    def _owner(self, layer: int, key: Tensor) -> int:
        """The layer whose keys these are: some models, such as Gemma 4, use those of an earlier layer again."""
        if layer in self._prompts:
            return layer
        pointers = {rows.kept()[0].data_ptr(): number for number, rows in self._rows.items()}
        return pointers[key.data_ptr()]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, reach: _Reach | None, scoring: _Scoring
    ) -> Tensor:
        prompt_keys, prompt_values = self._prompts[self._owner(layer, key)]
        bias = self._padding
        if reach is not None:
            # The window's columns that lie in the prompt.
            columns = reach.size - (self._width - self._prompt_width)
            if columns <= 0:
                key, value = key[:, -reach.size :], value[:, -reach.size :]
                bias = None if reach.bias is None else reach.bias[self._groups]
                return _attend(query, key, value, bias, scoring)
            prompt_keys, prompt_values = prompt_keys[:, :, -columns:], prompt_values[:, :, -columns:]
            if reach.bias is not None:
                bias = reach.bias
            elif bias is not None:
                bias = bias[:, :, self._prompt_width - prompt_keys.shape[2] :]
        layout = self._layouts[prompt_keys.shape[1]]
        rows, heads, _, width = query.shape
        query = query.reshape(len(key), -1, width)  # the query heads of a key head are adjacent
        prompt_scores = scoring.scores(layout.by_group(query), prompt_keys.flatten(0, 1))
        row_scores = scoring.scores(query, key)
        if bias is not None:
            columns = prompt_scores.shape[2]
            if reach is not None and reach.bias is not None:
                row_scores.view(rows, heads, -1).add_(bias[self._groups, :, columns:])
                bias = bias[:, :, :columns]
            prompt_scores.view(len(bias), -1, columns).add_(bias)
        scores = torch.cat([layout.by_row(prompt_scores), row_scores], dim=2)
        weights = scoring.weights(scores, rows, value.dtype)
        prompt_weights, row_weights = weights.split([prompt_scores.shape[2], row_scores.shape[2]], dim=2)
        from_prompt = layout.by_row(torch.bmm(layout.by_group(prompt_weights), prompt_values.flatten(0, 1)))
        return torch.baddbmm(from_prompt, row_weights, value).view(rows, 1, heads, -1)


Decoder = RepeatedCacheDecoder | CopiedPromptDecoder | SharedPromptDecoder


class GroupLayout:
    """Lays rows of n groups out so that each group is one matrix, padded to P rows, those of the largest group.

    Each row has K heads, and each head is a matrix (r, D). A group has one matrix per head, stacked from its rows.
    Padding rows hold arbitrary values, which are never read back.
    """

    def __init__(self, groups: Tensor, heads: int) -> None:
        """groups: int64 (B,), the group of each row, from 0 to n - 1; every group has a row."""
        counts = groups.bincount()
        places = int(counts.max())
        order = groups.argsort(stable=True)
        sorted_groups = groups[order]
        place = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[sorted_groups]
        head = torch.arange(heads, device=order.device)
        cells = (sorted_groups[:, None] * heads + head) * places + place[:, None]
        matrices = order[:, None] * heads + head
        self._matrices = len(counts) * heads
        self._to_groups = order.new_zeros(self._matrices * places)
        self._to_groups[cells] = matrices
        self._to_rows = order.new_empty(len(order) * heads)
        self._to_rows[matrices] = cells

    def by_group(self, x: Tensor) -> Tensor:
        """(B K, r, D) -> (n K, P r, D)."""
        return x.index_select(0, self._to_groups).view(self._matrices, -1, x.shape[2])

    def by_row(self, x: Tensor) -> Tensor:
        """(n K, P r, D) -> (B K, r, D)."""
        return x.view(len(self._to_groups), -1, x.shape[2]).index_select(0, self._to_rows)
