"""Adapters for an engine that computes with one set of weights: each version is merged into them."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from policy_trainer.adapters.adapter import read_adapter
from shared.errors import UserError


class MergedAdapters:
    """Merges one adapter after another into a model's weights.

    Each is merged with the base model's values, which are kept in main memory: adding to the weights in use and
    subtracting again would drift.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """model: with the weights of the base model."""
        self._model = model
        self._base: dict[str, Tensor] = {}

    @torch.no_grad()
    def load(self, directory: Path) -> None:
        """Raises OSError if the adapter cannot be read, UserError if it does not fit."""
        changes = read_adapter(directory)
        weights = self._model.state_dict()
        for name, change in changes.items():
            shape = weights[name].shape if name in weights else None
            if shape != change.shape:
                raise UserError(
                    f"model: the run's adapters do not fit this model: {name} would be {tuple(change.shape)}, and is "
                    f"{tuple(shape) if shape else 'not there'}: give the base model that the run trains adapters of"
                )
            if name not in self._base:
                self._base[name] = weights[name].to("cpu", copy=True)
        for name, base in self._base.items():
            change = changes.get(name)
            weights[name].copy_(base if change is None else change.merged(base.to(weights[name].device)))
