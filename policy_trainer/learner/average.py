"""A moving average of the policy's weights, from which a run can update its reference.

It is float32 on the CPU, whatever the model's dtype: bfloat16 would round away most updates of a slow average.
"""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from shared.models import load_model

Average = Mapping[str, Tensor]
"""float32 tensors by parameter name; a tied weight once."""


def average_of(directory: Path) -> Average:
    """The weights of a saved model."""
    model = load_model(str(directory.resolve()), revision=None, device="cpu", dtype="float32")
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def move_average(average: Average, weights: Average, decay: float) -> Average:
    """decay * average + (1 - decay) * policy, in new tensors; exactly the policy where both are equal."""
    return {name: average[name].lerp(own, 1 - decay) for name, own in weights.items()}


def averaged_state(state: Mapping[str, Tensor], average: Average) -> dict[str, Tensor]:
    """A model's state dict with the average for its parameters, in their dtype. Tied weights stay one tensor."""
    replaced = {id(state[name]): own.to(state[name].dtype) for name, own in average.items()}
    return {name: replaced.get(id(own), own) for name, own in state.items()}
