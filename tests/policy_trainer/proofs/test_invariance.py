"""A step of the real learner on a tiny model in float64: what it does not depend on, and what it has to be."""

import copy
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import cycle, product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from policy_trainer.config import EntropyConfig, LossConfig, OptimizerConfig
from policy_trainer.learner.step_stats import StepStats
from shared.batch import Batch
from shared.logprobs import PackedForward, PaddedForward, PlainForward
from tests.policy_trainer.learner.steps import assert_near, make_learner
from tests.policy_trainer.proofs.batches import STEP, completions_of, permuted, random_batches, with_turns
from tests.policy_trainer.proofs.cases import WEIGHTS
from tests.policy_trainer.proofs.oracle import Completion, step_loss, teaches
from tests.policy_trainer.proofs.settings import choices, is_refused, random_settings
from tests.policy_trainer.proofs.statistics import seen_tokens, statistics

MAX_NEW_TOKENS = 8
LR = 0.01
WHOLE = 1_000_000
# All that meets where a step is put together.
COMBINATIONS = list(
    product(*map(choices, ("advantage", "aggregation", "surrogate", "importance_sampling_level", "kl_in")))
)
# With these a step depends on almost the same inputs as with `outcome`.
ALIKE = ("dr_grpo", "rloo")
ADVANTAGES = [
    pytest.param(name, marks=[] if name == "outcome" else pytest.mark.long if name in ALIKE else pytest.mark.slow)
    for name in choices("advantage")
]


@pytest.fixture
def model(make_tiny: Callable[..., Any]) -> PreTrainedModel:
    return make_tiny(vocabulary=32, layers=1).double()


def stepped(
    model: PreTrainedModel,
    batches: list[Batch],
    loss: LossConfig,
    *,
    forward: Callable[[PreTrainedModel], Any] = PlainForward,
    micro_batch_tokens: int = WHOLE,
    num_iterations: int = 1,
    minibatches: int = 1,
) -> tuple[StepStats, Tensor]:
    """Of a copy of the model: the statistics of a step, and how far its weights went along plain gradients."""
    model = copy.deepcopy(model)
    before = weights(model)
    learner = make_learner(
        model,
        forward(model),
        loss=loss,
        optimizer=OptimizerConfig(learning_rate=LR, max_grad_norm=0),
        max_steps=10,
        micro_batch_tokens=micro_batch_tokens,
        max_completion_length=MAX_NEW_TOKENS,
        num_iterations=num_iterations,
        minibatches=minibatches,
        part_weights=WEIGHTS,
    )
    # Adam divides by the gradient's own size, which would magnify what is rounded in weights that hardly have one.
    learner.weights.optimizer = torch.optim.SGD(model.parameters(), LR)  # type: ignore[assignment]
    return learner.step(batches, step=STEP), weights(model) - before


def weights(model: PreTrainedModel) -> Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])


def assert_same(got: tuple[StepStats, Tensor], want: tuple[StepStats, Tensor], config: LossConfig) -> None:
    assert_near(asdict(got[0]), asdict(want[0]), rel=1e-6, abs=1e-7)
    assert_close(got[1], want[1], config)


def assert_close(got: Tensor, want: Tensor, config: LossConfig, tolerance: float = 1e-6) -> None:
    """Relative to the largest element. Advantages are float32: where a gradient cancels, their rounding is left."""
    assert (got - want).abs().max() <= tolerance * want.abs().max() + LR * 1e-7, config


def combined(rng: random.Random, combination: tuple[Any, ...]) -> LossConfig | None:
    """Random settings of such a combination; None where it is refused."""
    names = ("advantage", "aggregation", "surrogate", "importance_sampling_level", "kl_in")
    fixed = dict(zip(names, combination, strict=True))
    return None if is_refused(**fixed) else random_settings(rng, **fixed)


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_a_step_is_the_same_however_it_is_cut_packed_and_ordered(advantage: str, model: PreTrainedModel) -> None:
    """Against the plain forward of everything at once: other forwards, micro-batches, orders of groups and rows."""
    rng = random.Random(advantage)
    forwards = cycle((PackedForward, PaddedForward, PlainForward))
    sizes = cycle((1, 25, 40, WHOLE))
    several = cycle([random_batches(rng, model) for _ in range(10)])
    moved = 0
    for combination in COMBINATIONS:
        config = combined(rng, combination) if combination[0] == advantage else None
        if config is None:
            continue
        batches = next(several)
        want = stepped(model, batches, config)
        other = rng.sample([permuted(rng, batch) for batch in batches], len(batches))
        got = stepped(model, other, config, forward=next(forwards), micro_batch_tokens=next(sizes))
        assert_same(got, want, config)
        moved += bool(want[1].abs().max() > 0)
    assert moved > 20


