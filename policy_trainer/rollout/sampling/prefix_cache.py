"""Prompts that begin alike, such as with a system prompt, tools and solved examples: what all begin with is computed
once."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from policy_trainer.data.prompts import EncodedPrompt
from policy_trainer.rollout.sampling.kv_cache import PrefilledPrompts, forward_with_cache, prefill

# Shorter prefixes are not worth a forward of their own.
_SHORTEST = 32


class _Prefix(NamedTuple):
    ids: list[int]
    cache: Any  # DynamicCache


class PrefixCache:
    """Prefills the prompts of one running batch, those too that join later: rows whose tools have answered begin with
    the prompts of the first ones."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        # What all prompts so far begin with, without the last token of any, which gives the logits; None before the
        # first, empty for a model that cannot go on from a prefix.
        self._common: list[int] | None = None
        self._prefix: _Prefix | None = None

    def prefill(self, prompts: Sequence[EncodedPrompt]) -> PrefilledPrompts:
        prefix = self._prefix = self._prefix or self._look_for_one(prompts)
        if prefix and all(_begins(prompt.ids, prefix.ids) for prompt in prompts):
            return self._continued(prompts, prefix)
        return prefill(self._model, prompts, None)

    def _look_for_one(self, prompts: Sequence[EncodedPrompt]) -> _Prefix | None:
        first = self._common is None and len(prompts) == 1  # nothing is known to follow it
        before = [] if self._common is None else [self._common]
        self._common = ids = _common([*before, *(prompt.ids[:-1] for prompt in prompts)])
        if first or len(ids) < _SHORTEST:
            return None
        cache = prefill(self._model, [EncodedPrompt(ids)], None).cache
        # Windows count columns, and states follow from all tokens: neither could have gaps between the tokens.
        if isinstance(cache, DynamicCache) and all(type(layer) is DynamicLayer for layer in cache.layers):
            return _Prefix(ids, cache)
        self._common = []
        return None

    def _continued(self, prompts: Sequence[EncodedPrompt], prefix: _Prefix) -> PrefilledPrompts:
        """As `prefill`, of whose tokens it computes those after the prefix."""
        shared, cache = len(prefix.ids), deepcopy(prefix.cache)
        device = self._model.device
        width = max(map(len, prompts)) - shared
        gaps = torch.tensor([shared + width - len(prompt) for prompt in prompts])
        ids = torch.tensor(
            [[0] * gap + prompt.ids[shared:] for gap, prompt in zip(gaps.tolist(), prompts, strict=True)]
        )
        columns = torch.arange(shared + width)
        mask = ~((columns >= shared) & (columns < shared + gaps[:, None]))
        places = (columns[shared:] - gaps[:, None]).clamp(min=0)
        cache.batch_select_indices(torch.zeros(len(prompts), dtype=torch.long, device=device))
        output = forward_with_cache(
            self._model, ids.to(device), mask.long().to(device), places.to(device), past_key_values=cache
        )
        if gaps.any():
            source = torch.where(columns < shared + gaps[:, None], (columns - gaps[:, None]).clamp(min=0), columns)
            for layer in cache.layers:
                layer.keys, layer.values = (_moved(part, source.to(device)) for part in (layer.keys, layer.values))
        mask = (columns >= gaps[:, None]).long().to(device)
        return PrefilledPrompts(output.logits[:, -1], cache, mask, places[:, -1:].to(device), "past_key_values")


def _begins(ids: list[int], prefix: list[int]) -> bool:
    return len(ids) > len(prefix) and ids[: len(prefix)] == prefix


def _common(sequences: Sequence[list[int]]) -> list[int]:
    """What all begin with."""
    first = sequences[0]
    for other in sequences[1:]:
        pairs = enumerate(zip(first, other, strict=False))
        first = first[: next((place for place, (a, b) in pairs if a != b), min(len(first), len(other)))]
    return first


def _moved(part: Tensor, source: Tensor) -> Tensor:
    """(n, K, P, D) whose columns come from the columns `source`, int64 (n, P)."""
    return part.gather(2, source[:, None, :, None].expand(-1, part.shape[1], -1, part.shape[3]))
