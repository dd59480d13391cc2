"""Decoding in which a prompt's keys and values are held once for its whole group, and attended to once a group.

The rows' own keys and values grow in place. So a step neither copies nor reads a prompt G times, and it needs no mask
but that of the prompts' padding, since all rows have sampled equally many tokens. Attention over the two parts as in
Hydragen (Juravsky et al., 2024).
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from policy_trainer.sampling.decoding import Prompts
from policy_trainer.sampling.grid import Grid
from shared.logprobs import attends_fully
from shared.logprobs.attention import refuse_extras

ATTENTION = "tandem_shared_prompts"
# Tokens that the rows' keys and values have room for at first; when it is full it grows by half.
_ROOM = 32


def can_share(model: PreTrainedModel) -> bool:
    """Whether every layer attends to all tokens, through an attention function that transformers lets us choose."""
    return getattr(model, "_supports_attention_backend", False) and attends_fully(model)


class SharedPrompts:
    """Decodes models of which can_share is true."""

    attention = ATTENTION

    def __init__(self, model: PreTrainedModel, prompts: Prompts, group_size: int) -> None:
        self._model = model
        self._groups = torch.arange(len(prompts.positions), device=model.device).repeat_interleave(group_size)
        self._positions = prompts.positions[self._groups]
        self._padding = _padding(prompts)
        self._layers: list[Any] = [
            _Layer(layer.keys, layer.values, len(self._groups)) for layer in prompts.cache.layers
        ]
        self._cache = Cache(layers=self._layers)
        self._grids = self._lay_out()

    def select(self, places: Tensor) -> None:
        prompts, self._groups = self._groups[places].unique(return_inverse=True)
        self._positions = self._positions[places]
        moved = (places != torch.arange(len(places), device=places.device)).nonzero()[:, 0]
        for layer in self._layers:
            layer.select_rows(len(places), places[moved], moved)
            layer.select_prompts(prompts)
        if self._padding is not None:
            self._padding = self._padding[prompts]
        self._grids = self._lay_out()

    def _lay_out(self) -> dict[int, Grid]:
        """A grid for each number of key heads that a layer has."""
        return {heads: Grid(self._groups, heads) for heads in {layer.heads for layer in self._layers}}

    def advance(self, tokens: Tensor) -> Tensor:
        self._positions = self._positions + 1
        output = self._model(
            input_ids=tokens[:, None],
            position_ids=self._positions,
            past_key_values=self._cache,
            use_cache=True,
            shared_prompts=self,
        )
        return output.logits[:, -1]

    def attend(self, index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Scaled queries (B, H, 1, D), and keys and values (B K, T, D) of the rows' own T tokens -> (B, 1, H, D)."""
        layer = self._layers[index]
        grid = self._grids[layer.heads]
        rows, heads, _, width = query.shape
        query = query.reshape(len(key), -1, width)  # the query heads of a key head stand side by side
        prompt_scores = torch.bmm(grid.spread(query), layer.prompt_keys.transpose(1, 2))
        if self._padding is not None:
            prompt_scores.view(len(self._padding), -1, prompt_scores.shape[2]).add_(self._padding)
        own_scores = torch.bmm(query, key.transpose(1, 2))
        scores = torch.cat([grid.collect(prompt_scores), own_scores], dim=2)
        weights = scores.softmax(dim=2, dtype=torch.float32).to(value.dtype)
        of_prompt, of_own = weights.split([prompt_scores.shape[2], own_scores.shape[2]], dim=2)
        from_prompt = grid.collect(torch.bmm(grid.spread(of_prompt), layer.prompt_values))
        return torch.baddbmm(from_prompt, of_own, value).view(rows, 1, heads, -1)


class _Layer(CacheLayerMixin):
    """Keys and values of one layer: (n K, P, D) of the prompts, and of the rows (B, K, T, D), with room to grow."""

    def __init__(self, prompt_keys: Tensor, prompt_values: Tensor, rows: int) -> None:
        super().__init__()
        self.heads = prompt_keys.shape[1]
        self.prompt_keys, self.prompt_values = prompt_keys.flatten(0, 1), prompt_values.flatten(0, 1)
        self._keys, self._values = (_room(part, rows, _ROOM) for part in (prompt_keys, prompt_values))
        self.is_initialized = True
        self._length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Takes the next token's (B, K, 1, D) and returns (B K, T, D), which our attention alone is given."""
        if self._length == self._keys.shape[2]:
            self._keys, self._values = _grown(self._keys), _grown(self._values)
        self._keys[:, :, self._length] = key_states[:, :, 0]
        self._values[:, :, self._length] = value_states[:, :, 0]
        self._length += 1
        return self._keys.flatten(0, 1)[:, : self._length], self._values.flatten(0, 1)[:, : self._length]

    def select_rows(self, count: int, source: Tensor, target: Tensor) -> None:
        """The rows at `source` take the places `target`; then the first `count` rows stay."""
        for part in (self._keys, self._values):
            part[target, :, : self._length] = part[source, :, : self._length]
        self._keys, self._values = self._keys[:count], self._values[:count]

    def select_prompts(self, prompts: Tensor) -> None:
        if len(prompts) * self.heads < len(self.prompt_keys):
            self.prompt_keys = self.prompt_keys.unflatten(0, (-1, self.heads))[prompts].flatten(0, 1)
            self.prompt_values = self.prompt_values.unflatten(0, (-1, self.heads))[prompts].flatten(0, 1)

    def get_seq_length(self) -> int:
        return self.prompt_keys.shape[1] + self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is left to be done at the first update."""


def shared_prompts_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    shared_prompts: SharedPrompts,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface. Without a function for masks beside it, transformers makes none."""
    refuse_extras(kwargs)
    query = query * (query.shape[3] ** -0.5 if scaling is None else scaling)
    return shared_prompts.attend(module.layer_idx, query, key, value), None  # type: ignore[arg-type]


AttentionInterface.register(ATTENTION, shared_prompts_attention)


def _padding(prompts: Prompts) -> Tensor | None:
    """(n, 1, P) to be added to the scores: -inf where there is no token; None where all prompts are equally long."""
    if prompts.mask.all():
        return None
    scores = torch.zeros(prompts.mask.shape, dtype=prompts.logits.dtype, device=prompts.mask.device)
    return scores.masked_fill(prompts.mask == 0, -torch.inf)[:, None]


def _room(like: Tensor, rows: int, tokens: int) -> Tensor:
    return like.new_empty(rows, like.shape[1], tokens, like.shape[3])


def _grown(part: Tensor) -> Tensor:
    rows, _, tokens, _ = part.shape
    grown = _room(part, rows, tokens + tokens // 2)
    grown[:, :, :tokens] = part
    return grown
