"""Decoding with keys and values that grow in place, through an attention function of our own.

A step copies nothing that is there already, and needs no mask but that of the prompts' padding, since all rows have
sampled equally many tokens.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from policy_trainer.sampling.decoding import Prompts
from shared.logprobs import attends_fully
from shared.logprobs.attention import refuse_extras

ATTENTION = "tandem_decoding"
# Tokens that keys and values have room for beyond those at first; when it is full it grows by half.
_ROOM = 32


def takes_our_attention(model: PreTrainedModel) -> bool:
    """Whether every layer attends to all tokens, through an attention function that transformers lets us choose."""
    return getattr(model, "_supports_attention_backend", False) and attends_fully(model)


class GrowingDecoding(ABC):
    """Decodes models of which takes_our_attention is true. layers: the rows' keys and values."""

    attention = ATTENTION

    def __init__(self, model: PreTrainedModel, positions: Tensor, layers: "list[Growing]") -> None:
        """positions: int64 (B, 1) of each row's last token."""
        self._model = model
        self._positions = positions
        self._layers: list[Any] = [*layers]
        self._cache = Cache(layers=self._layers)

    def select(self, places: Tensor) -> None:
        self._positions = self._positions[places]
        moved = (places != torch.arange(len(places), device=places.device)).nonzero()[:, 0]
        for layer in self._layers:
            layer.select(len(places), places[moved], moved)

    def advance(self, tokens: Tensor) -> Tensor:
        self._positions = self._positions + 1
        output = self._model(
            input_ids=tokens[:, None],
            position_ids=self._positions,
            past_key_values=self._cache,
            use_cache=True,
            decoding=self,
        )
        return output.logits[:, -1]

    @abstractmethod
    def attend(self, index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Layer, scaled queries (B, H, 1, D), and keys and values (B K, T, D) of the rows -> (B, 1, H, D)."""


class Growing(CacheLayerMixin):
    """Keys and values of one layer, (B, K, T, D), with room to grow. before: tokens that are kept elsewhere."""

    def __init__(self, keys: Tensor, values: Tensor, *, before: int = 0) -> None:
        super().__init__()
        self._before, self._length = before, keys.shape[2]
        self._keys, self._values = (_grown(part, part.shape[2] + _ROOM) for part in (keys, values))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Takes the next token's (B, K, 1, D) and returns (B K, T, D), which our attention alone is given."""
        if self._length == self._keys.shape[2]:
            room = self._length + self._length // 2
            self._keys, self._values = _grown(self._keys, room), _grown(self._values, room)
        self._keys[:, :, self._length] = key_states[:, :, 0]
        self._values[:, :, self._length] = value_states[:, :, 0]
        self._length += 1
        return self._keys.flatten(0, 1)[:, : self._length], self._values.flatten(0, 1)[:, : self._length]

    def select(self, count: int, source: Tensor, target: Tensor) -> None:
        """The rows at `source` take the places `target`; then the first `count` rows stay."""
        for part in (self._keys, self._values):
            part[target, :, : self._length] = part[source, :, : self._length]
        self._keys, self._values = self._keys[:count], self._values[:count]

    def get_seq_length(self) -> int:
        return self._before + self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is left to be done at the first update."""


def decoding_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    decoding: GrowingDecoding,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface. Without a function for masks beside it, transformers makes none."""
    refuse_extras(kwargs)
    query = query * (query.shape[3] ** -0.5 if scaling is None else scaling)
    return decoding.attend(module.layer_idx, query, key, value), None  # type: ignore[arg-type]


AttentionInterface.register(ATTENTION, decoding_attention)


def padding_scores(prompts: Prompts) -> Tensor | None:
    """(n, 1, P) to be added to the scores: -inf where there is no token; None where all prompts are equally long."""
    if prompts.mask.all():
        return None
    scores = torch.zeros(prompts.mask.shape, dtype=prompts.logits.dtype, device=prompts.mask.device)
    return scores.masked_fill(prompts.mask == 0, -torch.inf)[:, None]


def _grown(part: Tensor, tokens: int) -> Tensor:
    rows, heads, known, width = part.shape
    grown = part.new_empty(rows, heads, tokens, width)
    grown[:, :, :known] = part
    return grown
