"""The tiled head against float64 logits that exist as a whole."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shared.logprobs import head, tiles
from shared.logprobs.head import LMHead, target_logps, target_logps_and_entropies, target_logps_and_likeliest
from shared.logprobs.kept_tokens import KeptTokens
from shared.sampling_mask import SamplingMask
from tests.device import DEVICE
from tests.rounding import rounding
from tests.shared.logprobs.families import weights

HIDDEN, VOCABULARY, TOKENS = 16, 67, 19
# Tokens and logits of a tile, and logits that are kept for the backward: none, some, all.
TILES = [pytest.param((1, 1, 0), marks=pytest.mark.slow), (5, 60, 700), (8, 536, 0), (1024, 2**22, 2**22)]


class Inputs:
    """Leaves that gradients reach, in `dtype`; the same numbers for every dtype."""

    def __init__(self, dtype: torch.dtype = torch.float32, *, bias: bool = True, frozen: str = "") -> None:
        """frozen: `weight`, or `weight and bias`."""
        generator = torch.Generator().manual_seed(0)

        def leaf(*shape: int) -> Tensor:
            # Rounded to bf16, so that every dtype has the same numbers.
            return torch.randn(*shape, generator=generator).bfloat16().to(dtype).requires_grad_()

        self.hidden, self.weight, self.bias = leaf(TOKENS, HIDDEN), leaf(VOCABULARY, HIDDEN), leaf(VOCABULARY)
        if not bias:
            self.bias = None
        self.weight.requires_grad_("weight" not in frozen)
        if self.bias is not None:
            self.bias.requires_grad_("bias" not in frozen)
        self.targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
        self.targets[:2] = torch.tensor([0, VOCABULARY - 1])
        self.temperatures = torch.linspace(0.6, 1.7, TOKENS).to(tiles.wide(dtype))

    def head(self, softcap: float | None) -> LMHead:
        return LMHead(self.weight, self.bias, softcap)

    def leaves(self) -> list[Tensor]:
        return [leaf for leaf in (self.hidden, self.weight, self.bias) if leaf is not None and leaf.requires_grad]

    def mask(self) -> SamplingMask:
        """Each third position keeps all tokens, and the first its target only."""
        generator = np.random.default_rng(0)
        kept = [
            [target, *generator.integers(0, VOCABULARY, 10 * position)] if position % 3 != 2 else []
            for position, target in enumerate(self.targets.tolist())
        ]
        return SamplingMask.of([np.array(ids, np.int32) for ids in kept])


def naive(inputs: Inputs, softcap: float | None, mask: SamplingMask | None = None) -> tuple[Tensor, Tensor]:
    """float64 log-probs and entropies, differentiable."""
    logits = inputs.hidden @ inputs.weight.T + (0 if inputs.bias is None else inputs.bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / inputs.temperatures.double()[:, None]
    ids = [np.zeros(0)] * TOKENS if mask is None else np.split(mask.token_ids, np.cumsum(mask.counts)[:-1])
    logps, entropies = [], []
    for row, target, kept in zip(logits, inputs.targets.tolist(), ids, strict=True):
        tokens = sorted({int(token) for token in kept}) or list(range(VOCABULARY))
        of_kept = row[tokens].log_softmax(dim=0)
        logps.append(of_kept[tokens.index(target)])
        entropies.append(-(of_kept.exp() * of_kept).sum())
    return torch.stack(logps), torch.stack(entropies)


@pytest.fixture(params=TILES, ids=str)
def tiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, logits, kept = request.param
    monkeypatch.setattr(tiles, "_TILE_TOKENS", tokens)
    monkeypatch.setitem(tiles._TILE_LOGITS, DEVICE.type, logits)
    monkeypatch.setattr(head, "KEPT_LOGITS", kept)


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_the_likeliest_tokens(softcap: float | None) -> None:
    inputs = Inputs()
    head = inputs.head(softcap)
    with torch.no_grad():
        exact = Inputs(torch.float64)
        logits = exact.hidden @ exact.weight.T + (0 if exact.bias is None else exact.bias)
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        logps = torch.log_softmax(logits / inputs.temperatures.double()[:, None], dim=1)
    inputs.targets[::2] = logps.argmax(dim=1)[::2]  # every second target is the likeliest token
    got, tokens, highest = head.logps_and_likeliest(inputs.hidden, inputs.targets, inputs.temperatures)
    assert torch.equal(got, head.logps(inputs.hidden, inputs.targets, inputs.temperatures))
    assert torch.equal(tokens, logps.argmax(dim=1))
    assert torch.equal(highest[::2], got[::2]) and (highest[1::2] > got[1::2]).any()
    assert (highest - logps.amax(dim=1)).abs().max() < rounding(16)
    whole = target_logps_and_likeliest(logits.float(), inputs.targets, 1.0)
    assert torch.equal(whole[1], tokens) and torch.equal(whole[2][::2], whole[0][::2])


# The factors of log-probs and entropies in a loss.
LOSSES = {"log-probs": (1.0, 0.0), "entropies": (0.0, 1.0), "both": (1.0, -0.3)}


def loss(values: tuple[Tensor, Tensor], of_logps: float, of_entropies: float) -> Tensor:
    """A term with the factor 0 is left out, so that autograd passes None for it."""
    factors = (of_logps, of_entropies)
    parts = [(term * weights(TOKENS)).sum() * by for term, by in zip(values, factors, strict=True) if by]
    return torch.stack(parts).sum()


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize("by", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("frozen", ["", "weight", "weight and bias"])
def test_values_and_gradients(
    softcap: float | None, bias: bool, by: tuple[float, float], masked: bool, frozen: str
) -> None:
    ours, exact = (Inputs(torch.float64, bias=bias, frozen=frozen) for _ in range(2))
    mask = ours.mask() if masked else None
    kept = None if mask is None else KeptTokens.of(mask, torch.device("cpu"))
    logps, entropy = ours.head(softcap).logps_and_entropy(
        ours.hidden, ours.targets, ours.temperatures, kept, entropy_grad=by[1] != 0
    )
    want, want_entropy = naive(exact, softcap, mask)
    assert (logps - want).abs().max() < 1e-9
    assert (entropy - want_entropy).abs().max() < 1e-9
    assert want_entropy.std() > 0.1
    loss((logps, entropy), *by).backward()
    loss((want, want_entropy), *by).backward()
    for got, right in zip(ours.leaves(), exact.leaves(), strict=True):
        assert got.grad is not None and right.grad is not None
        assert (got.grad - right.grad).norm() < 1e-9 * right.grad.norm()


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize("frozen", ["", "weight and bias"])
def test_bfloat16_is_rounded_only_in_the_matrix_product(frozen: str) -> None:
    """The softmax is float32's, and the gradient of the weights is summed in float32 however many tiles there are."""
    ours, exact = Inputs(torch.bfloat16, frozen=frozen), Inputs(torch.float64, frozen=frozen)
    logps, entropy = ours.head(None).logps_and_entropy(
        ours.hidden, ours.targets, ours.temperatures, entropy_grad=not frozen
    )
    want, want_entropy = naive(exact, None)
    assert logps.dtype == entropy.dtype == torch.float32
    logits = (
        torch.nn.functional.linear(ours.hidden, ours.weight, ours.bias).double() / ours.temperatures.double()[:, None]
    )
    assert (logps - logits.log_softmax(dim=1)[torch.arange(TOKENS), ours.targets]).abs().max() < 0.2
    assert (logps - want).abs().mean() < 3e-2
    assert (entropy - want_entropy).abs().mean() < 3e-2
    by = LOSSES["log-probs" if frozen else "both"]
    loss((logps, entropy), *by).backward()
    loss((want, want_entropy), *by).backward()
    for got, right in zip(ours.leaves(), exact.leaves(), strict=True):
        assert got.grad is not None and right.grad is not None
        assert got.grad.dtype == torch.bfloat16
        assert (got.grad - right.grad).norm() < 2e-2 * right.grad.norm()


