"""Gradients against the oracle."""

import pytest
import torch

from shared.logprobs import PackedForward, PlainForward
from tests.shared.logprobs.families import SHAPES, gradients, group, in_double, make, oracle, weights


@pytest.mark.parametrize("name", ["qwen2", "qwen2-tied", "qwen3", "gpt2", "mixtral"])
def test_gradients(name: str) -> None:
    groups = [group(9, [1, 12, 4]), group(1, [3, 6])]
    temperatures = [1.0, 0.7]
    packed, plain, naive = make(name), make(name), in_double(make(name))
    want = oracle(naive, groups, temperatures)
    factors = weights(len(want))
    (want * factors).sum().backward()
    (PlainForward(plain)(groups, temperatures) * factors).sum().backward()
    (PackedForward(packed)(groups, temperatures) * factors).sum().backward()
    norm = gradients(naive).norm()
    assert norm > 0.1
    assert (gradients(packed) - gradients(naive)).norm() < 1e-5 * norm
    assert (gradients(plain) - gradients(naive)).norm() < 1e-5 * norm
    assert (gradients(packed) - gradients(plain)).norm() < 1e-5 * norm


def test_gradients_with_checkpointed_layers() -> None:
    groups = SHAPES["ragged"]
    usual, checkpointed = make("qwen2"), make("qwen2")
    enable = (
        getattr(checkpointed, "activation_checkpointing_enable", None) or checkpointed.gradient_checkpointing_enable
    )
    enable()
    for model in (usual, checkpointed):
        PackedForward(model.train())(groups, [1.0]).sum().backward()
    assert (gradients(usual) - gradients(checkpointed)).norm() < 1e-6 * gradients(usual).norm()


def test_no_gradient_is_kept_where_none_is_asked_for() -> None:
    with torch.no_grad():
        assert not PackedForward(make("qwen2"))(SHAPES["ragged"], [1.0]).requires_grad
