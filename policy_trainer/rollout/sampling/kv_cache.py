"""Keys, values and states of prompts, computed once for all their completions, and of sampled tokens, in a cache that
grows in place."""

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from policy_trainer.data.prompts import EncodedPrompt
from shared.errors import UserError
from shared.logprobs.forked import CACHE_NAMES
from shared.logprobs.vision import FAMILIES, Vision

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

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the constructor has allocated everything."""


class GrowableLayer(_KeptLayer):
    """Keys and values of one layer, (S, K, C, D), of B rows in the first slots, with room for more rows and tokens.

    All rows end at the same column. What precedes a row's first token is zeros, or what an earlier row left there.
    """

    def __init__(self, keys: Tensor, values: Tensor, *, before: int = 0, window: int | None = None) -> None:
        """before: number of earlier tokens whose keys and values are kept elsewhere. window: the most columns that the
        layer attends to; earlier ones are not kept."""
        super().__init__()
        self._window = window or sys.maxsize
        self._tokens = before + keys.shape[2]
        self._place(keys, values)
        self.is_initialized = True

    def kept(self) -> tuple[Tensor, Tensor]:
        """The rows' keys and values, (B, K, T, D)."""
        start = self._end - self._width
        return self._keys[:, :, start : self._end], self._values[:, :, start : self._end]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends the next token's (B, K, 1, D). Returns all that are kept."""
        if self._end == self._keys.shape[2]:
            self._move(len(self._keys), self._width, max(int(GROWTH * self._width), self._width + _FREE_TOKENS))
        self._keys[:, :, self._end] = key_states[:, :, 0]
        self._values[:, :, self._end] = value_states[:, :, 0]
        self._end += 1
        self._tokens += 1
        self._width = min(self._width + 1, self._window)
        return self.kept()

    def prepend(self, keys: Tensor, values: Tensor) -> None:
        """Adds what is kept elsewhere, (B, K, P, D)."""
        own_keys, own_values = self.kept()
        self._place(torch.cat([keys, own_keys], dim=2), torch.cat([values, own_values], dim=2))

    def join(self, prompt: Any, groups: Tensor, width: int) -> None:
        """Adds a row after each prompt in `groups`, int64 (R,), of this layer of transformers' cache. width: the
        columns that are in use from now on."""
        keys, values = prompt.keys[groups], prompt.values[groups]
        first, after = len(self._keys), len(self._keys) + len(keys)
        self._tokens = width
        width = min(width, self._window)
        self._width = min(self._width, width)
        if after > len(self._slots[0]) or width > self._end:
            end = width + width // 4
            self._move(max(len(self._slots[0]), after + first // 4), end, end + _FREE_TOKENS)
        self._keys, self._values = (part[:after] for part in self._slots)
        for part, added in ((self._keys, keys), (self._values, values)):
            added = added[:, :, -width:]
            part[first:, :, self._end - added.shape[2] : self._end] = added
        self._width = width

    def select(self, count: int, source: Tensor, target: Tensor) -> None:
        """Copies the rows at `source` to the rows `target`, then keeps the first `count` rows."""
        for part in self.kept():
            part[target] = part[source]
        self._keys, self._values = self._keys[:count], self._values[:count]

    def get_seq_length(self) -> int:
        return self._tokens

    def _place(self, keys: Tensor, values: Tensor) -> None:
        self._width = self._end = min(keys.shape[2], self._window)
        # Of the B rows: the first slots.
        self._keys, self._values = (part[:, :, part.shape[2] - self._width :] for part in (keys, values))
        self._move(len(keys), self._width, self._width + _FREE_TOKENS)

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


class StateLayer(LinearAttentionLayer):
    """The states of a layer with linear attention, a convolution or Mamba, of B rows. The model writes them in place.

    States: what follows from a row's tokens so far, of the same size however many they are.
    """

    def __init__(self, prompt: Any, groups: Tensor) -> None:
        """A row begins with a copy of the state of each prompt in `groups`, int64 (B,), of this layer of transformers'
        cache."""
        super().__init__()
        vars(self).update((name, value) for name, value in vars(prompt).items() if name not in ("keys", "values"))
        set_states(self, lambda state: state.index_select(0, groups), prompt)

    def join(self, prompt: Any, groups: Tensor, width: int) -> None:
        """See GrowableLayer."""
        set_states(self, lambda kept, state: torch.cat([kept, state.index_select(0, groups)]), self, prompt)

    def select(self, count: int, source: Tensor, target: Tensor) -> None:
        """See GrowableLayer."""

        def selected(state: Tensor) -> Tensor:
            state[target] = state[source]
            return state[:count]

        set_states(self, selected, self)


class HybridLayer(GrowableLayer, StateLayer):
    """Both, of layers that combine attention with Mamba, such as Falcon-H1's."""

    def __init__(self, prompt: Any, groups: Tensor, keys: Tensor, values: Tensor, **options: Any) -> None:
        StateLayer.__init__(self, prompt, groups)
        GrowableLayer.__init__(self, keys, values, **options)

    def join(self, prompt: Any, groups: Tensor, width: int) -> None:
        GrowableLayer.join(self, prompt, groups, width)
        StateLayer.join(self, prompt, groups, width)

    def select(self, count: int, source: Tensor, target: Tensor) -> None:
        GrowableLayer.select(self, count, source, target)
        StateLayer.select(self, count, source, target)


# HybridLayer is both.
RowLayer = GrowableLayer | StateLayer


def has_keys(layer: Any) -> bool:
    """Whether a layer of a prefilled cache keeps keys and values; others have states, or nothing."""
    return getattr(layer, "keys", None) is not None


def has_states(layer: Any) -> bool:
    return isinstance(layer, LinearAttentionCacheLayerMixin)


def set_states(layer: Any, change: Callable[..., Tensor], *sources: Any) -> None:
    """Sets the states of a layer of transformers' cache to what `change` makes of the states of these layers."""

    def changed(*states: Any) -> Any:
        if isinstance(states[0], dict):  # one for each of several convolutions; in older transformers a tensor
            return {name: changed(*(each[name] for each in states)) for name in states[0]}
        return None if states[0] is None else change(*states)

    for name in ("conv_states", "recurrent_states"):
        setattr(layer, name, changed(*(getattr(source, name) for source in sources)))


def make_row_layer(prompt: Any, groups: Tensor, *, shared: int | None) -> Any:
    """What a layer of transformers' cache keeps of rows, from what it kept of prompts.

    groups: int64 (B,), the prompt of each row. shared: None for copies of the prompts' keys and values, otherwise the
    number of the prompts' tokens, whose keys and values are kept elsewhere. Layers that keep nothing stay as they are.
    """
    if not has_keys(prompt):
        return StateLayer(prompt, groups) if has_states(prompt) else prompt
    window = prompt.sliding_window if getattr(prompt, "is_sliding", False) else None
    columns = slice(None if shared is None else 0)
    keys, values = (part[:, :, columns][groups] for part in (prompt.keys, prompt.values))
    options: dict[str, Any] = {"before": shared or 0, "window": window}
    if has_states(prompt):
        return HybridLayer(prompt, groups, keys, values, **options)
    return GrowableLayer(keys, values, **options)


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
    cache_name: str

    @property
    def attends(self) -> bool:
        """False for a model with only recurrent layers."""
        layers = getattr(self.cache, "layers", ())
        return self.cache_name != "cache_params" and (not layers or any(map(has_keys, layers)))

    @property
    def starts(self) -> Tensor:
        """int64 (n,): the column of each prompt's first token."""
        return self.mask.shape[1] - self.mask.sum(1)


def together(parts: Sequence[PrefilledPrompts]) -> PrefilledPrompts:
    """The prompts of several forwards as of one."""
    if len(parts) == 1:
        return parts[0]

    def stacked(tensors: Sequence[Tensor], dim: int) -> Tensor:
        """Stacks tensors whose columns, the dimension `dim` from the end, are padded on the left."""
        width = max(each.shape[-dim] for each in tensors)
        return torch.cat([pad(each, (0, 0) * (dim - 1) + (width - each.shape[-dim], 0)) for each in tensors])

    def joined(layers: Sequence[Any]) -> Any:
        whole = copy(layers[0])
        if has_keys(whole):
            whole.keys, whole.values = (
                stacked([getattr(each, name) for each in layers], 2) for name in ("keys", "values")
            )
        if has_states(whole):
            set_states(whole, lambda *states: torch.cat(states), *layers)
        return whole

    layers = [joined(layer) for layer in zip(*(part.cache.layers for part in parts), strict=True)]
    return PrefilledPrompts(
        torch.cat([part.logits for part in parts]),
        SimpleNamespace(layers=layers),
        stacked([part.mask for part in parts], 1),
        torch.cat([part.positions for part in parts]),
        parts[0].cache_name,
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
    output = forward_with_cache(model, ids, mask, places, **pictures)
    name = next((name for name in CACHE_NAMES if getattr(output, name, None) is not None), None)
    if name is None:
        raise UserError(f"model: {type(model).__name__} keeps no key-value cache to sample with")
    largest = places.view(-1, *ids.shape).amax((0, 2))[:, None]
    return PrefilledPrompts(output.logits[:, -1], getattr(output, name), mask, largest, name)


def forward_with_cache(model: PreTrainedModel, ids: Tensor, mask: Tensor, positions: Tensor, **more: Any) -> Any:
    """The model's output with its cache, and with the logits of the last column only."""
    with _contiguous_for_head(model):
        return model(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1, **more
        )


@contextmanager
def _contiguous_for_head(model: PreTrainedModel) -> Generator[None]:
    """The LM head gets the last hidden states in one piece. As a view of all of them, PyTorch copies the weight of a
    frozen head in bfloat16 once for each row: 3.6 GB for 64 prompts of SmolLM2-135M, and seconds."""
    head = model.get_output_embeddings()
    if head is None:
        yield
        return
    handle = head.register_forward_pre_hook(lambda module, inputs: (inputs[0].contiguous(), *inputs[1:]))
    try:
        yield
    finally:
        handle.remove()


def _positions(prompt: EncodedPrompt, vision: Vision | None) -> Tensor:
    """int64 (P,) positions of a prompt's tokens, or (3, P) for M-RoPE."""
    if vision is None:
        return torch.arange(len(prompt))
    return torch.tensor(vision.positions(np.array(prompt.ids), prompt.images))
