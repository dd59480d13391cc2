"""Weights in 4 bits: the quantisation itself, and adapters on it in trainer, worker and saved model."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import bitsandbytes
import numpy as np
import pytest
import torch
from bitsandbytes import functional
from bitsandbytes.nn.modules import Linear4bit
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, TrainerState

from policy_trainer.config import LoraConfig, LossConfig, OptimizerConfig
from policy_trainer.learner.adapters import (
    adapters_off,
    add_adapters,
    policy_state,
    save_policy,
    save_whole,
    vision_tower,
)
from policy_trainer.learner.ranks.export import export
from policy_trainer.rollout.sampling.hf import HFSampler
from policy_trainer.run_files.checkpoint import Checkpoints, TrainState, write_weights
from policy_trainer.trainer.memory import Shape
from policy_trainer.trl.files import show_checkpoint
from policy_trainer.weights import quantised
from policy_trainer.weights.quantised import (
    check_quantisation,
    compared_weights,
    dequantised_state,
    load_base,
    quantised_layers,
)
from shared.batch import Batch
from shared.devices import describe_processor
from shared.errors import UserError
from shared.logprobs import choose_forward
from shared.models import copy_state, load_model, load_outline
from tests.device import TEST_DEVICE
from tests.policy_trainer.learner.steps import make_learner
from tests.policy_trainer.learner.test_adapters import adapters, trained
from tests.policy_trainer.vision_models import FAMILIES as VISION_FAMILIES
from tests.policy_trainer.vision_models import Family as VisionFamily
from tests.policy_trainer.vision_models import make_vision_model
from tests.rounding import rounding
from tests.shared.logprobs.families import distributions, mixed
from tests.shared.logprobs.families import group as token_group
from tests.shared.logprobs.families import make as make_family

Make = Callable[..., Any]
DEVICE = str(TEST_DEVICE or "cpu")
LORA = LoraConfig(rank=3, alpha=6, load_in_4bit=True)
# GPT-2's weights are transposed.
FAMILIES = ["llama", "gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2-tied", "gemma3"))]
GROUPS = [token_group(5, [7, 3, 4]), token_group(2, [3, 6])]
# NF4's widest gap is between -1 and -0.6962, and the scales of blocks are rounded to 8 bits.
FARTHEST = 0.152 + 0.01
# Rows of whole blocks of 64, as in real models: bitsandbytes' kernel for AVX512-BF16 is wrong for others.
WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


def make(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return make_family(family, dtype, **({"n_embd": 64} if family == "gpt2" else WIDE))


def save_base(directory: Path, family: str = "llama", dtype: torch.dtype = torch.float32) -> str:
    make(family, dtype).save_pretrained(directory / "base")
    return str(directory / "base")


def load(base: str, dtype: Any = "float32", lora: LoraConfig = LORA) -> PreTrainedModel:
    return load_base(base, lora, revision=None, device=DEVICE, dtype=dtype)


def adapted(base: str, dtype: Any = "float32") -> PreTrainedModel:
    """With adapters that add something."""
    model = load(base, dtype)
    add_adapters(model, LORA, seed=0, base=base, revision=None)
    return trained(model)


def logps(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return choose_forward(model)(GROUPS, mixed(GROUPS))


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_near_the_originals_and_the_rest_stays(family: str, tmp_path: Path) -> None:
    base = save_base(tmp_path, family)
    model, plain = load(base), copy_state(make(family))
    layers = {f"{name}.weight" for name in quantised_layers(model)}
    values = dequantised_state(model)
    assert values.keys() == plain.keys() and len(layers) >= 8
    for name, weight in plain.items():
        if name not in layers:
            assert torch.equal(values[name], weight)
            continue
        rows = (weight.T if family == "gpt2" else weight).contiguous()
        got = (values[name].T if family == "gpt2" else values[name]).contiguous()
        blocks, errors = rows.view(-1, 64).abs().amax(1), (rows - got).view(-1, 64).abs().amax(1)
        assert (errors <= FARTHEST * blocks).all() and errors.max() > 0.05 * blocks.max()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probs_are_those_of_the_dequantised_weights(family: str, dtype: Any, tmp_path: Path) -> None:
    base, precision = save_base(tmp_path, family), getattr(torch, dtype)
    model, plain = load(base, dtype), make(family, precision)
    plain.load_state_dict(dequantised_state(model))
    with torch.no_grad():
        rows = distributions(plain, GROUPS, mixed(GROUPS))
        expected = torch.stack([values[token] for token, values in rows]).float()
    got = logps(model)
    torch.testing.assert_close(got, expected, rtol=0, atol=rounding(expected.abs().max(), dtype=precision))
    assert (got - logps(load_model(base, revision=None, device=DEVICE, dtype=dtype))).abs().max() > 0.05


def zeros_in_a_block(weight: Tensor) -> Tensor:
    weight[-1, -64:] = 0
    return weight


def columns_of_another_block(weight: Tensor) -> Tensor:
    return weight.roll(32, dims=1)


def not_a_number(weight: Tensor) -> Tensor:
    weight[0, 0] = torch.nan
    return weight


@pytest.mark.parametrize("wrong", [zeros_in_a_block, columns_of_another_block, not_a_number])
@pytest.mark.parametrize("quantised_before", [False, True])
def test_a_kernel_that_dequantises_wrongly_is_refused(
    wrong: Callable[[Tensor], Tensor], quantised_before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like bitsandbytes 0.50.2 on a CPU with AVX512-BF16 for rows that are not a whole number of blocks."""
    base = save_base(tmp_path)
    if quantised_before:
        load(base).save_pretrained(tmp_path / "quantised")
        base = str(tmp_path / "quantised")
    right = functional.dequantize_4bit

    def some_wrong(*args: Any, **options: Any) -> Tensor:
        weight = right(*args, **options)
        return wrong(weight) if weight.shape == (64, 128) else weight

    monkeypatch.setattr(functional, "dequantize_4bit", some_wrong)
    with pytest.raises(UserError) as error:
        load(base)
    assert str(error.value).startswith(f"lora.load_in_4bit: bitsandbytes {bitsandbytes.__version__} computes wrong")
    assert "for 2 of 14 layers, of shape 64 x 128, such as model.layers.0.mlp.down_proj:" in str(error.value)
    assert describe_processor() in str(error.value) or DEVICE != "cpu"


