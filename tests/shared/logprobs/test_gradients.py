"""Gradients against the oracle."""

import pytest
import torch

from shared.logprobs import PackedForward, PaddedForward, PlainForward
from tests.rounding import rounding
from tests.shared.logprobs.families import (
    SHAPES,
    entropy_oracle,
    gradients,
    group,
    in_double,
    make,
    oracle,
    weights,
)

# Of an untied and a tied head, one with a softcap, and one with a bias.
HEADS = ("qwen2", "qwen2-tied", "gemma2-full", "phi")
FORWARDS = [
    *((name, form) for name in HEADS for form in (PackedForward, PaddedForward, PlainForward)),
    ("granite", PlainForward),  # its logits are not the head's
    *((name, PackedForward) for name in ("qwen3", "gpt2", "mixtral")),
]


@pytest.mark.parametrize(("name", "form"), FORWARDS)
def test_gradients(name: str, form: type[PackedForward | PaddedForward | PlainForward]) -> None:
    groups, temperatures = [group(9, [1, 12, 4]), group(1, [3, 6])], [1.0, 0.75]
    model, naive = make(name), in_double(make(name))
    want, want_entropy = (f(naive, groups, temperatures) for f in (oracle, entropy_oracle))
    logps, entropy = form(model).with_entropy(groups, temperatures)
    factors = weights(len(want))
    (want * factors - 0.3 * want_entropy).sum().backward()
    (logps * factors - 0.3 * entropy).sum().backward()
    assert (entropy - want_entropy).abs().max() < rounding(want.abs().max())
    assert (gradients(model) - gradients(naive)).norm() < rounding(gradients(naive).norm())


def test_gradients_with_checkpointed_layers() -> None:
    groups = SHAPES["ragged"]
    usual, checkpointed = make("qwen2"), make("qwen2")
    enable = (
        getattr(checkpointed, "activation_checkpointing_enable", None) or checkpointed.gradient_checkpointing_enable
    )
    enable()
    for model in (usual, checkpointed):
        torch.cat(PackedForward(model.train()).with_entropy(groups, [1.0])).sum().backward()
    assert torch.equal(gradients(usual), gradients(checkpointed))  # the same arithmetic, twice


def test_no_gradient_is_kept_without_grad_mode() -> None:
    with torch.no_grad():
        assert not PackedForward(make("qwen2"))(SHAPES["ragged"], [1.0]).requires_grad
