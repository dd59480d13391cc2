"""Gradient checkpointing: the same gradients to the bit out of fewer saved bytes, and nothing else changes."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from policy_trainer.learner.gradient_checkpointing import checkpoint_layers
from shared.batch import TokenGroup
from shared.errors import UserError
from shared.logprobs import PackedForward, PlainForward

Make = Callable[..., PreTrainedModel]
Forward = Callable[[PreTrainedModel], Any]
GROUPS = [
    TokenGroup(np.arange(2, 9), np.arange(3, 33), np.array([12, 1, 17])),
    TokenGroup(np.arange(5, 8), np.arange(9, 14), np.array([2, 3])),
]


def logps(model: PreTrainedModel, forward: Forward) -> Tensor:
    return forward(model)(GROUPS, [1.0, 0.7])


def gradients(model: PreTrainedModel, forward: Forward) -> list[Tensor]:
    logps(model, forward).square().sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def saved_bytes(model: PreTrainedModel, forward: Forward) -> int:
    """What a forward keeps for its backward."""
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logps(model, forward)
    return sum(sizes)


@pytest.mark.parametrize("forward", [PackedForward, PlainForward])
class TestOfAForward:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_gradients_are_the_same_to_the_bit(self, make_tiny: Make, forward: Forward, dtype: torch.dtype) -> None:
        model = make_tiny(dtype=dtype)
        recomputed = copy.deepcopy(model)
        checkpoint_layers(recomputed)
        assert torch.equal(logps(recomputed, forward), logps(model, forward))
        expected = gradients(model, forward)
        assert expected and all(map(torch.equal, gradients(recomputed, forward), expected))

    def test_saves_layers_inputs_alone(self, make_tiny: Make, forward: Forward) -> None:
        """By what each of eight layers adds to one of none: a tenth of the bytes, or less."""
        nothing, model = make_tiny(layers=1), make_tiny(layers=9)
        before = saved_bytes(model, forward) - saved_bytes(nothing, forward)
        checkpoint_layers(nothing)
        checkpoint_layers(model)
        assert 0 < saved_bytes(model, forward) - saved_bytes(nothing, forward) < before / 10

    def test_runs_layers_once_where_no_gradient_is_wanted(self, make_tiny: Make, forward: Forward) -> None:
        model = make_tiny()
        calls: list[str] = []
        model.get_submodule("model.layers.0.self_attn").register_forward_hook(lambda *_: calls.append("attention"))
        checkpoint_layers(model)
        with torch.no_grad():
            logps(model, forward)
        without = len(calls)
        logps(model, forward).sum().backward()
        assert len(calls) == 3 * without


def test_a_model_without_such_layers_is_refused_with_a_reason() -> None:
    with pytest.raises(UserError, match="gradient_checkpointing: Linear has no layers"):
        checkpoint_layers(nn.Linear(2, 2))
