"""Log-probs against the oracle, for every family."""

from typing import Any

import pytest
import torch

from shared.logprobs import PackedForward, PaddedForward, PlainForward, choose_forward
from shared.logprobs.attention import PACKED_ATTENTION, PACKED_ATTENTION_EAGER
from tests.rounding import rounding
from tests.shared.logprobs.families import FAMILIES, SHAPES, expected, form_of, group, make, mixed

FORMS = (PackedForward, PaddedForward, PlainForward)
Form = type[PackedForward | PaddedForward | PlainForward]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_equals_the_oracle(name: str, form: Form, shape: str) -> None:
    model, groups = make(name, torch.float64), SHAPES[shape]
    want = expected(model, groups, mixed(groups))
    got = form(model)(groups, mixed(groups))
    assert got.shape == want.shape
    assert (got - want).abs().max() < 1e-9
    assert len(want) == 1 or want.std() > 0.5  # the oracle tells right from wrong


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str) -> None:
    """Deep in rows longer than those of the self-test, too."""
    model = make(name)
    groups = [group(30, [40, 1, 17]), group(3, [9, 2])]
    want = expected(model, groups, mixed(groups))
    before = model.config._attn_implementation
    forward = choose_forward(model)
    assert forward.name == form_of(name, torch.float32)
    with torch.no_grad():
        logps, entropy = forward.with_entropy(groups, mixed(groups))
    assert logps.dtype == entropy.dtype == torch.float32
    assert (logps - want).abs().max() < rounding(want.abs().max())
    # What was refused leaves the model as it was.
    packed = PACKED_ATTENTION_EAGER if before == "eager" else PACKED_ATTENTION
    assert model.config._attn_implementation == (packed if forward.name == "packed" else before)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("scale", [0.02, 1.0])
def test_the_chosen_form_does_not_depend_on_the_size_of_weights(name: str, scale: float) -> None:
    """A wrong forward of a model whose log-probs hardly spread is wrong by little, and must be refused all the same."""
    for dtype in (torch.float32, torch.bfloat16):
        model = make(name, dtype, initializer_range=scale)
        assert choose_forward(model).name == form_of(name, dtype)


def test_a_cap_on_logits_is_not_overlooked() -> None:
    """At the start logits are far below the cap, where the self-test cannot see it; a trained model's are not."""
    model = make("nanochat", torch.float64, initializer_range=0.002)
    forward = choose_forward(model)
    head: Any = model.get_output_embeddings()
    with torch.no_grad():
        head.weight.mul_(3000)
    groups = SHAPES["ragged"]
    with torch.no_grad():
        assert (forward(groups, [1.0]) - expected(model, groups, [1.0])).abs().max() < 1e-9


@pytest.mark.parametrize("form", FORMS)
def test_a_model_does_not_differ_from_itself(form: Form) -> None:
    groups = [*SHAPES["many groups"], *SHAPES["long"]]
    temperatures = mixed(groups)
    policy, reference = form(make("qwen2").train()), form(make("qwen2"))
    logps = policy(groups, temperatures).detach()
    with torch.no_grad():
        together = reference(groups, temperatures)
        apart = torch.cat([reference([each], [t]) for each, t in zip(groups, temperatures, strict=True)])
    for ref_logps in (together, apart):
        x = (ref_logps - logps).double()
        bound = rounding(logps.abs().max())
        assert x.abs().max() < bound < 1e-3
        assert (torch.expm1(x) - x).max() < bound**2  # k3, per token: x^2 / 2
