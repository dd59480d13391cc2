"""One training step against the naive loops of proofs/oracle.py, and against every way of cutting it up."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from policy_trainer.config import LossConfig, OptimizerConfig
from policy_trainer.learner.learner import Learner
from policy_trainer.learner.micro_batches import Ranks
from policy_trainer.learner.step_stats import StepStats
from policy_trainer.metrics import STEP_METRICS
from shared.batch import Batch, TokenGroup
from shared.errors import UserError
from shared.logprobs import PackedForward, PlainForward
from tests.policy_trainer.learner.steps import make_learner
from tests.policy_trainer.proofs.batches import completions_of, row_logps
from tests.policy_trainer.proofs.oracle import step_loss

Make = Callable[..., Any]
LOSS = LossConfig(epsilon=0.2, beta=0.1)
# A norm that clips nothing: the gradient is left as it is.
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, max_grad_norm=1e9)


def learner(
    model: PreTrainedModel, *, forward: Callable[[PreTrainedModel], Any] = PackedForward, **given: Any
) -> Learner:
    return make_learner(model, forward(model), **{"loss": LOSS, "optimizer": OPTIMIZER, **given})


def naive_loss(model: PreTrainedModel, batches: Sequence[Batch], loss: LossConfig) -> Tensor:
    return step_loss(completions_of(model, batches), loss, max_tokens=10)


def gradient(model: PreTrainedModel) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def weights(model: PreTrainedModel) -> Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])


def assert_close(got: Tensor, expected: Tensor, tolerance: float = 1e-6) -> None:
    """Relative to the largest element."""
    assert (got - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.fixture
def model(make_tiny: Make) -> PreTrainedModel:
    return make_tiny().double()


@pytest.fixture
def batches(model: PreTrainedModel, make_scored: Make) -> list[Batch]:
    """Five ragged groups that hold everything a step may meet: clipped tokens on both sides, a NaN reward, a mask, a
    completion that trains no token, equal rewards, several temperatures."""
    generator = np.random.default_rng(0)

    def group(number: int, lengths: list[int], rewards: list[float], **extra: Any) -> Batch:
        prompt = generator.integers(2, 64, 3 + number).tolist()
        completions = [generator.integers(2, 64, length).tolist() for length in lengths]
        temperature = extra.get("temperature", 1.0)
        with torch.no_grad():
            sampled = torch.cat(
                [row_logps(model, prompt, completion, temperature) for completion in completions]
            ).numpy()
        old, ref = (sampled + generator.normal(0, 0.5, len(sampled)) for _ in range(2))
        return make_scored(prompt, completions, rewards, old_logps=old, ref_logps=ref, number=number, **extra)

    return [
        group(0, [4, 1, 7], [0.0, 1.0, 0.25]),
        group(1, [3, 3], [1.0, 1.0]),
        group(2, [2, 5, 6, 3], [math.nan, 2.0, 0.0, 0.5], temperature=0.5),
        group(3, [3, 2, 4], [1.0, 0.0, 0.0], loss_mask=[1, 0, 1, 0, 0, 1, 1, 1, 0], temperature=1.25),
        group(4, [1, 9], [math.nan, 1.0]),
    ]


def stepped(model: PreTrainedModel, batches: Sequence[Batch], **options: Any) -> tuple[StepStats, Tensor, Tensor]:
    """Of a copy: the statistics, the gradient, and the weights after two updates."""
    model = copy.deepcopy(model)
    learns = learner(model, **options)
    stats = learns.step(batches, step=0)
    grad = gradient(model).clone()
    learns.step(batches, step=1)
    return stats, grad, weights(model)


class TestAgainstTheNaiveLoop:
    @pytest.mark.parametrize("max_grad_norm", [0.01, 1e9])
    def test_loss_gradient_and_two_updates(
        self, model: PreTrainedModel, batches: list[Batch], max_grad_norm: float
    ) -> None:
        """AdamW by hand: Loshchilov and Hutter, algorithm 2, with a gradient that is scaled down to max_grad_norm."""
        config = OptimizerConfig(
            learning_rate=1e-3,
            warmup_steps=4,
            min_lr_rate=0.5,
            weight_decay=0.1,
            betas=(0.8, 0.95),
            max_grad_norm=max_grad_norm,
        )
        stats, _, got = stepped(model, batches, optimizer=config)
        assert stats.metrics["loss"] == pytest.approx(naive_loss(model, batches, LOSS).item(), rel=1e-6)
        assert not stats.not_finite
        m = v = 0.0
        for t, lr in ((1, 1e-3 * 1 / 4), (2, 1e-3 * 2 / 4 * (1 - 0.5 / 9))):
            model.zero_grad()
            naive_loss(model, batches, LOSS).backward()
            g = gradient(model)
            assert t > 1 or stats.metrics["grad_norm"] == pytest.approx(g.norm().item(), rel=1e-6)
            g = g * min(1.0, max_grad_norm / g.norm().item())
            m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g * g
            new = weights(model) * (1 - lr * 0.1)
            new -= lr * (m / (1 - 0.8**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
            torch.nn.utils.vector_to_parameters(new, model.parameters())
        assert_close(got, weights(model))

    @pytest.mark.parametrize(("forward", "micro_batch_tokens"), [(PackedForward, 1), (PlainForward, 10_000)])
    def test_entropy(self, model: PreTrainedModel, batches: list[Batch], forward: Any, micro_batch_tokens: int) -> None:
        """Masked tokens, unrewarded completions and groups that do not train do not count."""
        with torch.no_grad():
            completions = [completion for i in (0, 2, 3) for completion in completions_of(model, [batches[i]])[0]]
        judged = [completion for completion in completions if not math.isnan(completion.reward)]
        expected = [float(completion.entropies[t]) for completion in judged for t in completion.trained]
        assert len(expected) == 12 + 14 + 5
        stats, _, _ = stepped(model, batches, forward=forward, micro_batch_tokens=micro_batch_tokens)
        assert stats.metrics["entropy"] == pytest.approx(np.mean(expected), rel=1e-6)


class TestEcho:
    def test_by_hand(self, model: PreTrainedModel, batches: list[Batch]) -> None:
        """Of the masked tokens of group 3 two come after a sampled one. Group 1, whose rewards are equal, trains."""
        group = batches[3].group
        with torch.no_grad():
            logps = [row_logps(model, group.prompt_ids.tolist(), ids.tolist(), 1.25) for ids in group.completions()]
        expected = -float(logps[0][1] + logps[2][3]) / 2
        plain, _, _ = stepped(model, batches, loss=LOSS.model_copy(update={"drop_zero_variance": False}))
        for tokens in (1, 10_000):
            loss = LOSS.model_copy(update={"echo_coef": 0.3})
            stats, _, _ = stepped(model, batches, loss=loss, micro_batch_tokens=tokens)
            assert stats.metrics["echo_loss"] == pytest.approx(expected, rel=1e-6)
            assert stats.metrics["loss"] == pytest.approx(plain.metrics["loss"] + 0.3 * expected, rel=1e-6)
            assert stats.metrics["policy_loss"] == pytest.approx(plain.metrics["policy_loss"], rel=1e-6)

    def test_without_an_answer(self, model: PreTrainedModel, batches: list[Batch]) -> None:
        stats, _, _ = stepped(model, batches[:1], loss=LOSS.model_copy(update={"echo_coef": 0.3}))
        assert math.isnan(stats.metrics["echo_loss"]) and math.isfinite(stats.metrics["loss"])


class TestInvariance:
    # The three groups that train have 15, 21 and 15 tokens.
    @pytest.mark.parametrize(
        ("micro_batch_tokens", "order", "expected"),
        [
            (1, [0, 2, 3], [[15], [21], [15]]),
            (35, [0, 2, 3], [[15], [21], [15]]),
            (36, [0, 2, 3], [[15, 21], [15]]),
            (30, [2, 0, 3], [[21], [15, 15]]),
            (50, [2, 0, 3], [[21, 15], [15]]),
            (51, [0, 2, 3], [[15, 21, 15]]),
        ],
    )
    def test_to_micro_batches(
        self,
        model: PreTrainedModel,
        batches: list[Batch],
        micro_batch_tokens: int,
        order: list[int],
        expected: list[list[int]],
    ) -> None:
        seen: list[list[int]] = []

        class Recording(PackedForward):
            def with_entropy(
                self, groups: Sequence[TokenGroup], temperatures: Sequence[float], *, entropy_grad: bool = True
            ) -> tuple[Tensor, Tensor]:
                seen.append([group.tokens for group in groups])
                return super().with_entropy(groups, temperatures, entropy_grad=entropy_grad)

        whole = stepped(model, batches)
        ordered = [batches[i] for i in order]
        cut = stepped(model, ordered, micro_batch_tokens=micro_batch_tokens, forward=Recording)
        assert seen == expected * 2  # stepped makes two updates
        self.assert_same(cut, whole)

    @staticmethod
    def assert_same(got: tuple[StepStats, Tensor, Tensor], expected: tuple[StepStats, Tensor, Tensor]) -> None:
        for name in ("loss", "kl", "entropy", "clip_ratio", "grad_norm", "learning_rate"):
            assert got[0].metrics[name] == pytest.approx(expected[0].metrics[name], rel=1e-6)
        assert (got[0].groups, got[0].tokens) == (expected[0].groups, expected[0].tokens)
        assert_close(got[1], expected[1])
        assert_close(got[2], expected[2])


class TestLeftOut:
    def test_groups_without_variance_do_not_count_in_the_mean(
        self, model: PreTrainedModel, batches: list[Batch]
    ) -> None:
        single = stepped(model, batches[:1])
        TestInvariance.assert_same(stepped(model, [batches[1], batches[0], batches[4]]), single)

    def test_unjudged_completions_neither_train_nor_count(
        self, model: PreTrainedModel, batches: list[Batch], make_scored: Make
    ) -> None:
        """The group with a NaN, and the same group without that completion."""
        with_nan = batches[2]
        rollout = with_nan
        assert math.isnan(rollout.rewards[0]) and rollout.sampler_logps is not None and rollout.ref_logps is not None
        first = int(rollout.group.completion_lengths[0])
        without = make_scored(
            rollout.group.prompt_ids.tolist(),
            rollout.group.completions()[1:],
            rollout.rewards[1:],
            old_logps=rollout.sampler_logps[first:],
            ref_logps=rollout.ref_logps[first:],
            temperature=rollout.temperature,
        )
        TestInvariance.assert_same(stepped(model, [with_nan, batches[0]]), stepped(model, [without, batches[0]]))

    @pytest.mark.parametrize("count", [0, 1, 2])
    def test_with_nothing_to_learn_the_weights_do_not_move_by_a_bit(
        self, model: PreTrainedModel, batches: list[Batch], count: int
    ) -> None:
        learns = learner(model, optimizer=OptimizerConfig(learning_rate=1e-2, weight_decay=0.5))
        learns.step(batches, step=0)  # from now on there is momentum
        optimizer = learns.weights.optimizer
        before, state = weights(model), copy.deepcopy(optimizer.state_dict()["state"])
        stats = learns.step([batches[1], batches[4]][:count], step=1)
        assert torch.equal(weights(model), before)
        assert all(
            torch.equal(state[i]["exp_avg"], s["exp_avg"])
            for i, s in learns.weights.optimizer.state_dict()["state"].items()
        )
        assert (stats.groups, stats.tokens, stats.metrics["grad_norm"], stats.not_finite) == (0, 0, 0.0, False)
        means = (
            "loss",
            "kl",
            "entropy",
            "ratio_min",
            "ratio_max",
            "effective_sample_size",
            "clip_ratio",
            "advantage_std",
        )
        assert all(math.isnan(stats.metrics[name]) for name in means), "there is no mean of nothing"


class TestNotFinite:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_an_overflowing_loss_changes_nothing(self, make_tiny: Make, make_scored: Make, dtype: torch.dtype) -> None:
        """Neither the model nor the float32 masters of a bfloat16 model."""
        model = make_tiny(dtype=dtype)
        good = make_scored([3, 4], [[5, 6], [7]], [0.0, 1.0], old_logps=[-3, -3, -3])
        learns = learner(model, loss=LossConfig(beta=100.0))
        learns.step([good], step=0)
        assert learns.updated
        before, stepped_before = weights(model), copy.deepcopy(learns.weights.stepped)
        stats = learns.step([good, make_scored([3], [[5], [6]], [0.0, 1.0], ref_logps=[-3e38, -3e38])], step=1)
        assert stats.not_finite and not learns.updated and torch.equal(weights(model), before)
        assert all(torch.equal(learns.weights.stepped[name], weight) for name, weight in stepped_before.items())

    def test_a_gradient_of_nan_changes_nothing_and_is_forgotten(
        self, model: PreTrainedModel, batches: list[Batch]
    ) -> None:
        class Poisoned(PackedForward):
            poisoned = True

            def with_entropy(
                self, groups: Sequence[TokenGroup], temperatures: Sequence[float], *, entropy_grad: bool = True
            ) -> tuple[Tensor, Tensor]:
                logps, entropy = super().with_entropy(groups, temperatures, entropy_grad=entropy_grad)
                if self.poisoned:  # the value stays as it is, the gradient is NaN
                    logps.register_hook(lambda grad: grad * math.nan)
                return logps, entropy

        before = weights(model)
        forward = Poisoned(model)
        learns = learner(model, forward=lambda _: forward, micro_batch_tokens=40)
        stats = learns.step(batches, step=0)
        assert stats.not_finite and math.isfinite(stats.metrics["loss"]) and math.isnan(stats.metrics["grad_norm"])
        assert torch.equal(weights(model), before)
        forward.poisoned = False
        again = learns.step(batches, step=1)
        assert not again.not_finite and weights(model).isfinite().all()
        assert not torch.equal(weights(model), before)


class TestKl:
    def test_of_a_model_to_its_own_scores_is_nothing(self, make_tiny: Make, make_scored: Make) -> None:
        model, temperature = make_tiny(), 0.9
        prompt, completions = [3, 4, 5], [[6, 7, 8, 9], [10], [11, 12]]
        group = make_scored(prompt, completions, [0.0, 1.0, 0.0]).group
        with torch.no_grad():
            sampled = PackedForward(model)([group], [temperature]).numpy()
        batch = make_scored(
            prompt, completions, [0.0, 1.0, 0.0], old_logps=sampled, ref_logps=sampled, temperature=temperature
        )
        learns = learner(model)
        assert 0 <= learns.kl([batch, batch]) < 1e-9
        assert learns.step([batch], step=0).metrics["kl"] < 1e-9
        assert learns.kl([batch]) > 1e-6

    def test_is_the_mean_over_sampled_tokens(self, model: PreTrainedModel, make_scored: Make) -> None:
        first = make_scored([3], [[4, 5], [6]], [0.0, 1.0], ref_logps=[-2, -3, -4], loss_mask=[1, 0, 1])
        two = make_scored([7, 8], [[9]], [0.0], ref_logps=[-1], temperature=2.0)
        with torch.no_grad():
            logps = torch.cat(
                [row_logps(model, [3], [4, 5], 1), row_logps(model, [3], [6], 1), row_logps(model, [7, 8], [9], 2)]
            ).numpy()
        x = (np.array([-2, -3, -4, -1]) - logps)[[0, 2, 3]]
        before = weights(model)
        assert learner(model).kl([first, two]) == pytest.approx((np.exp(x) - x - 1).mean(), rel=1e-6)
        assert torch.equal(weights(model), before)
        assert all(parameter.grad is None for parameter in model.parameters())


class TestLogps:
    """What is shown of a sampled group."""

    def test_of_each_batch_at_its_temperature(self, model: PreTrainedModel, make_scored: Make) -> None:
        first = make_scored([3], [[4, 5], [6]], [0.0, 1.0])
        two = make_scored([7, 8], [[9]], [0.0], ref_logps=[-1], temperature=2.0)
        before = weights(model)
        first, second = learner(model).logps([first, two])
        with torch.no_grad():
            expected = torch.cat([row_logps(model, [3], [4, 5], 1), row_logps(model, [3], [6], 1)])
            np.testing.assert_allclose(first, expected.numpy(), atol=1e-6)
            np.testing.assert_allclose(second, row_logps(model, [7, 8], [9], 2).numpy(), atol=1e-6)
        assert first.dtype == np.float32
        assert torch.equal(weights(model), before)
        assert all(parameter.grad is None for parameter in model.parameters())


class TestProbe:
    """What a sampler's log-probs are compared with."""

    def test_current_log_probs_of_the_beginnings(self, model: PreTrainedModel, make_scored: Make) -> None:
        long, short = list(range(2, 42)), [[number, number + 1] for number in range(2, 7)]
        batches = [
            make_scored([3, 4, 5], [[9]], [1.0]),
            make_scored([3, 4], [long, *short], [1.0] * 6, temperature=0.5),
        ]
        probe = learner(model).probe(batches)
        assert (probe.prompt_ids, probe.completions) == ([3, 4], [long[:32], *short[:3]])
        with torch.no_grad():
            expected = PlainForward(model)([probe.group], [1.0]).numpy()
        assert max(probe.difference(expected)) < 1e-5
        assert probe.difference(expected + np.eye(1, 38)[0])[0] == pytest.approx(1 / 38, rel=1e-3)