def test_softmax_is_not_taken_in_half_precision() -> None:
    """Of whole logits and of tiles alike. In half precision both would be wrong by 1e-2 and more."""
    logits = (torch.randn(50, 5000, generator=torch.Generator().manual_seed(0)) * 8).bfloat16()
    targets = torch.arange(50)
    want = torch.log_softmax(logits.double() / 0.9, dim=-1)
    got, entropy = target_logps_and_entropies(logits, targets, 0.9)
    assert torch.equal(got, target_logps(logits, targets, 0.9))
    # An identity in place of hidden states: the logits are the weights themselves.
    tiled = LMHead(logits.T.contiguous(), None, None).logps(torch.eye(50).bfloat16(), targets, torch.full((50,), 0.9))
    bound = rounding(logits.abs().max(), layers=0)
    assert bound < 1e-3
    for logps in (got, tiled):
        assert logps.dtype == torch.float32
        assert (logps - want[targets, targets]).abs().max() < bound
    assert (entropy + (want.exp() * want).sum(dim=1)).abs().max() < bound


def test_logits_far_apart() -> None:
    """Tiles whose largest logits lie hundreds apart neither overflow nor lose digits."""
    weight = torch.zeros(VOCABULARY, 1)
    weight[:, 0] = torch.linspace(-700, 300, VOCABULARY)
    weight[7, 0] = 300.5
    hidden, targets = torch.ones(2, 1), torch.tensor([7, VOCABULARY - 1])
    logps, entropy = LMHead(weight, None, None).logps_and_entropy(hidden, targets, torch.ones(2))
    want = torch.log_softmax(weight[:, 0].double(), dim=0)
    bound = rounding(weight.abs().max(), layers=0)
    assert (logps - want[targets]).abs().max() < bound
    assert (entropy + (want.exp() * want).sum()).abs().max() < bound


