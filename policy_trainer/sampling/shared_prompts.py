"""Decoding in which a prompt's keys and values are held once for its whole group, and attended to once a group.

So a step neither copies nor reads a prompt G times. Attention over two parts as in Hydragen (Juravsky et al., 2024).
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from policy_trainer.sampling.decoding import Prompts
from policy_trainer.sampling.grid import Grid
from policy_trainer.sampling.growing import Growing, GrowingDecoding, padding_scores


class SharedPrompts(GrowingDecoding):
    def __init__(self, model: PreTrainedModel, prompts: Prompts, num_generations: int) -> None:
        self._groups = torch.arange(len(prompts.positions), device=model.device).repeat_interleave(num_generations)
        self._prompts = [_Prompt(layer.keys, layer.values) for layer in prompts.cache.layers]
        width = prompts.mask.shape[1]
        super().__init__(
            model,
            prompts.positions[self._groups],
            [Growing(*_no_tokens(layer, len(self._groups)), before=width) for layer in self._prompts],
        )
        self._padding = padding_scores(prompts)
        self._grids = self._lay_out()

    def select(self, places: Tensor) -> None:
        super().select(places)
        prompts, self._groups = self._groups[places].unique(return_inverse=True)
        for prompt in self._prompts:
            prompt.select(prompts)
        if self._padding is not None:
            self._padding = self._padding[prompts]
        self._grids = self._lay_out()

    def _lay_out(self) -> dict[int, Grid]:
        """A grid for each number of key heads that a layer has."""
        return {heads: Grid(self._groups, heads) for heads in {prompt.heads for prompt in self._prompts}}

    def attend(self, index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        prompt = self._prompts[index]
        grid = self._grids[prompt.heads]
        rows, heads, _, width = query.shape
        query = query.reshape(len(key), -1, width)  # the query heads of a key head stand side by side
        prompt_scores = torch.bmm(grid.spread(query), prompt.keys.transpose(1, 2))
        if self._padding is not None:
            prompt_scores.view(len(self._padding), -1, prompt_scores.shape[2]).add_(self._padding)
        own_scores = torch.bmm(query, key.transpose(1, 2))
        scores = torch.cat([grid.collect(prompt_scores), own_scores], dim=2)
        weights = scores.softmax(dim=2, dtype=torch.float32).to(value.dtype)
        of_prompt, of_own = weights.split([prompt_scores.shape[2], own_scores.shape[2]], dim=2)
        from_prompt = grid.collect(torch.bmm(grid.spread(of_prompt), prompt.values))
        return torch.baddbmm(from_prompt, of_own, value).view(rows, 1, heads, -1)


class _Prompt:
    """Keys and values of one layer for the prompts, (n K, P, D)."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.heads = keys.shape[1]
        self.keys, self.values = keys.flatten(0, 1), values.flatten(0, 1)

    def select(self, prompts: Tensor) -> None:
        if len(prompts) * self.heads < len(self.keys):
            self.keys = self.keys.unflatten(0, (-1, self.heads))[prompts].flatten(0, 1)
            self.values = self.values.unflatten(0, (-1, self.heads))[prompts].flatten(0, 1)


def _no_tokens(prompt: _Prompt, rows: int) -> tuple[Tensor, Tensor]:
    """Keys and values (B, K, 0, D) of rows that have sampled nothing."""
    keys, values = (part.new_empty(rows, prompt.heads, 0, part.shape[2]) for part in (prompt.keys, prompt.values))
    return keys, values