class TestNoiseFloor:
    @pytest.mark.parametrize("micro_batch_tokens", [1, 40, 10_000])
    def test_is_the_kl_between_two_packings(
        self, model: PreTrainedModel, batches: list[Batch], micro_batch_tokens: int
    ) -> None:
        """Of a forward that is off by a tenth of a nat for each completion that is packed with a token."""

        class Noisy(PackedForward):
            def __call__(self, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> Tensor:
                return super().__call__(groups, temperatures) + 0.1 * sum(group.size for group in groups)

        # Groups of 15, 10, 21, 15 and 12 tokens; 3, 2, 4, 3 and 2 completions.
        cuts = {1: [[3], [2], [4], [3], [2]], 40: [[3, 2], [4, 3], [2]], 10_000: [[3, 2, 4, 3, 2]]}[micro_batch_tokens]
        lengths = {0: [4, 1, 7], 1: [3, 3], 2: [2, 5, 6, 3], 3: [3, 2, 4], 4: [1, 9]}
        assert [batch.group.completion_lengths.tolist() for batch in batches] == list(lengths.values())
        together = [sum(part) for part in cuts for _ in part]
        x = []
        for number, rows in lengths.items():
            first = len(rows) // 2
            for place, length in enumerate(rows):
                half = first if place < first else len(rows) - first
                x += [0.1 * (together[number] - half)] * length
        masks = [batch.loss_mask for batch in batches]
        sampled = [np.ones(sum(lengths[i]), bool) if mask is None else mask for i, mask in enumerate(masks)]
        x = np.array(x)[np.concatenate(sampled)]
        expected = np.mean(np.exp(x) - x - 1)
        got = learner(model, forward=Noisy, micro_batch_tokens=micro_batch_tokens).noise_floor(batches)
        assert got == pytest.approx(expected, rel=1e-5)


def test_the_model_stays_in_evaluation_mode(model: PreTrainedModel, batches: list[Batch]) -> None:
    learns = learner(model.train())
    learns.step(batches, step=0)
    assert not model.training


def test_the_reported_learning_rate_is_the_applied_one(model: PreTrainedModel, batches: list[Batch]) -> None:
    learns = learner(model, optimizer=OptimizerConfig(learning_rate=0.5, min_lr_rate=0.0), max_steps=5)
    assert learns.step(batches, step=3).metrics["learning_rate"] == pytest.approx(0.125)
    assert learns.weights.optimizer.param_groups[0]["lr"] == pytest.approx(0.125)
    before = weights(model)
    learns.step(batches, step=4)
    assert torch.equal(weights(model), before)


class Counting(PackedForward):
    """Counts forwards without a gradient."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.scored: list[list[int]] = []

    def __call__(self, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> Tensor:
        assert not torch.is_grad_enabled()
        self.scored.append([group.tokens for group in groups])
        return super().__call__(groups, temperatures)


def own_logps(model: PreTrainedModel, batch: Batch) -> np.ndarray:
    with torch.no_grad():
        return PackedForward(model)([batch.group], [batch.temperature]).numpy()


def with_own_logps(model: PreTrainedModel, batch: Batch) -> Batch:
    """As if the model had sampled it. In the model's own precision: float32 would show."""
    changed = copy.copy(batch)
    object.__setattr__(changed, "sampler_logps", own_logps(model, batch))
    return changed


class TestOldLogps:
    @pytest.mark.parametrize("old_logps", ["recomputed", "current"])
    def test_of_a_single_update_are_its_own_exactly_and_for_nothing(
        self, model: PreTrainedModel, batches: list[Batch], old_logps: str
    ) -> None:
        made: list[Counting] = []

        def counting(model: PreTrainedModel) -> Counting:
            made.append(Counting(model))
            return made[-1]

        loss = LossConfig.model_validate({"beta": 0.1, "old_logps": old_logps})
        stats, grad, after = stepped(model, batches, loss=loss, forward=counting)
        assert [stats.metrics[f"ratio_{name}"] for name in ("min", "mean", "max")] == [1, 1, 1]
        assert not made[0].scored
        TestInvariance.assert_same(
            (stats, grad, after), stepped(model, batches, loss=LossConfig(beta=0.1, old_logps="current"))
        )
        sampled = [with_own_logps(model, batch) for batch in batches]
        assert_close(grad, stepped(model, sampled)[1])

    @pytest.mark.parametrize("micro_batch_tokens", [40, 10_000])
    def test_recomputed_are_those_before_the_first_of_several_updates(
        self, model: PreTrainedModel, batches: list[Batch], micro_batch_tokens: int
    ) -> None:
        """The same as with a sampler that has the same weights, though not in the second step."""
        copied = copy.deepcopy(model)
        options: dict[str, Any] = {"num_iterations": 3, "micro_batch_tokens": micro_batch_tokens}
        recomputing = learner(copied, loss=LossConfig(beta=0.1, old_logps="recomputed"), **options)
        stats = recomputing.step(batches, step=0)
        assert stats.updates == 3 and stats.metrics["ratio_min"] < 1 < stats.metrics["ratio_max"]
        sampled = [with_own_logps(model, batch) for batch in batches]
        expected = learner(model, **options).step(sampled, step=0)
        assert stats.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=1e-6)
        assert_close(weights(copied), weights(model))

    def test_are_packed_as_the_updates_pack_them(self, model: PreTrainedModel, batches: list[Batch]) -> None:
        """Groups of 15, 21 and 15 tokens, in two parts of at most 36 tokens a forward."""
        forward = Counting(model)
        learns = learner(
            model, forward=lambda _: forward, loss=LossConfig(old_logps="recomputed"), minibatches=2,
            micro_batch_tokens=36,
        )  # fmt: skip
        learns.step(batches, step=0)
        assert forward.scored == [[15], [21, 15]]


