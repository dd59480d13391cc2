"""An adapter in peft's format, merged into the weights of a model or added to what its layers compute. Hu et al.,
arXiv 2106.09685."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from policy_trainer.weights.quantised import original_shape, quantised_layers
from shared.errors import UserError
from shared.models import ADAPTER_CONFIG

WEIGHTS = "adapter_model.safetensors"
# How peft begins the names of a causal LM's layers.
_PREFIX = "base_model.model."
# Of peft's settings those that change what an adapter adds to a layer.
_OTHER_METHODS = ("use_dora", "use_rslora", "use_qalora", "use_bdlora", "rank_pattern", "alpha_pattern", "lora_bias")


class OtherMethod(UserError):
    """An adapter that adds something other than B A to linear layers."""


@dataclass(frozen=True, eq=False)
class LowRank:
    """What an adapter adds to a layer's weight: scale * B A.

    a: (r, in). b: (out, r). transposed: the weight is (in, out), as GPT-2's are, and not (out, in).
    """

    a: Tensor
    b: Tensor
    scale: float
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight."""
        out, into = len(self.b), self.a.shape[1]
        return (into, out) if self.transposed else (out, into)

    def merged(self, weight: Tensor) -> Tensor:
        """A new float32 tensor, on the weight's device: to be rounded once, and never to be merged into again."""
        added = self.b.to(weight.device).float() @ self.a.to(weight.device).float()
        return weight.float().add(added.T if self.transposed else added, alpha=self.scale)

    def to(self, layer: nn.Linear) -> "LowRank":
        """With matrices on the layer's device."""
        where = layer.weight.device
        return replace(self, a=self.a.to(where), b=self.b.to(where))

    def add(self, layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        """A forward hook: (..., out), to the bit what peft's layer computes of (..., in)."""
        added = F.linear(F.linear(inputs[0].to(self.a.dtype), self.a), self.b) * self.scale
        return output + added.to(output.dtype)


def read_adapter(directory: Path) -> Mapping[str, LowRank]:
    """What it adds, by the names of the weights in the model's state_dict; in main memory, in the file's precision.

    Raises OSError if it cannot be read, OtherMethod for an adapter that adds something other than B A to linear layers.
    """
    config: dict[str, Any] = json.loads((directory / ADAPTER_CONFIG).read_text())
    tensors = safetensors.torch.load_file(directory / WEIGHTS)
    layers = {name.partition(".lora_")[0] for name in tensors}
    parts = {layer: (f"{layer}.lora_A.weight", f"{layer}.lora_B.weight") for layer in sorted(layers)}
    unknown = sorted(tensors.keys() - {name for pair in parts.values() for name in pair})
    if other := [*(name for name in _OTHER_METHODS if config.get(name)), *unknown]:
        raise OtherMethod(
            f"model: {directory} is an adapter with {other[0]}, which cannot be merged: only plain LoRA can"
        )
    scale = config["lora_alpha"] / config["r"]
    transposed = bool(config.get("fan_in_fan_out"))
    return {
        f"{layer.removeprefix(_PREFIX)}.weight": LowRank(tensors[a], tensors[b], scale, transposed)
        for layer, (a, b) in parts.items()
    }


class MergedAdapters:
    """Merges one version of an adapter after another into a model's weights.

    Each is merged into the base model's values, which are kept in main memory: adding to the weights in use and
    subtracting again would accumulate rounding errors.
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
            _check_fit(name, change, tuple(weights[name].shape) if name in weights else None)
            if name not in self._base:
                self._base[name] = weights[name].to("cpu", copy=True)
        for name, base in self._base.items():
            change = changes.get(name)
            weights[name].copy_(base if change is None else change.merged(base.to(weights[name].device)))


class AddedAdapters:
    """Adds one version of an adapter after another to what the layers of a model in 4 bits compute.

    Nothing can be merged into their weights without quantising them again.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._layers = quantised_layers(model)
        self._hooks: list[RemovableHandle] = []

    def load(self, directory: Path) -> None:
        """Raises OSError if the adapter cannot be read, UserError if it does not fit."""
        changes = read_adapter(directory)
        for name, change in changes.items():
            layer = self._layers.get(name.removesuffix(".weight"))
            _check_fit(name, change, None if layer is None else original_shape(layer))
        while self._hooks:
            self._hooks.pop().remove()
        for name, change in changes.items():
            layer = self._layers[name.removesuffix(".weight")]
            self._hooks.append(layer.register_forward_hook(change.to(layer).add))


def _check_fit(name: str, change: LowRank, shape: tuple[int, ...] | None) -> None:
    """shape: of the model's weight `name`; None if it has none."""
    if shape != change.shape:
        raise UserError(
            f"model: the run's adapters do not fit this model: {name} would be {change.shape}, and is "
            f"{shape or 'not there'}",
            "give the base model that the run trains adapters of",
        )
