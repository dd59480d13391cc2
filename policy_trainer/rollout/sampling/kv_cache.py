"""Keys and values of prompts, computed once for all their completions, and of sampled tokens, in a cache that grows in
place."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from policy_trainer.data.prompts import EncodedPrompt
from shared.errors import UserError
from shared.logprobs.vision import FAMILIES, Vision

ATTENTION_CACHE = "past_key_values"
# Names of the cache in a model's output; the second is that of models with only recurrent layers, such as Mamba.
_CACHE_NAMES = (ATTENTION_CACHE, "cache_params")
# Free tokens of a new cache.
_FREE_TOKENS = 32
# A full cache becomes so many times as large.
GROWTH = 1.5


class _KeptLayer(CacheLayerMixin):
    """What transformers asks of a layer that keeps all tokens."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    # The method's name before transformers 5.14, which also requires it.
    get_max_cache_shape = get_max_length

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the constructor has allocated everything."""


class GrowableLayer(_KeptLayer):
    """Keys and values of one layer, (S, K, C, D), of B rows in the first slots, with room for more rows and tokens.

    All rows end at the same column. What precedes a row's first token is zeros, or what an earlier row left there.
    before: number of earlier tokens whose keys and values are kept elsewhere.
    """

    def __init__(self, keys: Tensor, values: Tensor, *, before: int = 0) -> None:
        super().__init__()
        self._before, self._width = before, keys.shape[2]
        self._keys, self._values = keys, values  # of the B rows: the first slots
        self._end = self._width
        self._move(len(keys), self._width, self._width + _FREE_TOKENS)
        self.is_initialized = True

    def kept(self) -> tuple[Tensor, Tensor]:
        """The rows' keys and values, (B, K, T, D)."""
        start = self._end - self._width
        return self._keys[:, :, start : self._end], self._values[:, :, start : self._end]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends the next token's (B, K, 1, D). Returns all as (B K, T, D), as decoding attention takes them."""
        if self._end == self._keys.shape[2]:
            self._move(len(self._keys), self._width, int(GROWTH * self._width))
        self._keys[:, :, self._end] = key_states[:, :, 0]
        self._values[:, :, self._end] = value_states[:, :, 0]
        self._end += 1
        self._width += 1
        keys, values = self.kept()
        return keys.flatten(0, 1), values.flatten(0, 1)

    def join(self, keys: Tensor, values: Tensor, width: int) -> None:
        """Adds rows with these keys and values, (R, K, P, D). width: the columns that are in use from now on."""
        first, after = len(self._keys), len(self._keys) + len(keys)
        self._width = min(self._width, width)
        if after > len(self._slots[0]) or width > self._end:
            end = width + width // 4
            self._move(max(len(self._slots[0]), after + first // 4), end, end + _FREE_TOKENS)
        self._keys, self._values = (part[:after] for part in self._slots)
        for part, added in ((self._keys, keys), (self._values, values)):
            part[first:, :, self._end - added.shape[2] : self._end] = added
        self._width = width

    def select(self, count: int, source: Tensor, target: Tensor) -> None:
        """Copies the rows at `source` to the rows `target`, then keeps the first `count` rows."""
        for part in self.kept():
            part[target] = part[source]
        self._keys, self._values = self._keys[:count], self._values[:count]

    def get_seq_length(self) -> int:
        return self._before + self._width

    def _move(self, slots: int, end: int, columns: int) -> None:
        """Copies the rows to new tensors with so many slots and columns, where they end before the column `end`."""

        def moved(part: Tensor) -> Tensor:
            # Zeros: what no row has written has the weight 0, and 0 times an arbitrary number can be NaN. Columns after
            # the end, too: a row that joins later in the slot of one that left has some that neither has written.
            wider = part.new_zeros(slots, part.shape[1], columns, part.shape[3])
            wider[: len(part), :, end - self._width : end] = part
            return wider

        rows = len(self._keys)
        self._slots = [moved(part) for part in self.kept()]
        self._keys, self._values = (part[:rows] for part in self._slots)
        self._end = end


@dataclass(frozen=True, eq=False)
class PromptLayer:
    """Keys and values of one layer, (n, K, P, D)."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, eq=False)
class PrefilledPrompts:
    """n prompts after one forward, left-padded to P tokens so that all continue at the same column.

    logits: (n, V) of the first token after each prompt. cache: transformers' cache of their keys and values or
    recurrent states. mask: int64 (n, P), 1 for tokens, 0 for padding. positions: int64 (n, 1), each prompt's largest:
    its last token's, unless a picture has larger ones. cache_name: the forward's argument for the cache.
    """

    logits: Tensor
    cache: Any
    mask: Tensor
    positions: Tensor
    cache_name: str = ATTENTION_CACHE

    @property
    def starts(self) -> Tensor:
        """int64 (n,): the column of each prompt's first token."""
        return self.mask.shape[1] - self.mask.sum(1)


def together(parts: Sequence[PrefilledPrompts]) -> PrefilledPrompts:
    """The prompts of several forwards, whose caches have keys and values only, as of one."""
    if len(parts) == 1:
        return parts[0]
    width = max(part.mask.shape[1] for part in parts)

    def stacked(tensors: Iterable[Tensor], dim: int) -> Tensor:
        """Stacks tensors whose columns, the dimension `dim` from the end, are padded on the left."""
        return torch.cat([pad(each, (0, 0) * (dim - 1) + (width - each.shape[-dim], 0)) for each in tensors])

    layers = [
        PromptLayer(stacked((each.keys for each in layer), 2), stacked((each.values for each in layer), 2))
        for layer in zip(*(part.cache.layers for part in parts), strict=True)
    ]
    return PrefilledPrompts(
        torch.cat([part.logits for part in parts]),
        SimpleNamespace(layers=layers),
        stacked((part.mask for part in parts), 1),
        torch.cat([part.positions for part in parts]),
    )


def padding_bias(starts: Tensor, width: int, dtype: torch.dtype) -> Tensor | None:
    """(n, 1, width) to add to attention scores: -inf before the columns `starts`, int64 (n,). None if all are 0."""
    if not starts.any():
        return None
    padding = torch.arange(width, device=starts.device) < starts[:, None]
    return torch.zeros(padding.shape, dtype=dtype, device=starts.device).masked_fill(padding, -torch.inf)[:, None]


def select_rows(cache: Any, rows: Tensor) -> None:
    """Replaces the rows of a transformers cache by these, int64 (B',). A row may appear several times."""
    # Only `reorder_cache` handles recurrent states. A model's own cache class may have further states.
    select = getattr(type(cache), "batch_select_indices", None)
    if select in (None, Cache.batch_select_indices):
        cache.reorder_cache(rows)
    else:
        cache.batch_select_indices(rows)


def prefill(model: PreTrainedModel, prompts: Sequence[EncodedPrompt], vision: Vision | None) -> PrefilledPrompts:
    """vision: of this model. Raises UserError for a model without a cache, and for pictures without vision, since the
    model would answer without seeing them."""
    if vision is None and any(prompt.images for prompt in prompts):
        raise UserError(f"model: pictures are not supported for {type(model).__name__}, only for {FAMILIES}")
    positions = [_positions(prompt, vision) for prompt in prompts]
    width, device = max(map(len, prompts)), model.device
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    places = ids.new_zeros(*positions[0].shape[:-1], *ids.shape)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt.ids)
        mask[row, width - len(prompt) :] = 1
        places[..., row, width - len(prompt) :] = positions[row]
    ids, mask, places = ids.to(device), mask.to(device), places.to(device)
    pictures = vision.inputs([prompt.images for prompt in prompts], ids) if vision else {}
    options = {"use_cache": True, "logits_to_keep": 1, **pictures}
    output = model(input_ids=ids, attention_mask=mask, position_ids=places, **options)
    name = next((name for name in _CACHE_NAMES if getattr(output, name, None) is not None), None)
    if name is None:
        raise UserError(f"model: {type(model).__name__} keeps no key-value cache to sample with")
    largest = places.view(-1, *ids.shape).amax((0, 2))[:, None]
    return PrefilledPrompts(output.logits[:, -1], getattr(output, name), mask, largest, name)


def _positions(prompt: EncodedPrompt, vision: Vision | None) -> Tensor:
    """int64 (P,) positions of a prompt's tokens, or (3, P) for M-RoPE."""
    if vision is None:
        return torch.arange(len(prompt))
    return torch.tensor(vision.positions(np.array(prompt.ids), prompt.images))
