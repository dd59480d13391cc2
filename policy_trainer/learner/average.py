"""A moving average of the policy's weights, from which a run can update its reference.

It is float32 on the CPU, whatever the model's dtype: bfloat16 would round away most updates of a slow average.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from policy_trainer.learner.optimizer import Weights
from shared.models import load_model

Average = Mapping[str, Tensor]
"""float32 tensors by parameter name; a tied weight once."""


def begin_average(weights: Weights) -> Average:
    """A copy of the policy's current weights."""
    return {name: _float32(parameter).clone() for name, parameter in weights.stepped.items()}


def average_of(directory: Path) -> Average:
    """The weights of a saved model."""
    model = load_model(str(directory.resolve()), revision=None, device="cpu", dtype="float32")
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def move_average(average: Average, weights: Weights, decay: float) -> Average:
    """decay * average + (1 - decay) * policy, in new tensors; exactly the policy where both are equal."""
    return {name: average[name].lerp(_float32(parameter), 1 - decay) for name, parameter in weights.stepped.items()}


def averaged_state(model: PreTrainedModel, average: Average) -> dict[str, Tensor]:
    """The model's state dict with the average for its parameters, in their dtype. Tied weights stay one tensor."""
    replaced = {id(own): average[name].to(own.dtype) for name, own in model.named_parameters()}
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    return {name: replaced.get(id(own), own) for name, own in state.items()}


def _float32(parameter: Tensor) -> Tensor:
    return parameter.detach().to("cpu", torch.float32)
