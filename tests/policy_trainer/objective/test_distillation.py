"""A teacher's log-probs as advantages: by hand, beside rewards, and with what is not finite."""

import math
from typing import Any

import numpy as np
import pytest

from policy_trainer.config import LossConfig
from policy_trainer.objective.advantages import advantages
from policy_trainer.objective.group import Group
from policy_trainer.objective.kl import reverse_kl, teacher_kl
from tests.policy_trainer.groups import make_group

OLD = np.array([-1.0, -2.0, -0.5, -3.0], np.float32)
TEACHER = np.array([-1.5, -1.0, -0.5, -0.25], np.float32)


def group(rewards: list[float], lengths: list[int] | None = None, **fields: Any) -> Group:
    own = np.array(rewards, np.float32)
    return make_group(own, np.array(lengths or [2, 2]), **({"reverse_kl": reverse_kl(OLD, TEACHER)} | fields))


def of(made: Group, **settings: Any) -> list[float]:
    (values,) = advantages([made], LossConfig.model_validate(settings))
    assert values.dtype == np.float32
    return values.tolist()


def test_each_token_gets_what_the_teacher_thinks_of_it() -> None:
    assert of(group([0.0, 0.0]), advantage="distill") == [-0.5, 1.0, 0.0, 2.75]
    assert of(group([5.0, -7.0]), advantage="distill", distillation_coef=0.5) == [-0.25, 0.5, 0.0, 1.375]


def test_beside_rewards_it_is_added() -> None:
    settings = {"advantage": "dr_grpo", "distillation_coef": 2.0}
    assert of(group([1.0, 0.0]), **settings) == [0.5 - 1.0, 0.5 + 2.0, -0.5, -0.5 + 5.5]
    assert of(group([1.0, 0.0], reverse_kl=None), advantage="dr_grpo") == [0.5, 0.5, -0.5, -0.5]


def test_what_does_not_train_has_none() -> None:
    mask = np.array([True, False, True, True])
    assert of(group([0.0, math.nan], loss_mask=mask), advantage="distill") == [-0.5, 0.0, 0.0, 0.0]


def test_one_completion_is_enough() -> None:
    assert of(group([0.0], [4]), advantage="distill") == [-0.5, 1.0, 0.0, 2.75]


def test_the_metric_is_the_mean_over_trained_tokens() -> None:
    groups = [group([0.0, math.nan]), group([0.0, 0.0])]
    assert teacher_kl(groups) == pytest.approx((0.5 - 1.0 + 0.5 - 1.0 + 0.0 - 2.75) / 6)
    assert math.isnan(teacher_kl([group([0.0, 0.0], reverse_kl=None)]))
    assert math.isnan(teacher_kl([])) and math.isnan(teacher_kl([group([math.nan, math.nan])]))
