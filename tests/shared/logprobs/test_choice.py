"""Choosing a forward, and the self-test."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shared.batch import TokenGroup
from shared.errors import UserError
from shared.logprobs import (
    LogprobForward,
    PackedForward,
    PlainForward,
    choice,
    choose_forward,
    self_test_difference,
    slowed_by,
)
from shared.logprobs.attention import PACKED_ATTENTION, Packing, PackingContext
from shared.logprobs.choice import self_test_tolerance
from shared.logprobs.forked import fork_states, modules_with_state
from shared.logprobs.head import target_logps
from shared.logprobs.layout import PackedLayout
from shared.logprobs.stacked import StackedAttention
from tests.shared.logprobs.families import (
    VOCABULARY,
    group,
    make,
)


class Wrong:
    """A forward with one of the known faults."""

    name = "wrong"

    def __init__(self, model: PreTrainedModel, trap: str) -> None:
        self._model, self._trap = model, trap

    def __call__(self, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> Tensor:
        logps = []
        for tokens, temperature in zip(groups, temperatures, strict=True):
            ids = torch.tensor(np.concatenate([tokens.prompt_ids, tokens.completion_ids]))[None]
            positions = np.concatenate([np.arange(n) for n in (len(tokens.prompt_ids), *tokens.completion_lengths)])
            layout = PackedLayout.of([tokens])
            packing = Packing(layout, StackedAttention, self._model.dtype)
            continued = torch.tensor(layout.positions())[None]
            options: dict[str, Any] = {
                # Positions that restart, no mask: transformers takes the pieces for sequences of their own.
                "auto-packed": {"position_ids": torch.tensor(positions)[None]},
                # The packed attention, but positions that do not restart after the prompt.
                "default positions": {"attention_mask": torch.ones_like(ids)},
                # One causal sequence: completions see those before them.
                "one sequence": {"position_ids": continued, "attention_mask": torch.ones_like(ids)},
            }[self._trap]
            with PackingContext(packing if self._trap == "default positions" else None):
                logits = self._model(input_ids=ids, use_cache=False, **options).logits[0]
            targets = torch.tensor(tokens.completion_ids)
            logps.append(target_logps(logits[layout.predictors()], targets, temperature))
        return torch.cat(logps)


# In bfloat16 an untrained model (0.02) hides the traps in its noise; float32 shows even those.
@pytest.mark.parametrize(("scale", "dtype"), [(0.02, torch.float32), (0.3, torch.float32), (0.3, torch.bfloat16)])
@pytest.mark.parametrize("trap", ["auto-packed", "default positions", "one sequence"])
def test_the_self_test_sees_known_faults(trap: str, scale: float, dtype: torch.dtype) -> None:
    model = make("qwen2", dtype, initializer_range=scale)
    model.set_attn_implementation(PACKED_ATTENTION)
    assert self_test_difference(model, Wrong(model, trap)) > 1.5 * self_test_tolerance(dtype)
    assert self_test_difference(model, PackedForward(model)) < 0.5 * self_test_tolerance(dtype)


class Shifted(PackedForward):
    """Off by one temperature step."""

    def __call__(self, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> Tensor:
        return super().__call__(groups, [t * 1.01 for t in temperatures])


class Undefined(PlainForward):
    def __call__(self, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> Tensor:
        return super().__call__(groups, temperatures) * math.nan


class Refusing(PackedForward):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        raise NotImplementedError("not this one")


@pytest.mark.parametrize("wrong", [Shifted, Refusing])
def test_a_wrong_packed_form_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wrong: type[PackedForward]
) -> None:
    monkeypatch.setattr(choice, "PackedForward", wrong)
    model = make("qwen2")
    before = model.config._attn_implementation
    assert choose_forward(model).name == "padded"
    assert model.config._attn_implementation == before
    assert "the packed forward is refused" in caplog.text


def test_a_model_without_a_correct_forward_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "PackedForward", Shifted)
    monkeypatch.setattr(choice, "PaddedForward", Undefined)
    monkeypatch.setattr(choice, "PlainForward", Undefined)
    with pytest.raises(UserError, match=r"Qwen2ForCausalLM.*packed.*plain"):
        choose_forward(make("qwen2"))


def test_a_head_of_zeros() -> None:
    """Every log-prob is the same: there is no spread to compare with."""
    model = make("qwen2")
    head: Any = model.get_output_embeddings()
    torch.nn.init.zeros_(head.weight)
    forward: LogprobForward = choose_forward(model)
    assert forward.name == "packed"
    got = forward([group(3, [4])], [1.0])
    assert torch.allclose(got, torch.full((4,), -math.log(VOCABULARY)))


def test_log_probs_that_hardly_vary_may_differ_by_a_few_roundings() -> None:
    model = make("qwen2")
    head: Any = model.get_output_embeddings()
    torch.nn.init.zeros_(head.weight)

    def rounded(groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> Tensor:
        logps = PlainForward(model)(groups, temperatures)
        return logps * (1 + 3.5 * torch.finfo(torch.float32).eps)

    assert self_test_difference(model, rounded) <= self_test_tolerance(torch.float32)


def test_weights_that_are_not_finite_are_named() -> None:
    model = make("qwen2")
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = math.nan
    with pytest.raises(UserError, match=r"^model: model\.layers\.0\.mlp\.up_proj\.weight has NaN or infinite values"):
        choose_forward(model)


def test_what_slows_a_form_is_said() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert slowed_by("packed", torch.float32, cpu) == slowed_by("packed-varlen", torch.bfloat16, gpu) == ""
    assert slowed_by("padded", torch.float32, cpu).startswith(
        "each prompt is computed once for each of its completions"
    )
    assert slowed_by("plain", torch.float32, gpu).endswith("its logits are computed whole, which takes more memory")
    assert "half precision (--dtype bfloat16)" in slowed_by("packed", torch.float32, gpu)
    assert slowed_by("packed", torch.bfloat16, gpu) == "", "a warning said at loading why the faster one was refused"


@pytest.mark.parametrize("form", ["packed", "padded"])
def test_a_processor_without_bfloat16_is_said_to_be_slow(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert "--dtype float32" in slowed_by(form, torch.bfloat16, cpu)
    assert "--dtype float32" not in slowed_by(form, torch.float32, cpu) + slowed_by(form, torch.bfloat16, gpu)


def test_modules_with_a_state_take_a_cache_by_its_place_as_before() -> None:
    model = make("mamba2")
    (module, *_), hidden = modules_with_state(model), torch.randn(1, 5, 32)
    before = module(hidden, None, None)
    PackedForward(model)
    assert torch.equal(module(hidden, None, None), before)


@pytest.mark.parametrize("name", ["cache", "cache_params", "past_key_values"])
def test_modules_with_a_state_take_a_cache_by_its_name_as_before(name: str) -> None:
    """transformers 5.24 has one name for what had two."""

    class Convolving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(4, 4, 1)
            self.forward = {
                "cache": lambda hidden_states, cache=None: hidden_states + (cache or 0),
                "cache_params": lambda hidden_states, cache_params=None: hidden_states + (cache_params or 0),
                "past_key_values": lambda hidden_states, past_key_values=None: hidden_states + (past_key_values or 0),
            }[name]

    module = Convolving()
    assert fork_states(module) == {module}
    assert torch.equal(module(torch.zeros(1), **{name: 2}), torch.tensor([2.0]))
