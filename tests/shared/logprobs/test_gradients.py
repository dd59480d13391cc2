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
]


@pytest.mark.parametrize("name", ["qwen2", "qwen2-tied", "qwen3", "gpt2", "mixtral"])
def test_gradients(name: str) -> None:
    groups = [group(9, [1, 12, 4]), group(1, [3, 6])]
    temperatures = [1.0, 0.75]
    packed, plain, naive = make(name), make(name), in_double(make(name))
    want = oracle(naive, groups, temperatures)
    factors = weights(len(want))
    (want * factors).sum().backward()
    (PlainForward(plain)(groups, temperatures) * factors).sum().backward()
    (PackedForward(packed)(groups, temperatures) * factors).sum().backward()
    norm = gradients(naive).norm()
    assert norm > 0.1
    assert (gradients(packed) - gradients(naive)).norm() < rounding(norm)
    assert (gradients(plain) - gradients(naive)).norm() < rounding(norm)
    assert (gradients(packed) - gradients(plain)).norm() < rounding(norm)


@pytest.mark.parametrize(("name", "form"), FORWARDS)
def test_gradients_of_a_loss_with_entropies(
    name: str, form: type[PackedForward | PaddedForward | PlainForward]
) -> None:
    groups, temperatures = [group(9, [1, 12, 4]), group(1, [3, 6])], [1.0, 0.75]
    model, naive = make(name), in_double(make(name))
    want, want_entropy = (f(naive, groups, temperatures) for f in (oracle, entropy_oracle))
    logps, entropy = form(model).with_entropy(groups, temperatures)
    factors = weights(len(want))
    (want * factors - 0.3 * want_entropy).sum().backward()
    (logps * factors - 0.3 * entropy).sum().backward()
    assert (entropy - want_entropy).abs().max() < rounding(want.abs().max())
    assert (gradients(model) - gradients(naive)).norm() < rounding(gradients(naive).norm())


def test_gradients_of_entropies_in_bfloat16() -> None:
    groups = SHAPES["many groups"]
    model, exact = make("qwen2", torch.bfloat16), in_double(make("qwen2", torch.bfloat16))
    PackedForward(model).with_entropy(groups, [1.0] * len(groups))[1].sum().backward()
    entropy_oracle(exact, groups, [1.0] * len(groups)).sum().backward()
    assert torch.nn.functional.cosine_similarity(gradients(model), gradients(exact), dim=0) > 0.99


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


def test_no_gradient_is_kept_where_none_is_asked_for() -> None:
    with torch.no_grad():
        assert not PackedForward(make("qwen2"))(SHAPES["ragged"], [1.0]).requires_grad
