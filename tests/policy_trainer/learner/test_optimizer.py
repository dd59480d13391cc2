"""Learning rates by hand; masters beside AdamW by hand in float64, and what bfloat16 rounds away without them."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from policy_trainer.config import OptimizerConfig
from policy_trainer.learner.optimizer import MasterWeights, OwnWeights, Weights, lr_factor, make_weights
from shared.errors import UserError

Make = Callable[..., PreTrainedModel]


@pytest.mark.parametrize(
    ("config", "factors"),
    [
        (OptimizerConfig(), [1, 1, 1, 1, 1]),
        (OptimizerConfig(warmup_steps=2), [1 / 2, 1, 1, 1, 1]),
        (OptimizerConfig(min_lr_rate=0.0), [1, 3 / 4, 1 / 2, 1 / 4, 0]),
        (OptimizerConfig(min_lr_rate=0.5), [1, 7 / 8, 3 / 4, 5 / 8, 1 / 2]),
        (OptimizerConfig(warmup_steps=4, min_lr_rate=0.2), [1 / 4, 0.8 / 2, 0.6 * 3 / 4, 0.4, 0.2]),
        (OptimizerConfig(warmup_steps=10), [0.1, 0.2, 0.3, 0.4, 0.5]),
        # 0.3 of 5 steps, rounded up; the longer of the two.
        (OptimizerConfig(warmup_ratio=0.3), [1 / 2, 1, 1, 1, 1]),
        (OptimizerConfig(warmup_ratio=0.3, warmup_steps=3), [1 / 3, 2 / 3, 1, 1, 1]),
        (OptimizerConfig(warmup_ratio=0.9, warmup_steps=3), [0.2, 0.4, 0.6, 0.8, 1]),
        (
            OptimizerConfig(lr_scheduler_type="cosine", min_lr_rate=0.0),
            [1, (1 + math.sqrt(0.5)) / 2, 1 / 2, (1 - math.sqrt(0.5)) / 2, 0],
        ),
        (
            OptimizerConfig(lr_scheduler_type="cosine", min_lr_rate=0.5, warmup_steps=2),
            [1 / 2, (3 + math.sqrt(0.5)) / 4, 3 / 4, (3 - math.sqrt(0.5)) / 4, 1 / 2],
        ),
        (OptimizerConfig(lr_scheduler_type="cosine"), [1, 1, 1, 1, 1]),
    ],
)
def test_learning_rate_by_hand(config: OptimizerConfig, factors: list[float]) -> None:
    assert [lr_factor(step, config, 5) for step in range(5)] == pytest.approx(factors)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_learning_rate_of_a_run_of_one_step_and_beyond_the_end(schedule: str) -> None:
    config = OptimizerConfig.model_validate({"lr_scheduler_type": schedule, "min_lr_rate": 0.1})
    assert lr_factor(0, config, 1) == 1
    assert lr_factor(99, config, 5) == pytest.approx(0.1)


@pytest.fixture
def model(make_tiny: Make) -> PreTrainedModel:
    return make_tiny(dtype=torch.bfloat16)


def noise(model: PreTrainedModel, seed: int) -> dict[str, Tensor]:
    """A bfloat16 gradient for each parameter."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.shape, generator=generator).bfloat16() for name, p in model.named_parameters()}


def backward(model: PreTrainedModel, gradients: dict[str, Tensor]) -> None:
    """One backward whose gradients are these, exactly: that of the sum of each parameter times its gradient."""
    loss = torch.zeros(())
    for name, parameter in model.named_parameters():
        loss = loss + (parameter * gradients[name]).sum()
    loss.backward()


def step(weights: Weights, lr: float) -> None:
    for group in weights.optimizer.param_groups:
        group["lr"] = lr
    weights.step()
    weights.optimizer.zero_grad(set_to_none=True)


class TestWhichIsTaken:
    def test_float32_steps_the_models_own_without_a_copy(self, make_tiny: Make) -> None:
        model = make_tiny()
        weights = make_weights(model, OptimizerConfig())
        assert isinstance(weights, OwnWeights) and not weights.masters
        assert all(weights.stepped[name] is parameter for name, parameter in model.named_parameters())

    def test_bfloat16_has_masters_unless_told_otherwise(self, model: PreTrainedModel) -> None:
        assert isinstance(make_weights(model, OptimizerConfig(master_weights="none")), OwnWeights)
        weights = make_weights(model, OptimizerConfig())
        assert isinstance(weights, MasterWeights)
        assert {master.dtype for master in weights.masters.values()} == {torch.float32}
        assert model.dtype == torch.bfloat16

    def test_float16_is_refused_with_the_remedy(self, make_tiny: Make) -> None:
        """As a model that was saved so comes with dtype auto."""
        with pytest.raises(UserError, match=r"dtype: .* bfloat16"):
            make_weights(make_tiny(dtype=torch.float16), OptimizerConfig())

    @pytest.mark.parametrize("tied", [True, False])
    def test_a_tied_weight_has_one_master(self, make_tiny: Make, tied: bool) -> None:
        model = make_tiny(tied=tied, dtype=torch.bfloat16)
        names = make_weights(model, OptimizerConfig()).masters
        assert ("lm_head.weight" in names) is not tied
        assert len(names) == len(list(model.parameters()))