def test_masks_take_the_old_policy_where_one_group_has_no_sampler(model: PreTrainedModel) -> None:
    """Also next to a group that has one, in any micro-batch."""
    given, *others = random_batches(random.Random(5), model)
    untold = [replace(batch, sampler_logps=None) for batch in others]
    settings = {"beta": 0.1, "drop_zero_variance": False, "mask": {"ipo": 0.003, "geometric_high": 1.02}}
    config = LossConfig.model_validate({"old_logps": "recomputed", **settings})
    want, cut = (
        stepped(model, [given, *untold], config, micro_batch_tokens=size, num_iterations=2) for size in (WHOLE, 1)
    )
    assert 0 < want[0].metrics["masked_ratio"] < 1
    assert_same(cut, want, config)


def test_an_adaptive_bonus_moves_alike_however_a_step_is_cut(model: PreTrainedModel) -> None:
    """Over several updates: nothing in the first, then the coefficient that the entropies so far give."""
    batches = random_batches(random.Random(6), model, count=4)
    entropy = EntropyConfig(coef=0.5, target=9.0, delta=0.3, max=2.0)
    settings: dict[str, Any] = {"beta": 0.1, "drop_zero_variance": False, "top_entropy_quantile": 0.5}
    without, config = (LossConfig(entropy=bonus, **settings) for bonus in (EntropyConfig(), entropy))
    want = stepped(model, batches, config, num_iterations=2, minibatches=2)
    cut = stepped(model, batches, config, forward=PackedForward, micro_batch_tokens=1, num_iterations=2, minibatches=2)
    assert_same(cut, want, config)
    once, never = (stepped(model, batches, loss) for loss in (config, without))
    assert torch.equal(once[1], never[1]), "nothing is applied in the first update"
    assert not torch.equal(want[1], stepped(model, batches, without, num_iterations=2, minibatches=2)[1])


def naive_step(
    model: PreTrainedModel, batches: list[Batch], config: LossConfig, num_iterations: int, minibatches: int
) -> tuple[list[float], dict[str, Any], Tensor]:
    """The loss of each update, the statistics, and how far the weights of a copy of the model went."""
    model = copy.deepcopy(model)
    before, losses, seen = weights(model), [], []
    with torch.no_grad():
        begun = completions_of(model, batches)
    for _, minibatch in product(range(num_iterations), range(minibatches)):
        groups = [
            [_as_begun(completion, before) for completion, before in zip(*pair, strict=True)]
            for pair in zip(completions_of(model, batches), begun, strict=True)
        ]
        kept = sum(teaches(group, config) for group in groups)
        if kept * minibatch // minibatches == kept * (minibatch + 1) // minibatches:  # no group is in it
            continue
        loss = step_loss(groups, config, max_tokens=MAX_NEW_TOKENS, minibatch=minibatch, minibatches=minibatches)
        seen.append(seen_tokens(groups, config, minibatch, minibatches))
        model.zero_grad()
        if loss.requires_grad:  # a completion whose tokens are all masked has no gradient
            loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= LR * parameter.grad
        losses.append(loss.item())
    return (
        losses,
        statistics(seen, [[_as_begun(each, each) for each in group] for group in begun], config),
        weights(model) - before,
    )


def _as_begun(completion: Completion, before: Completion) -> Completion:
    """With what advantages take from the policy before the first update."""
    return replace(completion, old=[float(value) for value in before.logps], norms=before.norms)


def assert_as_the_naive_loop_says(
    model: PreTrainedModel, batches: list[Batch], config: LossConfig, num_iterations: int, minibatches: int
) -> StepStats:
    updates: dict[str, Any] = {"num_iterations": num_iterations, "minibatches": minibatches}
    stats, way = stepped(model, batches, config, forward=PackedForward, micro_batch_tokens=25, **updates)
    losses, others, naive_way = naive_step(model, batches, config, num_iterations, minibatches)
    assert_close(way, naive_way, config, 5e-6)  # ours rounds advantages to float32, the loop does not
    assert stats.updates == len(losses)
    if losses:
        assert stats.metrics["loss"] == pytest.approx(np.mean(losses), rel=5e-6, abs=1e-7), config
    got = {name: stats.metrics[name] for name in others}
    assert got == pytest.approx(others, rel=5e-6, abs=1e-7, nan_ok=True), config
    return stats