def test_a_sure_distribution_has_finite_gradients() -> None:
    """Probabilities that underflow have log-probs far below 0: their product is 0."""
    weight = torch.zeros(VOCABULARY, 1)
    weight[7, 0] = 500.0
    hidden = torch.ones(2, 1, requires_grad=True)
    _, entropy = LMHead(weight, None, None).logps_and_entropy(hidden, torch.tensor([7, 0]), torch.ones(2))
    _, whole = target_logps_and_entropies(hidden @ weight.T, torch.tensor([7, 0]), 1.0)
    for values in (entropy, whole):
        [gradient] = torch.autograd.grad(values.sum(), hidden)
        assert torch.equal(values, torch.zeros(2)) and torch.equal(gradient, torch.zeros(2, 1))


@pytest.mark.usefixtures("tiled")
def test_an_unused_entropy_changes_no_bit_of_the_gradient() -> None:
    with_entropy, without = Inputs(), Inputs()
    logps, _ = with_entropy.head(3.0).logps_and_entropy(
        with_entropy.hidden, with_entropy.targets, with_entropy.temperatures
    )
    (logps * weights(TOKENS)).sum().backward()
    (without.head(3.0).logps(without.hidden, without.targets, without.temperatures) * weights(TOKENS)).sum().backward()
    for leaf, other in zip(with_entropy.leaves(), without.leaves(), strict=True):
        assert leaf.grad is not None and other.grad is not None
        assert torch.equal(leaf.grad, other.grad)


def test_a_frozen_head_computes_its_logits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps none for the backward either. Only a loss of entropies computes them again."""
    monkeypatch.setattr(head, "KEPT_LOGITS", 0)
    computed: list[slice] = []
    logits = tiles.Tiles.logits

    def count(self: tiles.Tiles, tokens: slice, vocabulary: slice, *, in_buffer: bool) -> Tensor:
        computed.append(vocabulary)
        return logits(self, tokens, vocabulary, in_buffer=in_buffer)

    monkeypatch.setattr(tiles.Tiles, "logits", count)
    for frozen, by, times in (
        ("", "log-probs", 2),
        ("weight and bias", "log-probs", 1),
        ("weight and bias", "both", 2),
    ):
        inputs = Inputs(frozen=frozen)
        computed.clear()
        values = inputs.head(None).logps_and_entropy(
            inputs.hidden, inputs.targets, inputs.temperatures, entropy_grad=by == "both"
        )
        assert values[1].requires_grad == (by == "both")
        loss(values, *LOSSES[by]).backward()
        assert len(computed) == times
        assert (inputs.weight.grad is None) == bool(frozen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_frozen_head_is_precise_where_the_target_is_almost_sure(dtype: torch.dtype) -> None:
    """Its gradient is far smaller than the target's row, in whose rounding it must not be lost."""
    weight = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(0)).to(dtype)
    hidden = (weight[7] * 1.5).requires_grad_()
    [logp] = LMHead(weight, None, None).logps(hidden[None], torch.tensor([7]), torch.ones(1))
    assert -1e-3 < logp < -1e-7
    logp.backward()
    exact = hidden.detach().double().requires_grad_()
    (exact @ weight.double().T).log_softmax(dim=0)[7].backward()
    assert hidden.grad is not None and exact.grad is not None
    # The product rounds the logits; the log-sum-exp, as large as the largest of them, is rounded in float32.
    largest = (exact @ weight[7].double()).item()
    bound = largest * (torch.finfo(dtype).eps * exact.grad.norm() + 2**-23 * weight[7].double().norm())
    assert bound < exact.grad.norm() / 2
    assert (hidden.grad - exact.grad).norm() < bound


def test_whole_logits_are_never_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that the forward keeps for the backward, or makes on its way, is as large as (C, V)."""
    monkeypatch.setattr(tiles, "_TILE_TOKENS", 8)
    monkeypatch.setitem(tiles._TILE_LOGITS, DEVICE.type, 160)
    sizes: list[int] = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                sizes.append(result.numel())
            return result

    inputs = Inputs(bias=False)
    with Watch():
        inputs.head(None).logps(inputs.hidden, inputs.targets, inputs.temperatures)
    assert 0 < max(sizes) <= VOCABULARY * HIDDEN  # the weights are the largest there is
    assert VOCABULARY * HIDDEN < TOKENS * VOCABULARY
