"""Attention over a packed sequence, through transformers' attention interface.

Each prompt attends to itself, each completion to its prompt and itself, both causally.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

PACKED_ATTENTION = "tandem_packed"


# Attention over the spans of one packed layout, built once per forward: (N, H, D) queries, (N, K, D) keys and (N, K, E)
# values, H a multiple of K; scale, or None for the default; dropout -> (N, H, E).
SpanAttention = Callable[[Tensor, Tensor, Tensor, float | None, float], Tensor]


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    span_attention: SpanAttention | None = None,
    longest_row: int = 0,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: (1, H, N, D) queries -> (1, N, H, E).

    Without a `span_attention` it is plain SDPA, so that the model can still generate. longest_row: of the layout, in
    tokens: a sliding window at least this long changes nothing. options: `scaling`, `dropout` and whatever else the
    model passes to its attention.
    """
    if span_attention is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    refuse_extras(options)
    if (options.get("sliding_window") or longest_row) < longest_row:
        raise NotImplementedError("packed attention has no sliding_window")
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    return span_attention(query, key, value, options.get("scaling"), options.get("dropout", 0.0))[None], None


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Sets the attention implementation of the language model; a vision tower keeps its own."""
    whole = model.config.get_text_config() is model.config
    model.set_attn_implementation(name if whole else {"text_config": name})


def attention_of(model: PreTrainedModel) -> str:
    """The name of the language model's attention implementation."""
    return model.config.get_text_config()._attn_implementation  # type: ignore[return-value]


def refuse_extras(options: dict[str, Any]) -> None:
    """Raises NotImplementedError for attention options of some models that plain attention would ignore."""
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None]
    if unknown:
        raise NotImplementedError(f"plain attention has no {', '.join(unknown)}")


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)
