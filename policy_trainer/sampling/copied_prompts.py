"""Decoding in which each row has a copy of its prompt's keys and values: the quickest where prompts are short."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from policy_trainer.sampling.decoding import Prompts
from policy_trainer.sampling.growing import Growing, GrowingDecoding, padding_scores


class CopiedPrompts(GrowingDecoding):
    def __init__(self, model: PreTrainedModel, prompts: Prompts, num_generations: int) -> None:
        def copied(part: Tensor) -> Tensor:
            return part.repeat_interleave(num_generations, 0)

        layers = [Growing(copied(layer.keys), copied(layer.values)) for layer in prompts.cache.layers]
        super().__init__(model, copied(prompts.positions), layers)
        padding = padding_scores(prompts)
        self._padding = None if padding is None else copied(padding)

    def select(self, places: Tensor) -> None:
        super().select(places)
        if self._padding is not None:
            self._padding = self._padding[places]

    def attend(self, index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows, heads, _, width = query.shape
        scores = torch.bmm(query.reshape(len(key), -1, width), key.transpose(1, 2))
        if self._padding is not None:
            scores.view(rows, heads, -1)[:, :, : self._padding.shape[2]].add_(self._padding)
        weights = scores.softmax(dim=2, dtype=torch.float32).to(value.dtype)
        return torch.bmm(weights, value).view(rows, 1, heads, -1)
