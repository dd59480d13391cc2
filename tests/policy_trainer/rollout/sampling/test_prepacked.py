"""Layers with prepacked weights: what they compute, which ones they are, and that nothing of it stays."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from policy_trainer.data.completion import group_tokens
from policy_trainer.rollout.sampling import prepacked as module
from policy_trainer.rollout.sampling.hf import HFSampler
from policy_trainer.rollout.sampling.prepacked import prepacked
from policy_trainer.rollout.sampling.sampler import SamplingParams, sample
from shared.models import save_model
from tests.device import DEVICE
from tests.policy_trainer.rollout.sampling.architectures import PROMPTS, texts

Make = Callable[..., Any]
pytestmark = [
    pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch has no oneDNN"),
    pytest.mark.skipif(DEVICE.type != "cpu", reason="only a CPU's weights are prepacked"),
]


class Subclass(nn.Linear):
    pass


@pytest.fixture
def layers() -> nn.ModuleList:
    torch.manual_seed(0)
    changed = nn.Linear(400, 300)
    changed.forward = nn.Linear(400, 300).forward
    plain = [nn.Linear(400, 300), nn.Linear(400, 300, bias=False), nn.Linear(30, 30)]
    return nn.ModuleList([*plain, Subclass(400, 300), changed])


def is_prepacked(layer: nn.Module) -> bool:
    return getattr(vars(layer).get("forward"), "func", None) is module._product


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(400,), (1, 400), (3, 1, 400), (2, 70, 400), (0, 400)])
@torch.inference_mode()
def test_the_products_are_the_same(layers: nn.ModuleList, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor has no products in bfloat16")
    layers = layers.to(dtype)
    inputs = torch.randn(shape).to(dtype)
    expected = [layer(inputs) for layer in layers[:2]]
    with prepacked(layers):
        assert all(map(is_prepacked, layers[:2]))
        for layer, want in zip(layers[:2], expected, strict=True):
            # Sums of 400 terms: of about 400^0.5 roundings, and one of the result.
            torch.testing.assert_close(layer(inputs), want, atol=40 * torch.finfo(torch.float32).eps, rtol=2**-7)


def test_only_large_plain_layers_are_and_only_within_the_block(layers: nn.ModuleList) -> None:
    before = [vars(layer).get("forward") for layer in layers]
    with pytest.raises(ZeroDivisionError), prepacked(layers):
        assert [is_prepacked(layer) for layer in layers] == [True, True, False, False, False]
        raise ZeroDivisionError
    assert [vars(layer).get("forward") for layer in layers] == before


def test_the_copies_have_a_limit(layers: nn.ModuleList, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PREPACKED_BYTES", layers[0].weight.nbytes)
    with prepacked(layers):
        assert [is_prepacked(layer) for layer in layers[:2]] == [True, False]


def test_a_wrong_kernel_is_not_used(layers: nn.ModuleList, monkeypatch: pytest.MonkeyPatch) -> None:
    right = module._product

    def wrong(packed: Tensor, layer: nn.Linear, inputs: Tensor) -> Tensor:
        return right(packed, layer, inputs) * (1.1 if layer.bias is None else 1)

    monkeypatch.setattr(module, "_product", wrong)
    with prepacked(layers):
        assert [is_prepacked(layer) for layer in layers[:2]] == [True, False]


def test_inputs_of_another_dtype_are_computed_as_before(layers: nn.ModuleList) -> None:
    inputs = torch.randn(2, 400).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        expected = layers[0](inputs)
        with prepacked(layers):
            assert torch.equal(layers[0](inputs), expected)


def test_sampling_uses_the_weights_of_the_latest_load(
    make_tiny: Make, tokenizer: PreTrainedTokenizerFast, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their log-probs are those of a plain forward, before and after."""
    monkeypatch.setattr(module, "_LEAST", 1)
    model, other = make_tiny(vocabulary=len(tokenizer)), make_tiny(vocabulary=len(tokenizer), seed=1)
    save_model(other, tokenizer, tmp_path)
    sampler = HFSampler(model, tokenizer)
    [prompt] = texts(PROMPTS[:1])
    drawn = []
    for _ in range(2):
        [group] = sample(sampler, [prompt], SamplingParams(4, 16, temperature=1.0), seed=0)
        tokens, _, _ = group_tokens(prompt, group)
        sampled = torch.tensor([logp for completion in group for logp in completion.logps])
        torch.testing.assert_close(sampled, torch.tensor(sampler.logps(tokens)), atol=1e-4, rtol=0)
        drawn.append([completion.ids.tolist() for completion in group])
        sampler.load(tmp_path)
    assert drawn[0] != drawn[1]
