"""Keys and values of prompts, computed once for all their completions, and of sampled tokens, in a cache that grows in
place."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from policy_trainer.data.prompts import EncodedPrompt
from shared.errors import UserError
from shared.logprobs.vision import FAMILIES, Vision

ATTENTION_CACHE = "past_key_values"
# Names of the cache in a model's output; the second is that of models with only recurrent layers, such as Mamba.
_CACHE_NAMES = (ATTENTION_CACHE, "cache_params")
# Free tokens of a new cache. A full cache grows by half.
_FREE_TOKENS = 32


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
    """Keys and values of one layer, (B, K, T, D), with room for more tokens.

    before: number of earlier tokens whose keys and values are kept elsewhere.
    """

    def __init__(self, keys: Tensor, values: Tensor, *, before: int = 0) -> None:
        super().__init__()
        self._before, self._length = before, keys.shape[2]
        self._keys, self._values = (_with_room(part, part.shape[2] + _FREE_TOKENS) for part in (keys, values))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends the next token's (B, K, 1, D). Returns all as (B K, T, D), as decoding attention takes them."""
        if self._length == self._keys.shape[2]:
            room = self._length + self._length // 2
            self._keys, self._values = _with_room(self._keys, room), _with_room(self._values, room)
        self._keys[:, :, self._length] = key_states[:, :, 0]
        self._values[:, :, self._length] = value_states[:, :, 0]
        self._length += 1
        return self._keys.flatten(0, 1)[:, : self._length], self._values.flatten(0, 1)[:, : self._length]

    def select(self, count: int, source: Tensor, target: Tensor) -> None:
        """Copies the rows at `source` to the rows `target`, then keeps the first `count` rows."""
        for part in (self._keys, self._values):
            part[target, :, : self._length] = part[source, :, : self._length]
        self._keys, self._values = self._keys[:count], self._values[:count]

    def get_seq_length(self) -> int:
        return self._before + self._length


def _with_room(part: Tensor, tokens: int) -> Tensor:
    """The same keys or values in a tensor with room for this many tokens."""
    rows, heads, length, width = part.shape
    grown = part.new_empty(rows, heads, tokens, width)
    grown[:, :, :length] = part
    return grown


@dataclass(eq=False)
class RowLengths:
    """How many tokens the layers of a cache have of each row, int64 (B,), and of the longest row."""

    rows: Tensor
    longest: int = 0


class SlotLayer(_KeptLayer):
    """Keys and values of one layer, (S, K, W, D), of rows that join and leave: row i fills slot i from column 0 on.

    Beyond a row's end are zeros, or what an earlier row has left there. lengths: those before the next token, which all
    layers share and their decoder maintains.
    """

    def __init__(self, lengths: RowLengths, keys: Tensor, values: Tensor) -> None:
        """keys, values: (n, K, P, D) of prompts, whose shapes the layer takes; `join` adds their rows."""
        super().__init__()
        self._lengths = lengths
        self._keys, self._values = keys[:0, :, :0], values[:0, :, :0]
        self.is_initialized = True

    def join(self, keys: Tensor, values: Tensor, lengths: Tensor, groups: Tensor) -> None:
        """Adds a row for each of `groups`, int64 (R,): its prompt among n. keys, values: (n, K, P, D), left-padded.
        lengths: int64 (n,), tokens of the prompts."""
        first, width = len(self._lengths.rows), keys.shape[2]
        after = first + len(groups)
        slots, room = len(self._keys), self._keys.shape[2]
        if after > slots or width > room:
            slots = slots if after <= slots else after + first // 4
            self._resize(slots, room if width <= room else width + _FREE_TOKENS)
        columns = torch.arange(width, device=keys.device) + (width - lengths)[:, None]
        columns = columns.clamp(max=width - 1)[:, None, :, None]
        for part, added in ((self._keys, keys), (self._values, values)):
            aligned = added.gather(2, columns.expand(-1, added.shape[1], -1, added.shape[3]))
            part[first:after, :, :width] = aligned[groups]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends each row's next token, (B, K, 1, D). Returns all as (B K, T, D), where T is the longest row's."""
        ends, width = self._lengths.rows, self._lengths.longest + 1
        if width > self._keys.shape[2]:
            self._resize(len(ends), width + width // 2)
        rows = torch.arange(len(ends), device=ends.device)
        self._keys[rows, :, ends] = key_states[:, :, 0]
        self._values[rows, :, ends] = value_states[:, :, 0]
        keys, values = self._keys[: len(rows)], self._values[: len(rows)]
        return keys.flatten(0, 1)[:, :width], values.flatten(0, 1)[:, :width]

    def select(self, count: int, source: Tensor, target: Tensor) -> None:
        """Copies the rows at `source` to the rows `target`. The slots after the first `count` are free."""
        width = self._lengths.longest
        for part in (self._keys, self._values):
            part[target, :, :width] = part[source, :, :width]

    def get_seq_length(self) -> int:
        return self._lengths.longest

    def _resize(self, slots: int, columns: int) -> None:
        count, width = len(self._lengths.rows), self._lengths.longest

        def moved(part: Tensor) -> Tensor:
            # Zeros: what no row has written has the weight 0, and 0 times an arbitrary number can be NaN.
            wider = part.new_zeros(slots, part.shape[1], columns, part.shape[3])
            wider[:count, :, :width] = part[:count, :, :width]
            return wider

        self._keys, self._values = moved(self._keys), moved(self._values)


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

    def padding_bias(self) -> Tensor | None:
        """(n, 1, P) to add to attention scores: -inf at padding. None where all prompts are equally long."""
        if self.mask.all():
            return None
        bias = torch.zeros(self.mask.shape, dtype=self.logits.dtype, device=self.mask.device)
        return bias.masked_fill(self.mask == 0, -torch.inf)[:, None]


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
