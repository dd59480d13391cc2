"""Kernels that libraries choose by processor and that nothing checks when they are loaded.

Each is compared with float64. A failure names the processor, since another one may run another kernel.
"""

import copy

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from shared.devices import describe_device, describe_processor
from tests.device import DEVICE

DTYPES = [torch.float32, torch.bfloat16]
# (in, out): SmolLM2 135M and Qwen2.5 0.5B have such layers; the last shapes do not fill a register.
LAYERS = [(576, 1536), (1536, 576), (896, 128), (64, 64), (33, 47)]
ROWS = [1, 2, 7, 64, 129]


def assert_near(got: Tensor, expected: Tensor, magnitude: Tensor, *, roundings: int = 4) -> None:
    """magnitude: the sum of the absolute values of the summands, of the same shape."""
    assert got.dtype in DTYPES and expected.dtype == torch.float64
    error = ((got.double() - expected).abs() / magnitude.clamp(min=1e-30)).max()
    where = describe_device(str(DEVICE)) if DEVICE.type == "cuda" else describe_processor()
    assert error <= roundings * torch.finfo(got.dtype).eps, f"{got.dtype} on {where}: {float(error):.2g}"


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", LAYERS)
def test_linear_layers_and_their_gradients(layer: tuple[int, int], dtype: torch.dtype) -> None:
    weight = numbers(layer[1], layer[0], dtype=dtype, seed=1).requires_grad_()
    for rows in ROWS:
        inputs = numbers(rows, layer[0], dtype=dtype, seed=rows).requires_grad_()
        slope = numbers(rows, layer[1], dtype=dtype, seed=2)
        output = functional.linear(inputs, weight)
        of_weight, of_inputs = torch.autograd.grad(output, (weight, inputs), slope)
        w, x, s = weight.detach().double(), inputs.detach().double(), slope.double()
        assert_near(output, x @ w.T, x.abs() @ w.T.abs())
        assert_near(of_weight, s.T @ x, s.T.abs() @ x.abs())
        assert_near(of_inputs, s @ w, s.abs() @ w.abs())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 64, 80, 128, 256])
@pytest.mark.parametrize("lengths", [(1, 1), (1, 70), (33, 33), (70, 70), (5, 200)])
def test_attention(lengths: tuple[int, int], head_dim: int, dtype: torch.dtype) -> None:
    """Queries at the end of the keys: for equal lengths `is_causal`, for a completion a mask."""
    queries, keys = lengths
    query = numbers(1, 4, queries, head_dim, dtype=dtype, seed=1)
    key, value = (numbers(1, 2, keys, head_dim, dtype=dtype, seed=seed) for seed in (2, 3))
    seen = torch.ones(queries, keys, dtype=torch.bool, device=DEVICE).tril(keys - queries)
    same = queries == keys
    got = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=None if same else seen, is_causal=same, enable_gqa=True
    )
    q, k, v = query.double(), *(each.double().repeat_interleave(2, dim=1) for each in (key, value))
    weights = (q @ k.mT / head_dim**0.5).masked_fill(~seen, -torch.inf).softmax(-1)
    # A score of size s is rounded by s * eps, and its weight by as much.
    scores = float((q.abs() @ k.abs().mT / head_dim**0.5).max())
    assert_near(got, weights @ v, weights @ v.abs(), roundings=4 + int(scores))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("width", [32, 64, 576])
def test_mixtures_of_experts(width: int, implementation: str, dtype: torch.dtype) -> None:
    config = MixtralConfig(hidden_size=width, intermediate_size=2 * width, num_local_experts=4, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    experts = MixtralExperts(config).to(DEVICE)
    for number, parameter in enumerate(experts.parameters()):
        parameter.data = numbers(*parameter.shape, dtype=dtype, seed=number) / width**0.5
    double = copy.deepcopy(experts).double()
    config._experts_implementation = implementation
    for rows in (1, 7, 64):
        inputs = numbers(rows, width, dtype=dtype, seed=rows)
        chosen = torch.arange(2 * rows, device=DEVICE).view(rows, 2) % 4
        shares = torch.tensor([0.75, 0.25], device=DEVICE).expand(rows, 2)
        with torch.no_grad():
            got = experts(inputs, chosen, shares.to(dtype))
            expected = _experts(double, inputs.double(), chosen, shares.double())
        assert_near(got, expected, expected.abs().max().expand_as(expected), roundings=64)


def _experts(experts: MixtralExperts, inputs: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """One token and one expert at a time."""
    weights = dict(experts.named_parameters())
    rows = torch.zeros_like(inputs)
    for token, places in enumerate(chosen.tolist()):
        for share, expert in zip(shares[token], places, strict=True):
            gate, up = (weights["gate_up_proj"][expert] @ inputs[token]).chunk(2)
            rows[token] += share * (weights["down_proj"][expert] @ (functional.silu(gate) * up))
    return rows


def test_the_processor_is_named() -> None:
    name, *instructions = describe_processor().split(", ")
    assert name and (not instructions or set(instructions) & {"avx2", "asimd", "avx512f"})