class TestSeveralUpdates:
    def test_passes_are_updates_on_the_same_groups(self, model: PreTrainedModel, batches: list[Batch]) -> None:
        copied = copy.deepcopy(model)
        stats = learner(copied, num_iterations=3).step(batches, step=0)
        single = learner(model)
        each = [single.step(batches, step=0) for _ in range(3)]
        assert torch.equal(weights(copied), weights(model))
        assert (stats.updates, stats.groups, stats.tokens) == (3, 3, each[0].tokens)
        for name in ("loss", "kl", "entropy", "clip_ratio", "grad_norm", "ratio_mean"):
            assert stats.metrics[name] == pytest.approx(sum(part.metrics[name] for part in each) / 3, rel=1e-6)
        assert stats.metrics["ratio_max"] == max(part.metrics["ratio_max"] for part in each)
        for update, part in zip(stats.each_update, each, strict=True):
            names = [name for name in update if name not in ("aux_loss", "echo_loss", "entropy_coef")]
            assert [update[name] for name in names] == pytest.approx([part.metrics[name] for name in names])
            assert math.isnan(update["aux_loss"]) and math.isnan(update["echo_loss"])
            assert update["entropy_coef"] == 0
        metrics, parts = stats.metrics, [part.metrics for part in each]
        largest, smallest = metrics["clip_ratio_high_max"], metrics["clip_ratio_low_min"]
        assert largest == max(part["clip_ratio_high_max"] for part in parts) >= metrics["clip_ratio_high"]
        assert smallest == min(part["clip_ratio_low_min"] for part in parts) <= metrics["clip_ratio_low"]
        low, mean, high = (metrics[f"importance_sampling_ratio_{name}"] for name in ("min", "mean", "max"))
        assert low <= mean <= high and metrics["policy_loss"] == metrics["loss"]

    def test_minibatches_are_updates_on_whole_groups_with_means_of_their_own(
        self, model: PreTrainedModel, batches: list[Batch]
    ) -> None:
        """Three groups train: one, and then two."""
        copied = copy.deepcopy(model)
        stats = learner(copied, minibatches=2).step(batches, step=0)
        single = learner(model)
        each = [single.step(part, step=0) for part in (batches[:2], batches[2:])]
        assert torch.equal(weights(copied), weights(model))
        assert stats.updates == 2 and stats.tokens == each[0].tokens + each[1].tokens
        assert stats.metrics["loss"] == pytest.approx((each[0].metrics["loss"] + each[1].metrics["loss"]) / 2)

    def test_learning_rates_are_those_of_each_update(self, model: PreTrainedModel, batches: list[Batch]) -> None:
        """A linear decay over the five updates of the run, of which the last step has one."""
        optimizer = OptimizerConfig(learning_rate=1e-3, min_lr_rate=0.0)
        learns = learner(model, optimizer=optimizer, num_iterations=2, max_steps=3, max_updates=5)
        steps = [learns.step(batches, step=i) for i in range(3)]
        rates = [[update["learning_rate"] for update in stats.each_update] for stats in steps]
        assert rates == [pytest.approx(each) for each in ([1e-3, 0.75e-3], [0.5e-3, 0.25e-3], [0.0])]
        assert len({stats.tokens for stats in steps}) == 1  # each token once, in one pass as in two

    def test_a_step_that_is_cut_within_a_pass_counts_the_tokens_that_trained(
        self, model: PreTrainedModel, batches: list[Batch]
    ) -> None:
        cut = learner(copy.deepcopy(model), minibatches=2, num_iterations=2, max_updates=1).step(batches, step=0)
        assert cut.updates == 1 and cut.tokens == learner(model).step(batches[:2], step=0).tokens

    def test_the_schedule_ends_where_the_run_does(self, model: PreTrainedModel, batches: list[Batch]) -> None:
        optimizer = OptimizerConfig(learning_rate=1e-3, min_lr_rate=0.0)
        learns = learner(model, optimizer=optimizer, max_steps=2, max_updates=10)
        assert [learns.step(batches, step=i).metrics["learning_rate"] for i in range(2)] == pytest.approx([1e-3, 0.0])

    def test_more_minibatches_than_groups_divide_the_groups(self, model: PreTrainedModel, make_scored: Make) -> None:
        """With the advantages of the whole group. Its loss is the mean of those of parts with as many completions."""
        group = make_scored([3, 4], [[5, 6], [7], [8, 9, 5], [6, 6]], [0.0, 1.0, 2.0, 0.5], old_logps=[-4] * 8)
        still = OptimizerConfig(learning_rate=1e-30)
        whole = learner(copy.deepcopy(model), optimizer=still, loss=LOSS, groups_per_step=1).step([group], step=0)
        learns = learner(model, optimizer=still, groups_per_step=1, minibatches=2)
        halves = learns.step([group], step=0)
        assert (halves.updates, halves.tokens) == (2, whole.tokens)
        assert halves.metrics["advantage_std"] == whole.metrics["advantage_std"] > 0
        for name in ("loss", "kl"):
            assert halves.metrics[name] == pytest.approx(whole.metrics[name], rel=1e-6)
        assert halves.each_update[0]["loss"] != pytest.approx(halves.each_update[1]["loss"], rel=1e-3)

    def test_advantages_are_those_of_the_whole_step(self, model: PreTrainedModel, make_scored: Make) -> None:
        """Under reinforce++ a group of one learns from the others, also if it is a minibatch by itself."""
        tokens = [[[4, 5]], [[6]], [[7, 8, 9]]]
        step = [make_scored([3], rows, [reward]) for rows, reward in zip(tokens, (0.0, 1.0, 3.0), strict=True)]
        loss = LossConfig(advantage="reinforce++", beta=0, drop_zero_variance=False)
        assert learner(copy.deepcopy(model), loss=loss).step(step[:1], step=0).metrics["advantage_std"] == 0
        whole = learner(copy.deepcopy(model), loss=loss).step(step, step=0)
        parts = learner(model, loss=loss, minibatches=3).step(step, step=0)
        assert parts.updates == 3 and parts.metrics["advantage_std"] == whole.metrics["advantage_std"] > 0.5

    def test_one_that_is_not_finite_is_left_out(self, make_tiny: Make, make_scored: Make) -> None:
        good = make_scored([3, 4], [[5, 6], [7]], [0.0, 1.0], old_logps=[-3, -3, -3])
        bad = make_scored([3], [[5], [6]], [0.0, 1.0], ref_logps=[-3e38, -3e38])
        model, other = make_tiny(), make_tiny()
        stats = learner(model, loss=LossConfig(beta=100.0), minibatches=2).step([good, bad], step=0)
        assert stats.not_finite and stats.updates == 1
        learner(other, loss=LossConfig(beta=100.0)).step([good], step=0)
        assert torch.equal(weights(model), weights(other))


