"""Computing completions token by token, from prompts that were computed once for their groups."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shared.errors import UserError


@dataclass(frozen=True, eq=False)
class Prompts:
    """n prompts, left-padded to P tokens so that all continue at the same column, and computed.

    logits: (n, V) of the first token after each. cache: their keys and values, as transformers keeps them.
    mask: int64 (n, P), 1 where a token counts. positions: int64 (n, 1) of each prompt's last token.
    """

    logits: Tensor
    cache: Any
    mask: Tensor
    positions: Tensor


class Decoding(Protocol):
    """Rows in the order of their prompts, num_generations for each; some of them leave, none ever joins.

    attention: the name of the attention that the model must have meanwhile.
    """

    attention: str

    def select(self, places: Tensor) -> None:
        """Only the rows at these (B,) places stay, in this order."""
        ...

    def advance(self, tokens: Tensor) -> Tensor:
        """(B,) tokens, one for each row -> (B, V) the logits that come next."""
        ...


def compute_prompts(model: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> Prompts:
    """Raises UserError for a model that keeps no keys and values."""
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
    return Prompts(output.logits[:, -1], cache, mask, positions[:, -1:])


class RepeatedPrompts:
    """Each row has a copy of its prompt's keys and values, in transformers' own cache: right for every architecture."""

    def __init__(self, model: PreTrainedModel, prompts: Prompts, num_generations: int) -> None:
        self.attention: str = model.config._attn_implementation  # type: ignore[assignment]
        self._model = model
        self._cache = prompts.cache
        self._cache.batch_repeat_interleave(num_generations)
        self._mask = prompts.mask.repeat_interleave(num_generations, 0)
        self._positions = prompts.positions.repeat_interleave(num_generations, 0)

    def select(self, places: Tensor) -> None:
        self._cache.batch_select_indices(places)
        self._mask, self._positions = self._mask[places], self._positions[places]

    def advance(self, tokens: Tensor) -> Tensor:
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=1)
        self._positions = self._positions + 1
        output = self._model(
            input_ids=tokens[:, None],
            attention_mask=self._mask,
            position_ids=self._positions,
            past_key_values=self._cache,
            use_cache=True,
        )
        self._cache = output.past_key_values
        return output.logits[:, -1]
