"""Decoders: compute the logits of one token per row and step, after prompts that were prefilled once per group.

Most use a custom attention function, over keys and values that grow in place. All rows end at the same column, so
only the columns before a row's first token are masked.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, PreTrainedModel

from policy_trainer.rollout.sampling.kv_cache import (
    ATTENTION_CACHE,
    GrowableLayer,
    PrefilledPrompts,
    padding_bias,
    select_rows,
)
from shared.logprobs import attends_fully
from shared.logprobs.attention import attention_of, refuse_extras, set_attention

ATTENTION = "tandem_decoding"
# Shorter prompts are copied: reading so few tokens G times costs less than combining two parts of attention.
_COPIED_TOKENS = 64


def supports_decoding_attention(model: PreTrainedModel) -> bool:
    """Whether every layer attends to all tokens, through transformers' attention interface."""
    return getattr(model, "_supports_attention_backend", False) and attends_fully(model)


def make_decoder(
    model: PreTrainedModel, prompts: PrefilledPrompts, groups: Tensor, *, decoding_attention: bool
) -> "Decoder":
    """The fastest decoder for B rows. groups: int64 (B,) in ascending order, the prompt that each row continues.

    decoding_attention: whether the model supports it, see choice.py. Other models have sliding windows or recurrent
    layers, which only transformers' own cache keeps.
    """
    if not decoding_attention:
        return RepeatedCacheDecoder(model, prompts, groups)
    if prompts.mask.shape[1] > _COPIED_TOKENS:
        return SharedPromptDecoder(model, prompts, groups)
    copies = [(layer.keys[groups], layer.values[groups]) for layer in prompts.cache.layers]
    return CopiedPromptDecoder(model, copies, prompts.positions[groups], prompts.starts[groups])


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


class AttentionDecoder(ABC):
    """Decodes B rows with a model that supports decoding attention. Rows can be dropped.

    attention: name of the attention implementation that the model must use while decoding.
    """

    attention = ATTENTION

    def __init__(self, model: PreTrainedModel, positions: Tensor, layers: Sequence[GrowableLayer]) -> None:
        """positions: int64 (B, 1) of each row's last token. layers: the rows' keys and values."""
        self._model = model
        self._positions = positions
        self._layers = [*layers]
        self._cache = Cache(layers=[*self._layers])

    def select(self, rows: Tensor) -> None:
        """Keeps only these rows, int64 (B',), in this order."""
        self._positions = self._positions[rows]
        moved = (rows != torch.arange(len(rows), device=rows.device)).nonzero()[:, 0]
        for layer in self._layers:
            layer.select(len(rows), rows[moved], moved)

    def step(self, tokens: Tensor) -> Tensor:
        """int64 (B,) tokens, one per row -> (B, V) logits of the next tokens."""
        self._positions = self._positions + 1
        output = self._model(
            input_ids=tokens[:, None],
            position_ids=self._positions,
            past_key_values=self._cache,
            use_cache=True,
            decoder=self,
        )
        return output.logits[:, -1]

    @abstractmethod
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Scaled queries (B, H, 1, D), and the rows' keys and values (B K, T, D) of a layer -> (B, 1, H, D)."""


def decoding_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    decoder: AttentionDecoder,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Implements transformers' attention interface. No mask function is registered, so transformers makes no mask."""
    refuse_extras(kwargs)
    query = query * (query.shape[3] ** -0.5 if scaling is None else scaling)
    return decoder.attend(module.layer_idx, query, key, value), None  # type: ignore[arg-type]


AttentionInterface.register(ATTENTION, decoding_attention)


class RepeatedCacheDecoder:
    """Repeats the prompts in transformers' cache, once per row. Works for every architecture with a cache.

    Attributes and methods are those of AttentionDecoder.
    """

    def __init__(self, model: PreTrainedModel, prompts: PrefilledPrompts, groups: Tensor) -> None:
        self.attention = attention_of(model)
        self._model = model
        self._cache, self._cache_name = prompts.cache, prompts.cache_name
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
            attention_mask=self._mask if self._cache_name == ATTENTION_CACHE else None,
            position_ids=self._positions,
            use_cache=True,
            **{self._cache_name: self._cache},
        )
        self._cache = getattr(output, self._cache_name)
        return output.logits[:, -1]