class TestWithoutAReference:
    def test_trains_the_same_and_has_no_kl(self, model: PreTrainedModel, batches: list[Batch]) -> None:
        loss = LossConfig(beta=0.0)
        scored: Any = batches
        rollouts: Any = [batch.without_scores() for batch in batches]
        got, expected = (stepped(model, each, loss=loss) for each in (rollouts, scored))
        assert math.isnan(got[0].metrics["kl"]) and expected[0].metrics["kl"] > 0.01
        assert got[0].metrics["loss"] == expected[0].metrics["loss"] and torch.equal(got[2], expected[2])

        learns = learner(model, loss=loss)
        assert math.isnan(learns.kl(rollouts)) and learns.noise_floor(rollouts) == learns.noise_floor(scored)


class TestCorrection:
    SETTINGS: ClassVar = {
        "old_logps": "recomputed",
        "importance_sampling_correction": "tis",
        "correction_max": 1.2,
        "beta": 0.1,
    }

    def test_is_reported(self, model: PreTrainedModel, batches: list[Batch]) -> None:
        w = np.exp(own_logps(model, batches[0]) - batches[0].sampler_logps)
        stats, _, _ = stepped(model, batches[:1], loss=LossConfig.model_validate(self.SETTINGS))
        assert 0 < stats.metrics["importance_sampling_clip_ratio"] < 1
        assert stats.metrics["importance_sampling_clip_ratio"] == pytest.approx((w > 1.2).mean())
        assert stats.metrics["importance_sampling_ratio_mean"] == pytest.approx(w.mean(), rel=1e-6)
        effective = w.sum() ** 2 / (len(w) * (w**2).sum())
        assert stats.metrics["effective_sample_size"] == pytest.approx(effective, rel=1e-6)

    def test_stays_as_it_was_before_the_first_update(self, model: PreTrainedModel, batches: list[Batch]) -> None:
        first = learner(copy.deepcopy(model), loss=LossConfig.model_validate(self.SETTINGS)).step(batches, step=0)
        later = learner(model, loss=LossConfig.model_validate(self.SETTINGS), num_iterations=3).step(batches, step=0)
        for name in ("importance_sampling_clip_ratio", "effective_sample_size", "sampling_logp_difference_max"):
            assert later.metrics[name] == pytest.approx(first.metrics[name], rel=1e-6)