@pytest.mark.parametrize(
    ("num_iterations", "minibatches"),
    [(2, 2), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((1, 1), (2, 1), (1, 2)))],
)
def test_a_step_is_what_the_naive_loop_says(num_iterations: int, minibatches: int, model: PreTrainedModel) -> None:
    rng = random.Random(f"{num_iterations} {minibatches}")
    for number in range(16):
        config = random_settings(rng, old_logps=choices("old_logps")[number % 4])
        batches = random_batches(rng, model)
        assert_as_the_naive_loop_says(model, batches, config, num_iterations, minibatches)


# Of completions with tools' answers in them.
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"advantage": "dr_grpo", "aggregation": "constant"},
    "dapo": {"aggregation": "token_mean", "epsilon_high": 0.28, "beta": 0},
    "gspo": {"importance_sampling_level": "sequence", "epsilon": 0.05},
    "luspo": {"importance_sampling_level": "sequence", "aggregation": "luspo"},
    "cispo": {"surrogate": "cispo", "aggregation": "token_mean", "cispo": {"ratio_max": 1.2}},
    "vespo": {"surrogate": "vespo", "aggregation": "token_mean"},
    "rloo": {"advantage": "rloo", "importance_sampling_level": "sequence_sum", "kl": "k1", "kl_in": "reward"},
    "reinforce++": {"advantage": "reinforce++", "kl_in": "reward"},
    "gdpo": {"advantage": "gdpo"},
    "KL in the reward": {"kl_in": "reward"},
    "KL in both": {"kl_in": "both", "kl_weight": "ratio"},
    "process": {"advantage": "process"},
    "maxrl": {"advantage": "maxrl"},
    "optimal token baseline": {"advantage": "optimal_token_baseline"},
    "optimal token baseline, KL in the reward": {"advantage": "optimal_token_baseline", "kl_in": "reward", "kl": "k2"},
    "distill": {"advantage": "distill", "surrogate": "reinforce", "aggregation": "token_mean"},
    "tis": {"old_logps": "recomputed", "importance_sampling_correction": "tis", "correction_max": 1.1},
    "tis of sequences": {
        "old_logps": "recomputed", "importance_sampling_correction": "tis", "correction_level": "sequence",
        "correction_max": 1.1,
    },
    "log-linear": {"old_logps": "log_linear"},
    "top entropy": {"top_entropy_quantile": 0.4, "entropy": {"coef": 0.1}},
    "masks": {"mask": {"off_policy_sequence": 0.05, "geometric_high": 1.2, "ipo": 0.1}, "mismatch_penalty": 0.1},
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "grpo" else pytest.mark.slow) for name in ALGORITHMS]
)
def test_what_tools_wrote_does_not_train(name: str, model: PreTrainedModel) -> None:
    """The naive loop says so, and nothing changes with their log-probs."""
    rng = random.Random(name)
    config = LossConfig.model_validate({"beta": 0.1, "drop_zero_variance": False, **ALGORITHMS[name]})
    for _ in range(3):
        batches = [with_turns(rng, batch) for batch in random_batches(rng, model, longest=10)]
        stats = assert_as_the_naive_loop_says(model, batches, config, 2, 2)
        assert stats.tokens > 0
        updates: dict[str, Any] = {"num_iterations": 2, "minibatches": 2}
        want, got = (stepped(model, given, config, **updates) for given in (batches, [*map(_other_tools, batches)]))
        assert got[0] == want[0] and torch.equal(got[1], want[1])


def _other_tools(batch: Batch) -> Batch:
    """With other log-probs where the batch must not train, as far from the policy's as the wire allows."""
    assert batch.loss_mask is not None and batch.sampler_logps is not None
    assert batch.ref_logps is not None and batch.teacher_logps is not None
    far = np.where(np.arange(len(batch.loss_mask)) % 2, -1e30, -500.0).astype(np.float32)
    sampler, reference, teacher = (
        np.where(batch.loss_mask, logps, far) for logps in (batch.sampler_logps, batch.ref_logps, batch.teacher_logps)
    )
    return replace(batch, sampler_logps=sampler, ref_logps=reference, teacher_logps=teacher)
