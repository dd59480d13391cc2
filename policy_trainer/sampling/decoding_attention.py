"""Decoding with a custom attention function, over keys and values that grow in place.

All rows have sampled equally many tokens, so the only mask is that of the prompts' padding.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, PreTrainedModel

from policy_trainer.sampling.kv_cache import GrowableLayer
from shared.logprobs import attends_fully
from shared.logprobs.attention import refuse_extras

ATTENTION = "tandem_decoding"


def supports_decoding_attention(model: PreTrainedModel) -> bool:
    """Whether every layer attends to all tokens, through transformers' attention interface."""
    return getattr(model, "_supports_attention_backend", False) and attends_fully(model)


class AttentionDecoder(ABC):
    """A Decoder for models that support decoding attention. layers: the rows' keys and values."""

    attention = ATTENTION

    def __init__(self, model: PreTrainedModel, positions: Tensor, layers: list[GrowableLayer]) -> None:
        """positions: int64 (B, 1) of each row's last token."""
        self._model = model
        self._positions = positions
        self._layers: list[Any] = [*layers]
        self._cache = Cache(layers=self._layers)

    def select(self, rows: Tensor) -> None:
        self._positions = self._positions[rows]
        moved = (rows != torch.arange(len(rows), device=rows.device)).nonzero()[:, 0]
        for layer in self._layers:
            layer.select(len(rows), rows[moved], moved)

    def step(self, tokens: Tensor) -> Tensor:
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