class TestStatistics:
    @pytest.mark.parametrize("micro_batch_tokens", [1, 10_000])
    def test_by_hand(self, model: PreTrainedModel, batches: list[Batch], micro_batch_tokens: int) -> None:
        """Over the trained tokens of the groups 0, 2 and 3, whose ratios are taken to the sampler."""
        ratios, advantages, kls, clipped = [], [], [], []
        for batch in (batches[0], batches[2], batches[3]):
            rollout = batch
            mask = np.repeat(~np.isnan(rollout.rewards), rollout.group.completion_lengths)
            mask &= True if rollout.loss_mask is None else rollout.loss_mask
            logps = own_logps(model, batch)
            ratios.append(np.exp(logps - rollout.sampler_logps)[mask])
            x = (batch.ref_logps - logps)[mask]
            kls.append(np.exp(x) - x - 1)
            known = rollout.rewards[~np.isnan(rollout.rewards)].astype(np.float64)
            starts = np.cumsum(rollout.group.completion_lengths) - rollout.group.completion_lengths
            trains = np.add.reduceat(mask, starts) > 0
            normalised = (rollout.rewards - known.mean()) / (known.std(ddof=1) + 1e-4)
            advantages.append(normalised[trains])
            above = np.repeat(rollout.rewards > known.mean(), rollout.group.completion_lengths)[mask]
            clipped.append(np.where(above, ratios[-1] > 1.2, ratios[-1] < 0.8))
        rho = np.concatenate(ratios)
        stats = learner(model, micro_batch_tokens=micro_batch_tokens).step(batches, step=0)
        assert (len(rho), stats.groups) == (stats.tokens, 3)
        expected = {
            "kl": np.concatenate(kls).mean(),
            "clip_ratio": np.concatenate(clipped).mean(),
            "ratio_min": rho.min(),
            "ratio_mean": rho.mean(),
            "ratio_max": rho.max(),
            "effective_sample_size": rho.sum() ** 2 / (len(rho) * (rho**2).sum()),
            "sampling_logp_difference_mean": np.abs(np.log(rho)).mean(),
            "sampling_logp_difference_max": np.abs(np.log(rho)).max(),
            "importance_sampling_ratio_mean": rho.mean(),
            "importance_sampling_clip_ratio": 0.0,
            "advantage_std": np.concatenate(advantages).std(),
            "frac_reward_zero_std": 2 / 5,
        }
        assert stats.updates == 1
        for name, value in expected.items():
            assert stats.metrics[name] == pytest.approx(value, rel=1e-6), name
        assert stats.metrics["clip_ratio"] == stats.metrics["clip_ratio_low"] + stats.metrics["clip_ratio_high"]
        assert min(stats.metrics["clip_ratio_low"], stats.metrics["clip_ratio_high"]) > 0

    def test_are_those_of_the_table(self, model: PreTrainedModel, batches: list[Batch]) -> None:
        """None has a name that the table lacks, and none of the table is left out; this model has no routers."""
        stats = learner(model).step(batches, step=0)
        assert {name for name, value in stats.metrics.items() if math.isnan(value)} == {"aux_loss", "echo_loss"}
        assert stats.metrics.keys() - STEP_METRICS.keys() == set()
        assert {name for name, metric in STEP_METRICS.items() if metric.reduction} - stats.metrics.keys() == set()

    def test_of_an_unknown_sampler_there_is_no_gap(self, model: PreTrainedModel, batches: list[Batch]) -> None:
        for batch in batches:
            object.__setattr__(batch, "sampler_logps", None)
        stats = learner(model, loss=LossConfig(old_logps="current")).step(batches, step=0)
        for name in ("sampling_logp_difference_mean", "sampling_logp_difference_max", "effective_sample_size",
                     "importance_sampling_ratio_mean"):  # fmt: skip
            assert math.isnan(stats.metrics[name])


