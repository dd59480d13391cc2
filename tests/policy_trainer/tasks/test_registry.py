"""Tasks by name, as the configuration gives them."""

from typing import get_args

import pytest
from pydantic import TypeAdapter

from policy_trainer.config import DataConfig, JudgingConfig, TrainConfig
from policy_trainer.config.data import TaskName
from policy_trainer.tasks.registry import TASKS, make_task
from shared.refusal import Refused
from tests.policy_trainer.tasks.formats import DATA

FILES = {
    "countdown": "countdown",
    "dataset": "questions",
    "gsm8k": "gsm8k",
    "jsonl": "questions",
    "math": "math_like_math",
}


def test_every_name_has_a_task() -> None:
    assert {*TASKS, "mixture"} == set(get_args(TaskName))


@pytest.mark.parametrize("name", FILES)
def test_tasks_of_files(name: str) -> None:
    columns = {"prompt": "question", "answer": "gold"}
    path = DATA / f"{FILES[name]}.jsonl"
    data = DataConfig.model_validate({"path": path, "columns": columns, "answer_rule": "number"})
    task = make_task(TrainConfig(model="m", task=TypeAdapter(TaskName).validate_python(name), data=data))
    assert task.name == name and task.held_out() and task.problem(0).answer


def test_tasks_that_need_nothing() -> None:
    assert make_task(TrainConfig(model="m")).name == "arithmetic"
    assert make_task(TrainConfig(model="m", task="countdown")).name == "countdown"


def test_a_task_that_judges_no_steps_is_refused_where_they_are_asked_for() -> None:
    judging = JudgingConfig(steps=True)
    assert make_task(TrainConfig(model="m", judging=judging)).name == "arithmetic"
    with pytest.raises(Refused, match=r"judging\.steps: task countdown"):
        make_task(TrainConfig(model="m", task="countdown", judging=judging))
