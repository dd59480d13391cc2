"""Attention over a packed sequence, through transformers' attention interface.

Each prompt attends to itself, each completion to its prompt and itself, both causally. What else a layer's mask leaves
out (a window, chunks) is asked of the model's mask function, by the tokens' places in their rows.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

from shared.logprobs.layout import PackedLayout

PACKED_ATTENTION = "tandem_packed"
# For models whose other forwards need their eager attention, as SDPA has no sinks and no cap on scores.
PACKED_ATTENTION_EAGER = "tandem_packed_eager"


@dataclass(frozen=True, eq=False)
class Bounds:
    """Which of the tokens before it a token attends to, in layers where that is not all of them.

    size: in tokens; a token attends to none that is `size` or more tokens before it. visible: whether tokens at some
    places of a row attend to tokens at others, int64 tensors that are broadcast. images: whether the tokens of an image
    attend to each other in both directions, within the bounds.
    """

    size: int
    visible: Callable[[Tensor, Tensor], Tensor]
    images: bool = False

    @classmethod
    def window(cls, size: int, images: bool = False) -> "Bounds":
        return cls(size, lambda query, key: query - key < size, images)

    def __getitem__(self, places: tuple[slice, ...]) -> "Bounds":
        """Gemma 4 slices the masks of its last layers, to the tokens whose logits are wanted: here to all."""
        if any(place.indices(sys.maxsize) != (0, sys.maxsize, 1) for place in places):
            raise NotImplementedError("this model computes some tokens of a packed sequence only")
        return self

    @property
    def slides(self) -> bool:
        """True for a window that moves with the token, False for chunks at fixed places: only a window of n tokens ends
        between tokens 0 and 1 for token n."""
        return bool(self.visible(torch.tensor(self.size), torch.tensor(1)))


@dataclass(frozen=True)
class AttentionKind:
    """How a layer's attention differs from the plain one.

    softcap: scores become softcap * tanh(scores / softcap), as in Gemma 2. sinks: whether each head has a score that
    takes part in the softmax and has no value, as in GPT-OSS.
    """

    bounds: Bounds | None = None
    softcap: float | None = None
    sinks: bool = False


class SpanAttention(Protocol):
    """Attention of one kind over the spans of one packed layout, built once per forward."""

    def __init__(
        self, layout: PackedLayout, *, dtype: torch.dtype, device: torch.device, kind: AttentionKind
    ) -> None: ...

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        dropout: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """(N, H, D) queries, (N, K, D) keys and (N, K, E) values, H a multiple of K -> (N, H, E).

        scale: None for the default. sinks: (H,), if the kind has them.
        """
        ...


class Packing:
    """What the model's masks and layers look up in a packed forward: the layout, and attention over it."""

    def __init__(self, layout: PackedLayout, attention: type[SpanAttention], dtype: torch.dtype) -> None:
        self.layout = layout
        self.forked: set[nn.Module] = set()  # the modules with a state that were computed
        self._longest = layout.longest_row
        # Made when the first layer of a kind asks on a device.
        self._made = cache(lambda kind, device: attention(layout, dtype=dtype, device=device, kind=kind))

    def attention(self, kind: AttentionKind, device: torch.device) -> SpanAttention:
        bounds = kind.bounds
        if bounds and bounds.size >= self._longest and not bounds.images:  # no row is long enough to notice
            kind = AttentionKind(None, kind.softcap, kind.sinks)
        return self._made(kind, device)


_packing: ContextVar[Packing | None] = ContextVar("packing", default=None)


class PackingContext(AbstractContextManager[None]):
    """Within it, the model computes the packed forward of this packing; None: a forward that is not packed."""

    def __init__(self, packing: Packing | None) -> None:
        self._packing = packing

    def __enter__(self) -> None:
        self._token = _packing.set(self._packing)

    def __exit__(self, *exception: object) -> None:
        _packing.reset(self._token)


def current_packing() -> Packing | None:
    """That of the packed forward that runs; None outside of one."""
    return _packing.get()