def test_a_norm_of_nothing_clips_nothing(model: PreTrainedModel, batches: list[Batch]) -> None:
    unclipped = stepped(model, batches, optimizer=OptimizerConfig(learning_rate=1e-2, max_grad_norm=0))
    TestInvariance.assert_same(unclipped, stepped(model, batches))
    clipped = stepped(model, batches, optimizer=OptimizerConfig(learning_rate=1e-2, max_grad_norm=1e-3))
    assert clipped[0].metrics["grad_norm"] == unclipped[0].metrics["grad_norm"] and clipped[1].norm() < 1.01e-3


class TestFunctionsOfTheUser:
    def test_built_in_ones_by_module_and_name_train_the_same_bits(self, make_tiny: Make, batches: list[Batch]) -> None:
        given = {
            "surrogate": "tests.policy_trainer.algorithms.surrogates.users:clipped",
            "advantage": "policy_trainer.algorithms.objective.advantages:_outcome",
        }
        theirs = LossConfig.model_validate({"epsilon": 0.2, "beta": 0.1, "scale_rewards": "group", **given})
        trained = []
        for loss in (LOSS, theirs):
            model = make_tiny().double()
            stats = learner(model, loss=loss, num_iterations=2).step(batches, step=0)
            trained.append((weights(model), stats))
        (built_in, expected), (ours, stats) = trained
        assert torch.equal(ours, built_in) and stats.metrics["clip_ratio"] > 0
        assert stats.metrics["clipped"] == pytest.approx(stats.metrics["clip_ratio"])
        without = {name: value for name, value in stats.metrics.items() if name != "clipped"}
        assert replace(stats, metrics=without) == expected

    def test_metrics_must_stay_the_same(self, model: PreTrainedModel, batches: list[Batch]) -> None:
        names = iter("ab")

        def fickle(tokens: Any) -> Any:
            return -tokens.advantages * tokens.logps, {next(names): tokens.ratio}

        trainer = learner(model, loss=LossConfig.model_validate({"surrogate": fickle, "beta": 0.0}), num_iterations=2)
        with pytest.raises(UserError, match=r"loss\.surrogate: returned the metrics b, and before a; return the same"):
            trainer.step(batches, step=0)

    def test_metrics_must_be_the_same_on_all_ranks(self, model: PreTrainedModel, batches: list[Batch]) -> None:
        """Else their sums would be added to others, or be of another length."""

        class Two(Ranks):
            def gather(self, tensor: Tensor) -> list[Tensor]:
                return [tensor, tensor + 1] if tensor.dim() == 0 else [tensor]

        config = LossConfig.model_validate(
            {"surrogate": "tests.policy_trainer.algorithms.surrogates.users:clipped", "beta": 0.0}
        )
        trainer = learner(model, loss=config)
        trainer._ranks = Two()
        with pytest.raises(UserError, match=r"loss\.surrogate: returned other metrics on other ranks, here clipped"):
            trainer.step(batches, step=0)

    def test_one_that_is_not_finite_ends_the_first_step(self, model: PreTrainedModel, batches: list[Batch]) -> None:
        """Also where only its gradient is not: that of a root at 0."""

        def root(tokens: Any) -> Tensor:
            return -tokens.advantages * (tokens.logps - tokens.logps.detach()).sqrt()

        trainer = learner(model, loss=LossConfig.model_validate({"surrogate": root, "beta": 0.0}))
        with pytest.raises(UserError, match=r"loss\.surrogate: the loss or gradient of caller:root is not finite in"):
            trainer.step(batches, step=0)
        assert trainer.step(batches, step=1).not_finite  # later it is a bad step like others

    def test_one_that_cannot_be_imported_is_refused_before_a_step(self, model: PreTrainedModel) -> None:
        with pytest.raises(UserError, match=r"loss\.advantage: tests\.nowhere:f cannot be imported"):
            learner(model, loss=LossConfig(advantage="tests.nowhere:f"))


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean", "constant"])
def test_a_group_whose_prompts_differ_is_like_groups_of_one(model: Any, make_scored: Make, aggregation: Any) -> None:
    """The ends of the prompts are masked parts of the completions; rewards are compared within the group."""
    generator = np.random.default_rng(5)
    prompts, completions = (
        [generator.integers(2, 64, length).tolist() for length in lengths] for lengths in ([3, 5, 4], [4, 2, 6])
    )
    shared, rewards, logps = [7, 8], [0.0, 1.0, 0.5], [generator.normal(-2, 0.3, length) for length in (4, 2, 6)]

    def compared(groups: Sequence[Any], config: LossConfig) -> list[Any]:
        return [group.rewards - (group.rewards.mean() if len(group.rewards) > 1 else 0) for group in groups]

    def padded(values: Any) -> Any:
        return np.concatenate([[*[0.0] * len(ending), *row] for ending, row in zip(prompts, values, strict=True)])

    mask = padded([[1.0] * len(row) for row in completions]).astype(bool)
    endings = [[*ending, *row] for ending, row in zip(prompts, completions, strict=True)]
    together = [make_scored(shared, endings, rewards, old_logps=padded(logps), ref_logps=padded(logps), loss_mask=mask)]
    separate = [
        make_scored([*shared, *ending], [row], [reward - 0.5], old_logps=old, ref_logps=old, number=number)
        for number, (ending, row, reward, old) in enumerate(zip(prompts, completions, rewards, logps, strict=True))
    ]
    loss = LOSS.model_copy(update={"advantage": compared, "aggregation": aggregation, "drop_zero_variance": False})
    (first, grad, new), (second, expected_grad, expected) = (
        stepped(model, each, loss=loss) for each in (together, separate)
    )
    assert first.metrics["loss"] == pytest.approx(second.metrics["loss"], rel=1e-9, abs=1e-12)
    assert_close(grad, expected_grad)
    assert_close(new, expected, 1e-5)
