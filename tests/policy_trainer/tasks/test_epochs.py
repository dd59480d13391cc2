"""Epochs become steps where a task has a size, and are refused where it has none."""

import json
from pathlib import Path
from typing import Any

import pytest

from policy_trainer.config import SourceConfig, TrainConfig
from policy_trainer.data.problem import Task
from policy_trainer.tasks.arithmetic import Arithmetic
from policy_trainer.tasks.countdown import countdown
from policy_trainer.tasks.epochs import steps_of_epochs
from policy_trainer.tasks.registry import make_task
from shared.errors import UserError
from shared.settings import from_values


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    """Twenty problems, of which every tenth is held out."""
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": n + 1}) + "\n" for n in range(20)))
    return path


def steps(**settings: Any) -> int:
    config = from_values(TrainConfig, model="m", **settings)
    return steps_of_epochs(config, make_task(config))


@pytest.mark.parametrize(("epochs", "groups", "expected"), [(1, 6, 3), (2, 6, 6), (1, 4, 5), (0.5, 4, 3), (1, 100, 1)])
def test_every_problem_that_is_trained_on_counts(problems: Path, epochs: float, groups: int, expected: int) -> None:
    data = {"path": problems}
    assert steps(task="jsonl", data=data, num_train_epochs=epochs, groups_per_step=groups) == expected


def test_a_pass_draws_every_problem_once(problems: Path) -> None:
    config = from_values(TrainConfig, model="m", task="jsonl", data={"path": problems}, num_train_epochs=1)
    task = make_task(config)
    drawn = [task.problem(index).answer for index in range(18)]
    assert len(set(drawn)) == 18 and task.problem(18).answer in drawn


def test_arithmetic_has_nine_thousand() -> None:
    assert steps(num_train_epochs=1, groups_per_step=9) == 1000


def own(data: SourceConfig, seed: int) -> Task:
    return Arithmetic(seed)


def without_end(data: SourceConfig, seed: int) -> Task:
    return countdown(data, seed)


def test_a_task_of_ones_own_has_passes_if_it_says_how_many_problems_it_has() -> None:
    assert steps(task=f"{__name__}:own", num_train_epochs=1, groups_per_step=9) == 1000


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"task": "countdown"}, "without end"),
        ({"task": f"{__name__}:without_end"}, "without end"),
        ({"task": "mixture", "data": {"mixture": [{"task": "arithmetic"}]}}, "different times"),
    ],
)
def test_a_task_without_an_end_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=rf"num_train_epochs: task .*{reason}.*--max-steps"):
        steps(num_train_epochs=1, **settings)