def packing_of_checkpoint() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """As `context_fn` of torch.utils.checkpoint: layers that are computed again after the forward find its packing."""
    return nullcontext(), PackingContext(current_packing())


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface: (1, H, N, D) queries -> (1, N, H, E).

    Outside of a packed forward it is what the model used before, so that it can still generate. attention_mask: of
    `packed_mask`. options: `scaling`, `dropout` and whatever else the model passes to its attention.
    """
    packing = current_packing()
    if packing is None:
        if attention_name(module.config) == PACKED_ATTENTION_EAGER:  # type: ignore[arg-type]
            eager = sys.modules[type(module).__module__].eager_attention_forward
            return eager(module, query, key, value, attention_mask, **options)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if isinstance(attention_mask, Tensor):
        raise NotImplementedError("this model's attention mask is not known")
    sinks = options.pop("s_aux", None)
    kind = AttentionKind(attention_mask, options.pop("softcap", None), sinks is not None)
    refuse_extras(options)
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    attention = packing.attention(kind, query.device)
    scale, dropout = options.get("scaling"), options.get("dropout", 0.0)
    return attention(query, key, value, scale, dropout, sinks)[None], None


def packed_mask(
    *,
    mask_function: Callable[..., Any] = causal_mask_function,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **options: Any,
) -> Any:
    """transformers' mask interface: `Bounds`, or None where a token attends to all before it.

    Outside of a packed forward it is the mask that the model used before. local_size: of a sliding window or of chunks.
    """
    packing, config = current_packing(), options["config"]
    if packing is None:
        make = eager_mask if attention_name(config) == PACKED_ATTENTION_EAGER else sdpa_mask
        skip = {"allow_is_causal_skip": allow_is_causal_skip}
        return make(mask_function=mask_function, local_size=local_size, **skip, **options)
    layout = packing.layout
    if layout.images is not None and not allow_is_causal_skip:  # tokens of images are added to the mask
        window = getattr(config, "sliding_window", None) or layout.tokens
        if window < layout.tokens and not mask_function(0, 0, torch.tensor(window), torch.tensor(0)):
            return Bounds.window(window, images=True)
        return Bounds.window(layout.tokens, images=True) if (layout.images >= 0).any() else None
    return bounds_of(mask_function, local_size, skip=allow_is_causal_skip)


def bounds_of(mask_function: Callable[..., Any], local_size: int | None, *, skip: bool) -> Bounds | None:
    """From what transformers tells its mask interface. skip: whether nothing is added to the mask of a causal window.

    Raises NotImplementedError for other masks.
    """
    if mask_function is causal_mask_function:
        return None
    if local_size is None or not skip:
        raise NotImplementedError("this model's attention mask is not known")
    return Bounds(local_size, lambda query, key: mask_function(0, 0, query, key))


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Sets the attention implementation of the language model; a vision tower keeps its own."""
    whole = model.config.get_text_config() is model.config
    model.set_attn_implementation(name if whole else {"text_config": name})


def pack_attention(model: PreTrainedModel) -> None:
    """Has the model use `packed_attention`; other forwards than packed ones stay as they are."""
    before = attention_of(model)
    if before not in (PACKED_ATTENTION, PACKED_ATTENTION_EAGER):
        set_attention(model, PACKED_ATTENTION_EAGER if before == "eager" else PACKED_ATTENTION)


def attention_of(model: PreTrainedModel) -> str:
    """The name of the language model's attention implementation."""
    return attention_name(model.config.get_text_config())


def attention_name(config: PretrainedConfig) -> str:
    return config._attn_implementation  # type: ignore[return-value]


def refuse_extras(options: dict[str, Any]) -> None:
    """Raises NotImplementedError for attention options of some models that plain attention would ignore."""
    names = "softcap", "s_aux", "sinks", "position_bias", "indices", "block_indices"
    unknown = [name for name in names if options.get(name) is not None]
    if unknown:
        raise NotImplementedError(f"plain attention has no {', '.join(unknown)}")


for _name in (PACKED_ATTENTION, PACKED_ATTENTION_EAGER):
    AttentionInterface.register(_name, packed_attention)
    AttentionMaskInterface.register(_name, packed_mask)