class CopiedPromptDecoder(AttentionDecoder):
    """Each row has a copy of its prompt's keys and values: fastest for short prompts. Rows may join at any time."""

    def __init__(
        self, model: PreTrainedModel, parts: Sequence[tuple[Tensor, Tensor]], positions: Tensor, starts: Tensor
    ) -> None:
        """parts: of each layer the rows' keys and values, (B, K, T, D). positions: int64 (B, 1), of each row's last
        token. starts: int64 (B,), the column of its first."""
        super().__init__(model, positions, [GrowableLayer(keys, values) for keys, values in parts])
        self._width = parts[0][0].shape[2]
        self._starts = starts
        self._padding = padding_bias(starts, self._width, model.dtype)

    def join(self, prompts: PrefilledPrompts, groups: Tensor) -> None:
        """Adds a row after each of the prompts in `groups`, int64 (R,). The longest of all rows begins at column 0."""
        width = max(self._width - int(self._starts.min()), prompts.mask.shape[1])
        for layer, prompt in zip(self._layers, prompts.cache.layers, strict=True):
            layer.join(prompt.keys[groups], prompt.values[groups], width)
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

    def step(self, tokens: Tensor) -> Tensor:
        self._width += 1
        return super().step(tokens)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return _attend(query, key, value, self._padding)


def _attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """Attention of rows that share nothing. bias: (B, 1, P) to add to the scores of the first P columns."""
    rows, heads, _, width = query.shape
    scores = torch.bmm(query.reshape(len(key), -1, width), key.transpose(1, 2))
    if bias is not None:
        scores.view(rows, heads, -1)[:, :, : bias.shape[2]].add_(bias)
    weights = scores.softmax(dim=2, dtype=torch.float32).to(value.dtype)
    return torch.bmm(weights, value).view(rows, 1, heads, -1)


class SharedPromptDecoder(AttentionDecoder):
    """A group shares one copy of its prompt's keys and values: a step neither copies nor reads a prompt G times.

    Attention over two parts, prompt and completion, as in Hydragen (Juravsky et al., 2024).
    """

    def __init__(self, model: PreTrainedModel, prompts: PrefilledPrompts, groups: Tensor) -> None:
        """groups: int64 (B,), the prompt that each row continues; every prompt occurs."""
        self._groups = groups
        # Of each layer the prompts' keys and values, (n, K, P, D).
        self._prompts = [(layer.keys.contiguous(), layer.values.contiguous()) for layer in prompts.cache.layers]
        width = prompts.mask.shape[1]
        layers = []
        for keys, values in self._prompts:
            no_keys, no_values = keys[self._groups, :, :0], values[self._groups, :, :0]
            layers.append(GrowableLayer(no_keys, no_values, before=width))
        super().__init__(model, prompts.positions[self._groups], layers)
        self._starts = prompts.starts
        self._padding = padding_bias(self._starts, width, model.dtype)
        self._layouts = self._make_layouts()

    def copied(self) -> CopiedPromptDecoder:
        """A decoder of the same rows that others can join."""
        parts = [
            (torch.cat([keys[self._groups], own_keys], dim=2), torch.cat([values[self._groups], own_values], dim=2))
            for (keys, values), (own_keys, own_values) in zip(
                self._prompts, (layer.kept() for layer in self._layers), strict=True
            )
        ]
        return CopiedPromptDecoder(self._model, parts, self._positions, self._starts[self._groups])

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        prompts, self._groups = self._groups[rows].unique(return_inverse=True)
        if len(prompts) < len(self._prompts[0][0]):
            self._prompts = [(keys[prompts], values[prompts]) for keys, values in self._prompts]
            self._starts = self._starts[prompts]
        if self._padding is not None:
            self._padding = self._padding[prompts]
        self._layouts = self._make_layouts()

    def _make_layouts(self) -> "dict[int, GroupLayout]":
        """A layout for each number of key heads that a layer has."""
        return {heads: GroupLayout(self._groups, heads) for heads in {keys.shape[1] for keys, _ in self._prompts}}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        prompt_keys, prompt_values = self._prompts[layer]
        layout = self._layouts[prompt_keys.shape[1]]
        rows, heads, _, width = query.shape
        query = query.reshape(len(key), -1, width)  # the query heads of a key head are adjacent
        prompt_scores = torch.bmm(layout.by_group(query), prompt_keys.flatten(0, 1).transpose(1, 2))
        if self._padding is not None:
            prompt_scores.view(len(self._padding), -1, prompt_scores.shape[2]).add_(self._padding)
        row_scores = torch.bmm(query, key.transpose(1, 2))
        scores = torch.cat([layout.by_row(prompt_scores), row_scores], dim=2)
        weights = scores.softmax(dim=2, dtype=torch.float32).to(value.dtype)
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
