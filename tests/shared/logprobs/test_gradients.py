"""Gradients against the oracle."""

import pytest
import torch

from policy_trainer.learner.gradient_checkpointing import checkpoint_layers
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
    # Windows, caps, sinks, chunks, latent attention, and layers with a state.
    *((name, PackedForward) for name in ("gemma2", "gemma3", "gemma4", "gpt-oss", "llama4", "deepseek-v3")),
    *((name, PackedForward) for name in ("qwen3.5", "lfm2", "granite4", "falcon-h1", "nemotron-h")),
    *((name, PackedForward) for name in ("jamba", "mamba")),  # their layers begin with no state
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


@pytest.mark.parametrize("name", ["qwen2", "gemma3", "gemma4", "gpt-oss", "qwen3.5", "lfm2", "granite4", "jamba"])
def test_gradients_with_checkpointed_layers(name: str) -> None:
    groups = [*SHAPES["ragged"], *SHAPES["one token"]]
    usual, checkpointed = make(name), make(name)
    checkpoint_layers(checkpointed)
    for model in (usual, checkpointed):
        torch.cat(PackedForward(model).with_entropy(groups, [1.0, 0.5])).sum().backward()
    assert torch.equal(gradients(usual), gradients(checkpointed))  # the same arithmetic, twice


def test_no_gradient_is_kept_without_grad_mode() -> None:
    with torch.no_grad():
        assert not PackedForward(make("qwen2"))(SHAPES["ragged"], [1.0]).requires_grad
