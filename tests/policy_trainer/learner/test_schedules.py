"""Learning rates by hand."""

import math

import pytest

from policy_trainer.config import OptimizerConfig
from policy_trainer.learner.schedules import lr_factor


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
def test_by_hand(config: OptimizerConfig, factors: list[float]) -> None:
    assert [lr_factor(step, config, 5) for step in range(5)] == pytest.approx(factors)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_of_a_run_of_one_step_and_beyond_the_end(schedule: str) -> None:
    config = OptimizerConfig.model_validate({"lr_scheduler_type": schedule, "min_lr_rate": 0.1})
    assert lr_factor(0, config, 1) == 1
    assert lr_factor(99, config, 5) == pytest.approx(0.1)