def test_a_kernel_that_multiplies_wrongly_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Linear4bit.forward
    monkeypatch.setattr(Linear4bit, "forward", lambda layer, x: 1.01 * right(layer, x))
    with pytest.raises(UserError, match=r"for 14 of 14 layers, of shape .*such as model\.layers\.0\.self_attn\.q_proj"):
        load(save_base(tmp_path))


@pytest.mark.parametrize("rows", [1, 2])
def test_the_product_of_one_row_is_compared_and_that_of_several(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bitsandbytes has a kernel for each."""
    right = Linear4bit.forward
    monkeypatch.setattr(Linear4bit, "forward", lambda layer, x: right(layer, x) * (1.01 if len(x) == rows else 1.0))
    with pytest.raises(UserError, match="for 14 of 14 layers"):
        load(save_base(tmp_path))


@pytest.mark.parametrize("double", [True, False])
def test_weights_are_compared_in_pieces_with_the_same_result(double: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(1100, 96, generator=generator) * torch.rand(1100, 1, generator=generator)
    right, results = functional.dequantize_4bit, []
    monkeypatch.setattr(functional, "dequantize_4bit", lambda *args, **options: 1.5 * right(*args, **options))
    for blocks in (1, 2, 1000):
        monkeypatch.setattr(quantised, "_PIECE_BLOCKS", blocks)
        with compared_weights() as errors:
            functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=double)
        results.append(errors)
    assert results[0] == results[1] == results[2] and [*results[0]] == [weight.shape]


@pytest.mark.parametrize(
    ("saved", "named"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}, "bitsandbytes in 8 bits"),
    ],
)
def test_a_model_quantised_in_another_way_is_refused(saved: dict[str, Any], named: str, tmp_path: Path) -> None:
    base = save_base(tmp_path)
    description = Path(base) / "config.json"
    description.write_text(json.dumps(json.loads(description.read_text()) | {"quantization_config": saved}))
    with pytest.raises(UserError, match=f"lora.load_in_4bit: the model is quantised with {named} already"):
        load(base)


@given(
    seed=st.integers(0, 1000),
    blocks=st.tuples(st.integers(1, 40), st.integers(1, 9)),
    scale=st.sampled_from([1e-4, 0.02, 30.0]),
    outlier=st.sampled_from([0.0, 1.0, 50.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_right_kernels_are_not_refused(
    seed: int, blocks: tuple[int, int], scale: float, outlier: float, dtype: torch.dtype
) -> None:
    """For any weights: outliers, blocks of zeros, several precisions."""
    generator = torch.Generator().manual_seed(seed)
    weight = scale * torch.randn(blocks[0], 64 * blocks[1], generator=generator)
    weight[0, :64] = 0
    weight[-1, -1] = outlier
    with compared_weights() as errors:
        functional.quantize_4bit(weight.to(dtype), quant_type="nf4")
    assert not errors


@pytest.mark.parametrize("family", FAMILIES)
def test_training_is_that_of_lora_on_the_dequantised_weights(
    family: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, batches: list[Batch]
) -> None:
    model = adapted(save_base(tmp_path, family))
    plain = make(family)
    plain.load_state_dict(dequantised_state(load(str(tmp_path / "base"))))
    add_adapters(plain, LORA.model_copy(update={"load_in_4bit": False}), seed=0, base="base", revision=None)
    trained(plain)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if ".lora_" not in name}
    got, expected = learner(model).step(batches, step=0), learner(plain).step(batches, step=0)
    assert expected.metrics["grad_norm"] > 0 and expected.metrics["kl"] > 0
    for name in ("loss", "kl", "grad_norm"):
        value = expected.metrics[name]
        assert got.metrics[name] == pytest.approx(value, abs=rounding(max(1.0, abs(value))))
    gradients = {name: parameter.grad for name, parameter in adapters(plain).items()}
    for name, parameter in adapters(model).items():
        slope = gradients[name]
        assert parameter.grad is not None and slope is not None
        torch.testing.assert_close(parameter.grad, slope, rtol=2e-4, atol=1e-4 * float(slope.abs().max()))
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())


def test_without_adapters_it_is_the_base(tmp_path: Path, batches: list[Batch]) -> None:
    base = save_base(tmp_path)
    model = load(base)
    add_adapters(model, LORA, seed=0, base=base, revision=None)
    begun = logps(load(base))
    policy = learner(model)
    assert torch.equal(logps(model), begun) and policy.kl(batches) == 0
    policy.step(batches, step=0)
    assert policy.kl(batches) > 0 and not torch.equal(logps(model), begun)
    with adapters_off(model):
        assert torch.equal(logps(model), begun)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_worker_has_the_trainers_log_probs_to_the_bit(
    family: str, dtype: Any, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    base = save_base(tmp_path, family)
    model = adapted(base, dtype)
    assert {tensor.dtype for tensor in policy_state(model).values()} == {getattr(torch, dtype)}
    forward, published = choose_forward(model), [tmp_path / "1", tmp_path / "2"]
    expected = []
    for directory in published:
        save_policy(model, tokenizer, directory)
        with torch.inference_mode():
            expected += [[forward([group], [1.0]).numpy() for group in GROUPS]]
        for parameter in adapters(model).values():
            parameter.data *= -0.5
    sampler = HFSampler(load(base, dtype), tokenizer)
    for version in (0, 1, 0):
        sampler.load(published[version])
        for group, values in zip(GROUPS, expected[version], strict=True):
            np.testing.assert_array_equal(sampler.logps(group), values)
    assert all(np.abs(first - second).max() > 0.05 for first, second in zip(*expected, strict=True))


def test_adapters_of_another_model_change_nothing(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    save_policy(adapted(save_base(tmp_path)), tokenizer, tmp_path / "published")
    save_policy(adapted(save_base(tmp_path / "other", "gpt2")), tokenizer, tmp_path / "of gpt2")
    sampler = HFSampler(load(str(tmp_path / "base")), tokenizer)
    sampler.load(tmp_path / "published")
    before = sampler.logps(GROUPS[0])
    with pytest.raises(UserError, match=r"h\.0\..*not there; give the base model"):
        sampler.load(tmp_path / "of gpt2")
    np.testing.assert_array_equal(sampler.logps(GROUPS[0]), before)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_saved_model_is_whole_and_plain(family: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    model = adapted(save_base(tmp_path, family))
    expected = logps(model)
    save_whole(model, tokenizer, tmp_path / "model")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert whole.dtype == torch.float32 and not hasattr(whole.config, "quantization_config")
    assert not any(quantised_layers(whole)) and not (tmp_path / "model" / "adapter_config.json").exists()
    torch.testing.assert_close(logps(whole.eval()), expected, rtol=0, atol=rounding(expected.abs().max()))
    assert torch.equal(logps(model), expected)
    checkpoint = Checkpoints(tmp_path / "checkpoints", keep=1).begin(
        TrainState(step=1), partial(write_weights, model, tokenizer, learner(model).weights)
    )
    export(saved := checkpoint.finish(), tmp_path / "exported")
    show_checkpoint(saved, TrainerState(), int)  # which hides config.json
    export(saved, tmp_path / "exported from a link")
    for place in ("exported", "exported from a link"):
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / place).state_dict()
        assert all(torch.equal(tensor, exported[name]) for name, tensor in whole.state_dict().items())


@pytest.mark.parametrize("family", ["llama", "qwen2-tied", "gpt2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_is_as_planned(family: str, dtype: Any, tmp_path: Path) -> None:
    base = save_base(tmp_path, family)
    model, width = load(base, dtype), getattr(torch, dtype).itemsize
    state = {tensor.data_ptr(): tensor.nbytes for tensor in model.state_dict().values()}
    layers = quantised_layers(model)
    # Of each layer two tables, two more numbers, and the names of all.
    tables = sum(
        tensor.nbytes
        for name, tensor in model.state_dict().items()
        if name.endswith(("quant_map", "nested_offset")) or "quant_state" in name
    )
    shape = Shape.of(load_outline(base, revision=None), in_4bit=True)
    planned = shape.weights(width)
    assert planned["a dequantised matrix"] == width * max(
        layer.in_features * layer.out_features for layer in layers.values()
    )
    # A scale of its own for the last block of each layer, if that is not full.
    assert 0 <= sum(state.values()) - tables - planned["weights"] <= 5 * len(layers)


def wide(family: VisionFamily) -> VisionFamily:
    config = family.config
    text, tower = config["text_config"] | WIDE, config["vision_config"] | {"hidden_size": 64, "intermediate_size": 128}
    if "out_hidden_size" in tower:
        tower["out_hidden_size"] = 64
        text["rope_parameters"] = text["rope_parameters"] | {"mrope_section": [2, 3, 3]}
    return replace(family, config={**config, "text_config": text, "vision_config": tower})


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl"])
def test_a_vision_tower_is_quantised_too(family: str, tmp_path: Path) -> None:
    make_vision_model(wide(VISION_FAMILIES[family])).save_pretrained(tmp_path)
    model = load(str(tmp_path))
    layers = quantised_layers(model)
    assert any(name.startswith(tuple(vision_tower(model))) for name in layers)
    assert choose_forward(model).name == "packed"  # compared with a plain one
    planned = Shape.of(load_outline(str(tmp_path), revision=None), in_4bit=True).quantised
    assert planned == sum(layer.in_features * layer.out_features for layer in layers.values())


def test_bitsandbytes_that_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        "policy_trainer.weights.quantised.find_spec", lambda name: None if name == "bitsandbytes" else find_spec(name)
    )
    with pytest.raises(UserError, match=r"^lora\.load_in_4bit: bitsandbytes .*pip install 'tandem-grpo\[qlora\]'"):
        load(save_base(tmp_path))
    check_quantisation(LoraConfig(rank=3))


def learner(model: PreTrainedModel) -> Any:
    return make_learner(
        model,
        choose_forward(model),
        loss=LossConfig(beta=0.1, old_logps="current"),
        optimizer=OptimizerConfig(learning_rate=1e-2, max_grad_norm=1e9),
        micro_batch_tokens=20,
        reference="adapter-off",
    )


@pytest.fixture
def batches(make_scored: Make) -> list[Batch]:
    return [
        make_scored([3, 9, 5], [[4, 8], [5, 6, 7], [9]], [0.0, 1.0, 0.5], number=1),
        make_scored([11, 12], [[4, 8, 20, 21], [30]], [1.0, 0.0], number=2, temperature=0.8),
    ]
