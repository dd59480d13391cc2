"""Learning rates by hand; masters against AdamW by hand in float64; offloading against none."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from policy_trainer.config import OptimizerConfig
from policy_trainer.learner.host_memory import host_memory
from policy_trainer.learner.optimizer import (
    MasterWeights,
    OffloadedWeights,
    Weights,
    clip_gradients,
    lr_factor,
    make_weights,
    step_weights,
)
from shared.errors import UserError
from tests.device import DEVICE
from tests.policy_trainer.learner.live_bytes import peak_bytes

Make = Callable[..., PreTrainedModel]
OFFLOADED = OptimizerConfig(offload="cpu")
ON_CPU = DEVICE.type == "cpu"
# How near an offloaded run comes: a GPU adds up the norm, and rounds AdamW, in another order than a CPU.
NEAR = 0.0 if ON_CPU else 1e-6


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


def test_warmup_steps_have_several_updates() -> None:
    config = OptimizerConfig(warmup_steps=2)
    assert [lr_factor(update, config, 6, per_step=2) for update in range(6)] == pytest.approx(
        [0.25, 0.5, 0.75, 1, 1, 1]
    )


def test_schedules_of_transformers() -> None:
    given = {"lr_scheduler_type": "transformers", "warmup_steps": 1, "learning_rate": 0.1}

    def factors(**kwargs: Any) -> list[float]:
        config = OptimizerConfig.model_validate({**given, "lr_scheduler_kwargs": kwargs})
        return [lr_factor(update, config, 4) for update in range(4)]

    assert factors(name="linear") == pytest.approx([0, 1, 2 / 3, 1 / 3])
    assert factors(name="linear", num_warmup_steps=2) == pytest.approx([0, 1 / 2, 1, 1 / 2])
    assert factors(name="cosine_with_min_lr", min_lr=0.05)[3] == pytest.approx(
        0.5 + 0.5 * (1 + math.cos(math.pi * 2 / 3)) / 2
    )
    for wrong in ({"name": "linear", "power": 2}, {"name": "no_such"}, {"name": "reduce_lr_on_plateau"}):
        with pytest.raises(UserError, match=r"^optimizer.lr_scheduler_kwargs: "):
            factors(**wrong)


def test_weight_decay_without_norms_and_biases(make_tiny: Make) -> None:
    """The others decay as AdamW decays them. With gradients of 0 nothing else moves."""

    def after(**settings: Any) -> dict[str, Tensor]:
        config = OptimizerConfig.model_validate({"weight_decay": 0.5, "adam_epsilon": 1e-3, **settings})
        model = make_tiny()
        weights = make_weights(model, config)
        for weight in weights.stepped.values():
            weight.grad = torch.zeros_like(weight)
        step_weights(weights, config, 0.1)
        assert weights.optimizer.param_groups[0]["eps"] == 1e-3
        return {name: weight.detach() for name, weight in weights.stepped.items()}

    before = {name: weight.detach() for name, weight in make_tiny().named_parameters()}
    exempt, all_of_them = after(decay_norms_and_biases=False), after()
    kept = {name for name, weight in exempt.items() if torch.equal(weight, before[name])}
    assert kept == {name for name in before if "norm" in name or name.endswith("bias")} and 0 < len(kept) < len(before)
    for name, weight in all_of_them.items():
        assert torch.allclose(weight, before[name] * 0.95)
        assert name in kept or torch.allclose(weight, exempt[name])


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
        assert type(weights) is Weights and not weights.masters
        assert all(weights.stepped[name] is parameter for name, parameter in model.named_parameters())

    def test_bfloat16_has_masters_unless_told_otherwise(self, model: PreTrainedModel) -> None:
        assert type(make_weights(model, OptimizerConfig(master_weights="none"))) is Weights
        weights = make_weights(model, OptimizerConfig())
        assert isinstance(weights, MasterWeights)
        assert {master.dtype for master in weights.masters.values()} == {torch.float32}
        assert model.dtype == torch.bfloat16

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_offloaded_has_masters_to_save_where_the_model_is_rounded(
        self, make_tiny: Make, dtype: torch.dtype
    ) -> None:
        weights = make_weights(make_tiny(dtype=dtype), OFFLOADED)
        assert isinstance(weights, OffloadedWeights)
        assert {weight.dtype for weight in weights.stepped.values()} == {torch.float32}
        assert weights.masters == ({} if dtype == torch.float32 else weights.stepped)

    def test_float16_is_refused_with_the_remedy(self, make_tiny: Make) -> None:
        """As a model that was saved so comes with dtype auto."""
        with pytest.raises(UserError, match=r"dtype: .* bfloat16"):
            make_weights(make_tiny(dtype=torch.float16), OptimizerConfig())


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
class TestOffloaded:
    """Compared with the same steps without offloading, of a float32 model and of a bfloat16 model with masters."""

    @staticmethod
    def both(make_tiny: Make, dtype: torch.dtype, **settings: float) -> list[tuple[PreTrainedModel, Weights]]:
        configs = [OptimizerConfig.model_validate({**settings, "offload": where}) for where in ("none", "cpu")]
        models = [make_tiny(dtype=dtype) for _ in configs]
        return [(model, make_weights(model, config)) for model, config in zip(models, configs, strict=True)]

    def test_steps_of_clipped_gradients_are_the_same_to_the_bit(self, make_tiny: Make, dtype: torch.dtype) -> None:
        pair = self.both(make_tiny, dtype, weight_decay=0.1)
        for number, backwards in enumerate((1, 3, 2)):
            norms = []
            for model, weights in pair:
                for part in range(backwards):
                    gradients = noise(model, 10 * number + part)
                    backward(model, {name: gradient.to(dtype) for name, gradient in gradients.items()})
                norms.append(clip_gradients(weights, OptimizerConfig(max_grad_norm=0.5)))
                step(weights, 1e-2)
            assert norms[0] == pytest.approx(norms[1], rel=NEAR) and norms[0] > 0.5
        (model, weights), (offloaded_model, offloaded) = pair
        for name, parameter in model.named_parameters():
            plain, other = weights.stepped[name].detach().cpu(), offloaded.stepped[name].detach()
            torch.testing.assert_close(other, plain, atol=NEAR, rtol=0)
            returned = offloaded_model.get_parameter(name).cpu()
            assert torch.equal(returned, other.to(dtype))
            assert not ON_CPU or torch.equal(returned, parameter)

    def test_gradients_of_backwards_are_added_and_leave_the_model(self, make_tiny: Make, dtype: torch.dtype) -> None:
        """1 + 2^-9 + 2^-9: in bfloat16 each of the small ones is rounded away. A new step begins at none."""
        _, (model, weights) = self.both(make_tiny, dtype)
        for values in ((1.0, 2.0**-9, 2.0**-9), (0.5,)):
            weights.optimizer.zero_grad(set_to_none=True)
            for value in values:
                backward(model, {name: torch.full_like(p, value) for name, p in model.named_parameters()})
                assert all(parameter.grad is None for parameter in model.parameters())
            weights.finish_gradients()
            for weight in weights.stepped.values():
                assert weight.device.type == "cpu"
                assert weight.grad is not None and (weight.grad == sum(values)).all()

    def test_loaded_values_reach_the_model(self, make_tiny: Make, dtype: torch.dtype) -> None:
        for model, weights in self.both(make_tiny, dtype):
            other = {name: p.detach().float().cpu() for name, p in make_tiny(seed=1, dtype=dtype).named_parameters()}
            weights.load(other)
            assert all(torch.equal(model.get_parameter(name).cpu(), value.to(dtype)) for name, value in other.items())


@pytest.mark.skipif(not ON_CPU, reason="counts what the CPU allocates")
class TestWhatOffloadingSaves:
    """Counted on the CPU, in a second step: what it allocates beyond weights and moments is what a GPU would hold."""

    @pytest.mark.parametrize(("dtype", "moving"), [(torch.float32, 4), (torch.bfloat16, 2 + 4)])
    def test_one_gradient_is_left_of_all(self, make_tiny: Make, dtype: torch.dtype, moving: int) -> None:
        """moving: bytes of a parameter, of a gradient and its float32 copy."""

        def peak(config: OptimizerConfig) -> int:
            model = make_tiny(layers=16, dtype=dtype)
            weights = make_weights(model, config)
            gradients = {name: gradient.to(dtype) for name, gradient in noise(model, 0).items()}

            def act() -> None:
                backward(model, gradients)
                clip_gradients(weights, config)
                step(weights, 1e-3)

            act()
            return peak_bytes(act)

        sizes = [parameter.numel() for parameter in make_tiny(layers=16).parameters()]
        assert peak(OFFLOADED) < (moving + 1) * max(sizes) < 4 * sum(sizes) / 10
        assert peak(OptimizerConfig()) > 4 * sum(sizes)


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_offloading_from_other_devices_is_refused_with_the_remedy(device: str) -> None:
    with pytest.raises(UserError, match=rf"optimizer\.offload: .* {device}.* none"):
        host_memory(torch.device(device))
