"""The auxiliary loss of mixtures of experts, against transformers' own of each group's padded rows."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from policy_trainer.config import LossConfig, OptimizerConfig
from policy_trainer.learner.gradient_checkpointing import checkpoint_layers
from shared.batch import Batch
from shared.errors import UserError
from shared.logprobs import PlainForward
from shared.logprobs.padded import PaddedForward
from tests.policy_trainer.learner.steps import make_learner
from tests.shared.logprobs.families import OLD_CACHES

Make = Callable[..., Any]
SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 8, "num_experts_per_tok": 2, "max_position_embeddings": 64, "initializer_range": 0.5, "eos_token_id": 1,
    "pad_token_id": 0, "bos_token_id": None,
}  # fmt: skip
COEFFICIENT = 0.3


def mixtral() -> PreTrainedModel:
    return MixtralForCausalLM(MixtralConfig(**SHAPE, intermediate_size=24, num_local_experts=4, sliding_window=None))


def qwen3_moe() -> PreTrainedModel:
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SHAPE, intermediate_size=24, moe_intermediate_size=12, num_experts=5, decoder_sparse_step=1)
    )


def gpt_oss() -> PreTrainedModel:
    """With windows that rows exceed."""
    config = AutoConfig.for_model("gpt_oss", **SHAPE, intermediate_size=12, num_local_experts=4, sliding_window=4)
    return AutoModelForCausalLM.from_config(config)


def qwen3_next() -> PreTrainedModel:
    """With layers that keep a state."""
    sizes = {f"linear_{name}": 2 for name in ("num_key_heads", "num_value_heads")}
    sizes |= {f"linear_{name}": 8 for name in ("key_head_dim", "value_head_dim")}
    experts = {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 12, "num_experts": 4}
    config = AutoConfig.for_model("qwen3_next", **SHAPE, **sizes, **experts, full_attention_interval=2)
    return AutoModelForCausalLM.from_config(config)


MODELS = pytest.mark.parametrize("make", [mixtral, qwen3_moe, gpt_oss, *([] if OLD_CACHES else [qwen3_next])])


def seeded(make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    torch.manual_seed(0)
    return make().eval()


@pytest.fixture
def batches(make_scored: Make) -> list[Batch]:
    """Ragged groups; the last has a completion that does not train."""
    generator = np.random.default_rng(0)

    def group(number: int, lengths: list[int], rewards: list[float]) -> Batch:
        completions = [generator.integers(2, 64, length).tolist() for length in lengths]
        return make_scored(generator.integers(2, 64, 3 + number).tolist(), completions, rewards, number=number)

    return [group(0, [4, 1, 7], [0, 1, 0.2]), group(1, [3, 5], [1, 0]), group(2, [2, 6, 1], [math.nan, 2, 0])]


def aux_loss(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Of one group: each completion is a row behind its own copy of the prompt, padded on the right."""
    group = batch.group
    rows = [torch.from_numpy(np.concatenate([group.prompt_ids, ids])) for ids in group.completions()]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return model(input_ids=ids, attention_mask=mask, output_router_logits=True).aux_loss  # type: ignore[operator]


def gradient(model: PreTrainedModel) -> Tensor:
    parameters = list(model.parameters())
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])


def step(
    make: Callable[[], PreTrainedModel], batches: list[Batch], coefficient: Any, form: Any = None, **settings: Any
) -> Any:
    """The statistics of a step that changes nothing, and its gradient. form: of forwards; None for the fastest."""
    model = seeded(make)
    forward = form and form(model)
    loss = LossConfig(beta=0.0, old_logps="current", router_aux_loss_coef=coefficient)
    optimizer = OptimizerConfig(learning_rate=1e-30, max_grad_norm=1e9)
    stats = make_learner(model, forward, loss=loss, optimizer=optimizer, **settings).step(batches, step=0)
    return stats, gradient(model)


@MODELS
@pytest.mark.parametrize("budget", [1, 25, 10_000])
def test_value_and_gradient_however_groups_are_joined(
    make: Callable[[], PreTrainedModel], batches: list[Batch], budget: int
) -> None:
    model, shares = seeded(make), [3 / 7, 2 / 7, 2 / 7]
    expected = torch.stack([share * aux_loss(model, each) for share, each in zip(shares, batches, strict=True)]).sum()
    (COEFFICIENT * expected).backward()
    without, plain = step(make, batches, 0.0, micro_batch_tokens=budget)
    stats, ours = step(make, batches, COEFFICIENT, micro_batch_tokens=budget)
    assert math.isnan(without.metrics["aux_loss"])
    assert stats.metrics["aux_loss"] == pytest.approx(expected.item(), rel=1e-5)
    loss = without.metrics["loss"] + COEFFICIENT * expected.item()
    assert stats.metrics["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-6)
    added = gradient(model)
    assert added.abs().max() > 1e-4
    assert (ours - plain - added).abs().max() <= 1e-4 * max(added.abs().max(), ours.abs().max())


@MODELS
def test_it_is_the_same_with_gradient_checkpointing(make: Callable[[], PreTrainedModel], batches: list[Batch]) -> None:
    def checkpointed() -> PreTrainedModel:
        model = make()
        checkpoint_layers(model)
        return model

    (expected, gradients), (stats, ours) = (step(each, batches, COEFFICIENT) for each in (make, checkpointed))
    assert stats.metrics["aux_loss"] == expected.metrics["aux_loss"]
    assert (ours - gradients).abs().max() <= 1e-6 * gradients.abs().max()


def test_the_coefficient_may_be_the_models_own(make_tiny: Make, batches: list[Batch]) -> None:
    def weighted() -> PreTrainedModel:
        model = mixtral()
        model.config.router_aux_loss_coef = COEFFICIENT
        return model

    (expected, gradients), (stats, ours) = step(mixtral, batches, COEFFICIENT), step(weighted, batches, "model")
    assert stats.metrics["loss"] == expected.metrics["loss"] and torch.equal(ours, gradients)
    loss = LossConfig(beta=0.0, router_aux_loss_coef="model")
    assert make_learner(make_tiny(), loss=loss)._routing is None, "a model without experts has none"


@pytest.mark.parametrize("form", [PaddedForward, PlainForward])
@pytest.mark.parametrize("rows", [20, 10_000])
def test_rows_that_are_padded_give_the_same(
    batches: list[Batch], form: type[PaddedForward | PlainForward], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rows: the tokens of one call of the model, which a micro-batch may exceed."""
    monkeypatch.setattr("shared.logprobs.padded.ROW_TOKENS", rows)
    expected, gradients = step(mixtral, batches, COEFFICIENT)
    stats, ours = step(mixtral, batches, COEFFICIENT, form=form)
    assert stats.metrics["aux_loss"] == pytest.approx(expected.metrics["aux_loss"], rel=1e-5)
    assert (ours - gradients).abs().max() <= 1e-4 * gradients.abs().max()


def test_other_models_are_refused(make_tiny: Make) -> None:
    with pytest.raises(UserError, match=r"loss\.router_aux_loss_coef: Qwen2ForCausalLM is not a mixture-of"):
        make_learner(make_tiny(), loss=LossConfig(router_aux_loss_coef=COEFFICIENT))
