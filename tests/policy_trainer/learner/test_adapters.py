"""Adapters: what they begin as, their gradients in float64, and what peft and workers read of them."""

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from policy_trainer.config import LoraConfig, LossConfig, OptimizerConfig
from policy_trainer.learner.adapters import (
    adapters_off,
    add_adapters,
    load_adapters,
    policy_state,
    save_policy,
    save_whole,
)
from policy_trainer.learner.learner import Learner
from policy_trainer.run_files.checkpoint import Checkpoints, TrainState, restore, write_weights
from policy_trainer.weights.adapters import read_adapter
from shared.batch import Batch
from shared.errors import UserError
from shared.logprobs import choose_forward
from shared.models import load_model
from tests.device import DEVICE
from tests.policy_trainer.learner.steps import make_learner
from tests.policy_trainer.learner.test_learner import naive_loss
from tests.rounding import rounding
from tests.shared.logprobs.families import group as token_group
from tests.shared.logprobs.families import in_double, make, mixed

Make = Callable[..., Any]
LORA = LoraConfig(rank=3, alpha=6)
FAMILIES = ["llama", "qwen3", "gpt2", "gemma3", "mixtral"]
GROUPS = [token_group(5, [7, 3, 4]), token_group(2, [3, 6])]
NO_CLIPPING = OptimizerConfig(learning_rate=1e-2, max_grad_norm=1e9)


def adapted(model: PreTrainedModel, lora: LoraConfig = LORA, seed: int = 0, base: str = "base") -> PreTrainedModel:
    add_adapters(model, lora, seed=seed, base=base, revision=None)
    return model


@torch.no_grad()
def trained(model: PreTrainedModel) -> PreTrainedModel:
    """With adapters that add something: they begin with B = 0."""
    generator = torch.Generator().manual_seed(5)
    for name, parameter in adapters(model).items():
        if ".lora_B." in name:
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def adapters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    return {name: tensor for name, tensor in model.named_parameters() if ".lora_" in name}


def frozen(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters() if ".lora_" not in name}


