"""An adapter in peft's format, and the weights of a model with it merged in. Hu et al., arXiv 2106.09685."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from shared.errors import UserError
from shared.models import ADAPTER_CONFIG

WEIGHTS = "adapter_model.safetensors"
# How peft begins the names of a causal LM's layers.
_PREFIX = "base_model.model."
# Of peft's settings those that change what an adapter adds to a layer.
_OTHER_METHODS = ("use_dora", "use_rslora", "use_qalora", "use_bdlora", "rank_pattern", "alpha_pattern", "lora_bias")


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


def read_adapter(directory: Path) -> Mapping[str, LowRank]:
    """What it adds, by the names of the weights in the model's state_dict; in main memory, in the file's precision.

    Raises OSError if it cannot be read, UserError for an adapter that adds something else than B A to linear layers.
    """
    config: dict[str, Any] = json.loads((directory / ADAPTER_CONFIG).read_text())
    tensors = safetensors.torch.load_file(directory / WEIGHTS)
    layers = {name.partition(".lora_")[0] for name in tensors}
    parts = {layer: (f"{layer}.lora_A.weight", f"{layer}.lora_B.weight") for layer in sorted(layers)}
    unknown = sorted(tensors.keys() - {name for pair in parts.values() for name in pair})
    if other := [*(name for name in _OTHER_METHODS if config.get(name)), *unknown]:
        raise UserError(
            f"model: {directory} is an adapter with {other[0]}, which cannot be merged: only plain LoRA can"
        )
    scale = config["lora_alpha"] / config["r"]
    transposed = bool(config.get("fan_in_fan_out"))
    return {
        f"{layer.removeprefix(_PREFIX)}.weight": LowRank(tensors[a], tensors[b], scale, transposed)
        for layer, (a, b) in parts.items()
    }
