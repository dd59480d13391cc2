"""Prefill: prompts are computed once, whatever the number of completions that follow them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shared.errors import UserError


@dataclass(frozen=True, eq=False)
class PrefilledPrompts:
    """n prompts after one forward, left-padded to P tokens so that all continue at the same column.

    logits: (n, V) of the first token after each prompt. cache: the transformers cache of their keys and values.
    mask: int64 (n, P), 1 for tokens, 0 for padding. positions: int64 (n, 1) of each prompt's last token.
    """

    logits: Tensor
    cache: Any
    mask: Tensor
    positions: Tensor

    def padding_bias(self) -> Tensor | None:
        """(n, 1, P) to add to attention scores: -inf at padding. None where all prompts are equally long."""
        if self.mask.all():
            return None
        bias = torch.zeros(self.mask.shape, dtype=self.logits.dtype, device=self.mask.device)
        return bias.masked_fill(self.mask == 0, -torch.inf)[:, None]


def prefill(model: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> PrefilledPrompts:
    """Raises UserError for a model without a key-value cache."""
    device, width = model.device, max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    ids, mask = ids.to(device), mask.to(device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    output = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1)
    cache = getattr(output, "past_key_values", None)
    if cache is None:
        raise UserError(f"model: {type(model).__name__} keeps no key-value cache to sample with")
    return PrefilledPrompts(output.logits[:, -1], cache, mask, positions[:, -1:])
