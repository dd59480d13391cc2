"""A moving average of the policy's weights, which an iterative run takes for its reference.

It is kept in float32 on the CPU, whatever the model is in: bfloat16 would round most of a slow average's way off.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor
from transformers import PreTrainedModel

from policy_trainer.learner.weights import Weights
from policy_trainer.run_files.whole_directory import sync
from shared.models import load_model

Average = Mapping[str, Tensor]
"""float32 tensors by the names that the model has for its parameters; a tied weight once."""


def begin_average(weights: Weights) -> Average:
    """The policy's weights as they are."""
    return {name: _float32(parameter).clone() for name, parameter in weights.stepped.items()}


def average_of(directory: Path) -> Average:
    """A model's weights as they lie in its directory."""
    model = load_model(str(directory.resolve()), revision=None, device="cpu", dtype="float32")
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def move_average(average: Average, weights: Weights, decay: float) -> Average:
    """decay * average + (1 - decay) * policy, in tensors of their own; exactly the policy where both are the same."""
    return {name: average[name].lerp(_float32(parameter), 1 - decay) for name, parameter in weights.stepped.items()}


def averaged_state(model: PreTrainedModel, average: Average) -> dict[str, Tensor]:
    """The model's state with an average for its parameters, in their precision. What is tied stays one tensor."""
    replaced = {id(own): average[name].to(own.dtype) for name, own in model.named_parameters()}
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    return {name: replaced.get(id(own), own) for name, own in state.items()}


def write_average(checkpoint: Path, renewed_at: int, average: Average) -> None:
    """Into a checkpoint's directory, durably. A file for each renewal: one that a state names is never written over."""
    file = _file(checkpoint, renewed_at)
    if file.exists():
        return
    file.parent.mkdir(exist_ok=True)
    temporary = file.with_name(f".{file.name}.tmp")
    safetensors.torch.save_file(dict(average), temporary)
    shutil.copymode(checkpoint / "config.json", temporary)  # safetensors keeps it from every other user
    sync(temporary)
    temporary.replace(file)
    sync(file.parent)


def read_average(checkpoint: Path, renewed_at: int) -> Average | None:
    """None where the checkpoint was written without one."""
    file = _file(checkpoint, renewed_at)
    return safetensors.torch.load_file(file) if file.exists() else None


def _file(checkpoint: Path, renewed_at: int) -> Path:
    # In a directory of its own: some programs take every safetensors file beside a model for a part of it.
    return checkpoint / "reference" / f"average-{renewed_at:08d}.safetensors"


def _float32(parameter: Tensor) -> Tensor:
    return parameter.detach().to("cpu", torch.float32)