def logps(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return choose_forward(model)(GROUPS, mixed(GROUPS))


def learner(model: PreTrainedModel, **changes: Any) -> Learner:
    loss = LossConfig(beta=0.1, old_logps="current")
    options = {"loss": loss, "optimizer": NO_CLIPPING, "micro_batch_tokens": 20, "reference": "adapter-off"}
    return make_learner(model, choose_forward(model), **options | changes)


@pytest.fixture
def batches(make_scored: Make) -> list[Batch]:
    return [
        make_scored([3, 9, 5], [[4, 8], [5, 6, 7], [9]], [0.0, 1.0, 0.5], number=1),
        make_scored([11, 12], [[4, 8, 20, 21], [30]], [1.0, 0.0], number=2, temperature=0.8),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_begin_as_the_base_which_stays_as_it_is(family: str, dtype: torch.dtype, batches: list[Batch]) -> None:
    model = make(family, dtype)
    base = logps(model)
    weights = frozen(adapted(model))
    assert torch.equal(logps(model), base)
    policy, begun = learner(model), copy.deepcopy(adapters(model))
    assert policy.kl(batches) == 0
    for step in range(3):
        stats = policy.step(batches, step=step)
        assert stats.metrics["grad_norm"] > 0 and (stats.metrics["kl"] == 0) is (step == 0)
    assert policy.kl(batches) > 0 and not torch.equal(logps(model), base)
    with adapters_off(model):
        assert torch.equal(logps(model), base)
    assert not torch.equal(logps(model), base)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in frozen(model).items())
    assert all(not torch.equal(tensor, begun[name]) for name, tensor in adapters(model).items())


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_chain_rule(family: str, batches: list[Batch]) -> None:
    """Of W + scale B A: dL/dA = scale B^T dL/dW, and dL/dB = scale dL/dW A^T, in float64."""
    model = trained(adapted(make(family)))
    whole = in_double(make(family))
    weights, parameters = dict(whole.named_parameters()), adapters(model)
    parts: dict[str, tuple[str, str]] = {}
    for name in parameters:
        layer, _, part = name.partition(".lora_")
        if part.startswith("A"):
            parts[layer] = (name, f"{layer}.lora_B{part[1:]}")
    scale, transposed = LORA.alpha / LORA.rank, family == "gpt2"
    values = {name: parameter.detach().double() for name, parameter in parameters.items()}
    with torch.no_grad():
        for layer, (a, b) in parts.items():
            added = scale * values[b] @ values[a]
            weights[f"{layer}.weight"] += added.T if transposed else added  # type: ignore[assignment]
    loss = LossConfig(beta=0.1)
    naive_loss(whole, batches, loss).backward()
    learner(model, loss=loss, reference="server").step(batches, step=0)
    for layer, (a, b) in parts.items():
        slope = weights[f"{layer}.weight"].grad
        assert slope is not None
        slope = slope.T if transposed else slope
        for name, expected in ((a, scale * values[b].T @ slope), (b, scale * slope @ values[a].T)):
            gradient = parameters[name].grad
            assert gradient is not None and expected.abs().max() > 0
            torch.testing.assert_close(gradient.double(), expected, rtol=2e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("source", ["server", "adapter-off"])
def test_the_reference_is_the_servers_or_its_own(source: Any, make_tiny: Make, batches: list[Batch]) -> None:
    """The batches' log-probs are all -1: a reference that nobody would take for the base."""
    model = adapted(make_tiny())
    policy = learner(model, reference=source)
    assert (policy.kl(batches) == 0) is (source == "adapter-off")
    rollouts = [batch.without_scores() for batch in batches]
    if source == "server":
        with pytest.raises(ValueError, match="it has no ref_logps"):
            policy.step(rollouts, step=0)
        return
    with_own = learner(copy.deepcopy(model))
    assert with_own.step(rollouts, step=0) == policy.step(batches, step=0)
    assert all(torch.equal(tensor, policy_state(model)[name]) for name, tensor in policy_state(with_own.model).items())


def test_without_a_penalty_nothing_is_computed_for_it(make_tiny: Make, batches: list[Batch]) -> None:
    model = adapted(make_tiny())
    forward, calls = choose_forward(model), []

    class Counted:
        name = forward.name

        def __call__(self, groups: Any, temperatures: Any) -> Tensor:
            calls.append(groups)
            return forward(groups, temperatures)

        with_entropy = staticmethod(forward.with_entropy)

    make_learner(model, Counted(), loss=LossConfig(beta=0), reference="adapter-off").step(batches, step=0)
    assert not calls


def test_the_seed_decides_and_the_random_state_stays(make_tiny: Make) -> None:
    states = []
    for seed, noise in ((7, 1), (7, 2), (8, 1)):
        model = make_tiny()
        torch.manual_seed(noise)
        before = torch.get_rng_state()
        adapted(model, seed=seed)
        assert torch.equal(torch.get_rng_state(), before)
        states.append(policy_state(model))
    first, same, other = states
    assert all(torch.equal(tensor, same[name]) for name, tensor in first.items())
    assert any(not torch.equal(tensor, other[name]) for name, tensor in first.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_a_resumed_run_goes_on_bit_for_bit(
    dtype: Any, offload: Any, tmp_path: Path, make_tiny: Make, tokenizer: PreTrainedTokenizerFast,
    batches: list[Batch],
) -> None:  # fmt: skip
    def fresh(seed: int) -> PreTrainedModel:
        return adapted(make_tiny(vocabulary=len(tokenizer), dtype=getattr(torch, dtype)), seed=seed)

    optimizer = OptimizerConfig(learning_rate=1e-2, offload=offload)
    policy = learner(fresh(0), optimizer=optimizer)
    for step in range(2):
        policy.step(batches, step=step)
    write = partial(write_weights, policy.model, tokenizer, policy.weights)
    checkpoint = Checkpoints(tmp_path, keep=1).begin(TrainState(step=2), write).finish()
    assert sum(file.stat().st_size for file in checkpoint.glob("*.safetensors")) < 100_000
    resumed = fresh(1)
    load_adapters(resumed, checkpoint)
    again = learner(resumed, optimizer=optimizer)
    restore(checkpoint, again.weights)
    for step in (2, 3):
        assert again.step(batches, step=step) == policy.step(batches, step=step)
    for name, value in policy_state(policy.model).items():
        assert torch.equal(policy_state(again.model)[name], value)
    for name, value in policy.weights.stepped.items():
        assert torch.equal(again.weights.stepped[name], value)


@pytest.mark.parametrize("family", FAMILIES)
class TestSaved:
    @pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft asks for it
    def test_peft_and_the_worker_read_what_is_published(
        self, family: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        base = tmp_path / "base"
        make(family).save_pretrained(base)
        model = trained(
            adapted(load_model(str(base), revision=None, device=str(DEVICE), dtype="float32"), base=str(base))
        )
        published = tmp_path / "published"
        save_policy(model, tokenizer, published, policy_state(model))
        names = {"adapter_config.json", "adapter_model.safetensors", "config.json", "generation_config.json"}
        assert names | {"tokenizer.json"} <= {file.name for file in published.iterdir()}
        described = json.loads((published / "adapter_config.json").read_text())
        assert (described["base_model_name_or_path"], described["r"]) == (str(base), 3)
        plain = load_model(str(base), revision=None, device=str(DEVICE), dtype="float32")
        theirs: Any = PeftModel.from_pretrained(plain, str(published))
        expected = logps(model)
        bound = rounding(expected.abs().max())
        torch.testing.assert_close(logps(theirs.base_model.model), expected, rtol=0, atol=bound)
        assert 2 * len(read_adapter(published)) == len(adapters(model))

    def test_the_whole_model_has_the_adapters_log_probs(
        self, family: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        model = trained(adapted(make(family)))
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        save_whole(model, tokenizer, tmp_path)
        whole = load_model(str(tmp_path), revision=None, device=str(DEVICE), dtype="auto")
        assert not (tmp_path / "adapter_config.json").exists() and whole.dtype == torch.float32
        expected = logps(model)
        torch.testing.assert_close(logps(whole), expected, rtol=0, atol=rounding(expected.abs().max()))
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_bfloat16_model_is_merged_in_float32_and_rounded_once(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    model = trained(adapted(make("qwen2-tied", torch.bfloat16)))
    state = model.state_dict()
    save_whole(model, tokenizer, tmp_path)
    whole = load_model(str(tmp_path), revision=None, device=str(DEVICE), dtype="auto").state_dict()
    for name, weight in make("qwen2-tied", torch.bfloat16).state_dict().items():
        layer = name.removesuffix(".weight")
        expected = weight
        if f"{layer}.lora_A.default.weight" in state:
            a, b = (state[f"{layer}.lora_{part}.default.weight"].float() for part in "AB")
            expected = (weight.float() + LORA.alpha / LORA.rank * (b @ a)).bfloat16()
            assert not torch.equal(expected, weight)
        assert torch.equal(whole[name], expected)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["lm_head"], "lora.target_modules: lm_head is the LM head or the embeddings, .*: down_proj, .*"),
        (["q_proj", "embed_tokens"], "embed_tokens is the LM head or the embeddings"),
        (["q_porj"], r"Qwen2ForCausalLM has no linear layer q_porj \(did you mean q_proj\?\); there are: down_proj, "),
        (["norm"], "has no linear layer norm"),
        (["all-linear", "xyz"], "has no linear layer xyz"),
    ],
)
def test_target_modules_that_cannot_be(targets: list[str], message: str, make_tiny: Make) -> None:
    with pytest.raises(UserError, match=message):
        adapted(make_tiny(), LoraConfig(rank=2, target_modules=targets))


def test_an_architecture_that_peft_refuses(make_tiny: Make) -> None:
    with pytest.raises(UserError, match=r"^lora: peft .* refuses: .*Mamba"):
        adapted(make("mamba"))


def test_adapters_of_another_model(tmp_path: Path, make_tiny: Make, tokenizer: PreTrainedTokenizerFast) -> None:
    save_policy(adapted(make_tiny(layers=3)), tokenizer, tmp_path)
    with pytest.raises(UserError, match="adapters of other layers than this model's"):
        load_adapters(adapted(make_tiny()), tmp_path)
    with pytest.raises(UserError, match="has no adapters"):
        load_adapters(adapted(make_tiny()), tmp_path / "none")