class TestMasters:
    def test_are_adamw_by_hand_and_the_model_is_rounded_from_them(self, model: PreTrainedModel) -> None:
        """Loshchilov and Hutter, algorithm 2, in float64, on gradients of two backwards each."""
        config = OptimizerConfig(betas=(0.8, 0.95), weight_decay=0.1)
        weights = make_weights(model, config)
        expected = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
        m = {name: torch.zeros_like(value) for name, value in expected.items()}
        v = {name: torch.zeros_like(value) for name, value in expected.items()}
        for t, lr in ((1, 1e-2), (2, 3e-3), (3, 1e-3)):
            parts = [noise(model, 10 * t), noise(model, 10 * t + 1)]
            for part in parts:
                backward(model, part)
            step(weights, lr)
            for name, value in expected.items():
                g = sum(part[name].double() for part in parts)
                m[name] = 0.8 * m[name] + 0.2 * g
                v[name] = 0.95 * v[name] + 0.05 * g * g
                moved = lr * (m[name] / (1 - 0.8**t)) / ((v[name] / (1 - 0.95**t)).sqrt() + 1e-8)
                expected[name] = value * (1 - lr * 0.1) - moved
                # float32 keeps 24 bits: a hundredth of what bfloat16 could show.
                assert (weights.masters[name] - expected[name]).abs().max() < 2e-6
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, weights.masters[name].bfloat16())

    def test_add_up_gradients_in_float32_and_free_the_models(self, model: PreTrainedModel) -> None:
        """1 + 2^-9 + 2^-9: in bfloat16 each of the small ones is rounded away."""
        weights = make_weights(model, OptimizerConfig())
        for value in (1.0, 2.0**-9, 2.0**-9):
            backward(model, {name: torch.full_like(p, value) for name, p in model.named_parameters()})
            assert all(parameter.grad is None for parameter in model.parameters())
        for master in weights.masters.values():
            assert master.grad is not None and (master.grad == 1 + 2.0**-8).all()
        weights.optimizer.zero_grad(set_to_none=True)
        backward(model, {name: torch.full_like(p, 0.5) for name, p in model.named_parameters()})
        assert all((master.grad == 0.5).all() for master in weights.masters.values() if master.grad is not None)

    def test_of_a_tied_weight_feel_both_of_its_uses(self, make_tiny: Make) -> None:
        model = make_tiny(dtype=torch.bfloat16)
        weights = make_weights(model, OptimizerConfig())
        embedding, head = model.get_parameter("model.embed_tokens.weight"), model.get_parameter("lm_head.weight")
        assert embedding is head
        (embedding.sum() + 2 * head.sum()).backward()
        master = weights.masters["model.embed_tokens.weight"]
        assert master.grad is not None and (master.grad == 3).all()


def moved(model: PreTrainedModel, masters: str, gradients: Sequence[float], lr: float) -> tuple[Tensor, Weights]:
    """How far a weight of exactly 1 is carried by steps along these gradients."""
    weight = model.get_submodule("model.norm").weight
    assert isinstance(weight, nn.Parameter) and (weight == 1).all()
    weights = make_weights(model, OptimizerConfig.model_validate({"master_weights": masters}))
    for gradient in gradients:
        backward(model, {name: torch.full_like(p, gradient) for name, p in model.named_parameters()})
        step(weights, lr)
    return 1 - weight.detach().float(), weights


class TestWhatBfloat16Loses:
    """What the note says that a run in pure bfloat16 begins with."""

    def test_steps_below_its_resolution_vanish_without_masters(self, model: PreTrainedModel) -> None:
        """Adam's steps along a constant gradient are lr each. Below 1 bfloat16 is spaced by 2^-8."""
        shift, _ = moved(model, "none", [1.0] * 64, lr=2.0**-10)
        assert (shift == 0).all()

    def test_masters_gather_them(self, model: PreTrainedModel) -> None:
        shift, _ = moved(model, "float32", [1.0] * 64, lr=2.0**-10)
        assert (shift == 64 / 2**10).all()

    @pytest.mark.parametrize(("masters", "kept"), [("none", 1.0), ("float32", 0.999**64)])
    def test_second_moments_forget_with_masters_only(self, model: PreTrainedModel, masters: str, kept: float) -> None:
        _, weights = moved(model, masters, [1.0], lr=1e-3)
        parameter = weights.stepped["model.norm.weight"]
        before = weights.optimizer.state[parameter]["exp_avg_sq"].clone()
        for _ in range(64):
            backward(model, {name: torch.zeros_like(p) for name, p in model.named_parameters()})
            step(weights, 1e-3)
        after = weights.optimizer.state[parameter]["exp_avg_sq"]
        assert (after / before).float().tolist() == pytest.approx([kept] * len(after), rel=1e-3)
        assert math.isclose(float(before[0]), 1e-3, rel_tol=0.01)
