"""Distillation: whose log-probs the teacher's are, and steps of a learner that has a teacher."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from policy_trainer.algorithms.objective.group import Group
from policy_trainer.algorithms.objective.kl import teacher_kl
from policy_trainer.config import LossConfig, OptimizerConfig
from policy_trainer.learner.groups import make_group, missing_input, trains
from policy_trainer.learner.learner import Learner
from shared.batch import Batch
from shared.logprobs import PackedForward
from tests.policy_trainer.learner.steps import make_learner
from tests.rounding import rounding

Make = Callable[..., Any]
DISTILL = {"advantage": "distill", "beta": 0}


@pytest.fixture
def batch(make_scored: Make) -> Batch:
    return make_scored([3], [[4, 6], [5]], [0.0, 0.0], ref_logps=[-1.5, -1.0, -2.0])


@pytest.fixture
def with_teacher(batch: Batch) -> Batch:
    return replace(batch, teacher_logps=np.array([-0.5, -0.25, -0.75], np.float32))


@pytest.mark.parametrize(
    ("loss", "reference", "only", "two"),
    [
        (DISTILL, "server", "ref_logps", "teacher_logps"),
        ({"advantage": "distill", "beta": 0.1}, "server", None, "teacher_logps"),
        ({"advantage": "distill", "beta": 0.1}, "adapter-off", "ref_logps", "teacher_logps"),
        ({"distillation_coef": 0.5, "beta": 0}, "server", "ref_logps", "teacher_logps"),
        ({"beta": 0.1}, "server", None, None),
    ],
)
def test_the_server_s_only_model_is_the_teacher_unless_the_penalty_uses_it(
    loss: dict[str, Any], reference: Any, only: str | None, two: str | None, batch: Any, with_teacher: Any
) -> None:
    config = LossConfig.model_validate(loss)
    for scored, name in ((batch, only), (with_teacher, two)):
        if name is None and config.distillation:
            assert "it has no teacher_logps, which distillation needs" in str(missing_input(scored, config, reference))
            continue
        assert missing_input(scored, config, reference) is None
        teacher_logps = make_group(scored, config, reference).teacher_logps
        assert teacher_logps is (None if name is None else getattr(scored, name))


def test_a_batch_that_nobody_scored_is_refused(batch: Batch) -> None:
    assert "no teacher_logps" in str(missing_input(batch.without_scores(), LossConfig.model_validate(DISTILL)))


@pytest.mark.parametrize("loss", [DISTILL, {"distillation_coef": 0.1, "beta": 0}])
def test_equal_rewards_and_single_completions_train(loss: dict[str, Any], batch: Any, make_scored: Make) -> None:
    config = LossConfig.model_validate(loss)
    for either in (batch, make_scored([3], [[4]], [0.0])):
        assert trains(make_group(either, config), config)
        assert not trains(make_group(either, LossConfig(beta=0)), LossConfig(beta=0))
    unjudged = make_scored([3], [[4], [5]], [math.nan, math.nan])
    assert not trains(make_group(unjudged, config), config)


def learner(model: PreTrainedModel, **loss: Any) -> Learner:
    return make_learner(model, loss=LossConfig.model_validate(loss), optimizer=OptimizerConfig(learning_rate=1e-2))


@pytest.mark.parametrize("old_logps", ["sampler", "recomputed", "current"])
def test_steps_bring_the_policy_to_the_teacher(old_logps: str, make_tiny: Make, make_scored: Make) -> None:
    """On the same tokens again and again; without sampler_logps, too, where they are not the ratio's."""
    policy, teacher = make_tiny(), make_tiny(seed=1)
    batch = make_scored([3, 4], [[5, 6, 7], [8], [9, 10]], [0.0, 0.0, 0.0])
    with torch.no_grad():
        scored = replace(batch, teacher_logps=PackedForward(teacher)([batch.group], [1.0]).numpy())
    made, seen = learner(policy, **DISTILL, old_logps=old_logps), []
    for step in range(8):
        groups: list[Group] = []
        with torch.no_grad():
            sampled = PackedForward(policy)([batch.group], [1.0]).numpy()
        fresh = replace(scored, sampler_logps=sampled if old_logps == "sampler" else None)
        stats = made.step([fresh], step=step, on_groups=groups.extend)
        assert stats.groups == 1 and math.isfinite(stats.metrics["loss"])
        bound = rounding(np.abs(sampled).max())
        np.testing.assert_allclose(groups[0].advantages, scored.teacher_logps - sampled, rtol=0, atol=bound)
        assert teacher_kl(groups) == pytest.approx(float(np.mean(sampled - scored.teacher_logps)), abs=bound)
        seen.append(float(np.abs(sampled - scored.teacher_logps).mean()))
    assert seen[-1] < seen[0]


@pytest.mark.parametrize("rewards", [[math.nan, math.nan], [0.0, math.nan]])
def test_an_overflowing_ratio_an_empty_mask_and_nan_stay_finite(
    rewards: list[float], make_tiny: Make, make_scored: Make
) -> None:
    model = make_tiny()
    for mask in ([False, False, False], [True, True, False]):
        batch = make_scored([3], [[4, 6], [5]], rewards, old_logps=[-500.0, -1e30, -1.0], loss_mask=mask)
        batch = replace(batch, teacher_logps=np.array([-500.0, -1e30, -1e30], np.float32))
        learner(model, **DISTILL).step([batch], step=0)
        assert all(parameter.isfinite().all() for parameter in model.parameters())
