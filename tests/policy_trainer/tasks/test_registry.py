"""Tasks by name, as the configuration gives them."""

import pytest
from pydantic import ValidationError

from policy_trainer.config import DataConfig, JudgingConfig, TrainConfig
from policy_trainer.config.data import TASK_NAMES
from policy_trainer.data.problem import Task
from policy_trainer.data.steps import JudgesSteps
from policy_trainer.tasks.arithmetic import Arithmetic
from policy_trainer.tasks.registry import TASKS, make_task
from shared.errors import UserError
from tests.policy_trainer.tasks.formats import DATA

FILES = {
    "countdown": "countdown",
    "dataset": "questions",
    "gsm8k": "gsm8k",
    "jsonl": "questions",
    "math": "math_like_math",
}


def test_every_name_has_a_task() -> None:
    assert {*TASKS, "mixture"} == set(TASK_NAMES)


@pytest.mark.parametrize("name", FILES)
def test_tasks_of_files(name: str) -> None:
    columns = {"prompt": "question", "answer": "gold"}
    answers = {"columns": columns, "answer_rule": "number"} if name in ("dataset", "jsonl") else {}
    data = DataConfig.model_validate({"path": DATA / f"{FILES[name]}.jsonl", **answers})
    task = make_task(TrainConfig(model="m", task=name, data=data))
    assert task.name == name and task.eval_problems() and task.problem(0).answer


def test_tasks_that_need_nothing() -> None:
    assert make_task(TrainConfig(model="m")).name == "arithmetic"
    assert make_task(TrainConfig(model="m", task="countdown")).name == "countdown"


def test_a_task_that_judges_no_steps_is_refused_where_they_are_asked_for() -> None:
    judging = JudgingConfig(steps=True)
    assert make_task(TrainConfig(model="m", judging=judging)).name == "arithmetic"
    with pytest.raises(UserError, match=r"judging\.steps: task countdown"):
        make_task(TrainConfig(model="m", task="countdown", judging=judging))


def test_a_mixture_judges_steps_where_all_of_its_tasks_do() -> None:
    def mixture(*names: str) -> Task:
        data = DataConfig.model_validate({"mixture": [{"task": name} for name in names]})
        return make_task(TrainConfig(model="m", task="mixture", data=data, judging=JudgingConfig(steps=True)))

    task = mixture("arithmetic", "arithmetic")
    assert isinstance(task, JudgesSteps)
    problem, completion = task.problem(0), "<think>1+1=2</think><answer>0</answer>"
    assert task.steps(problem, completion) == Arithmetic(0).steps(problem, completion) != []
    with pytest.raises(UserError, match=r"judging\.steps: task mixture"):
        mixture("arithmetic", "countdown")


class TestOnesOwn:
    def test_what_is_no_task_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        config = TrainConfig(model="m", task="types:SimpleNamespace")
        with pytest.raises(UserError, match=r"task: .* positional"):
            make_task(config)
        monkeypatch.setattr("types.SimpleNamespace", lambda source, seed: type("Half", (), {"name": "half"}))
        with pytest.raises(
            UserError, match=r"task: the result of types:SimpleNamespace has no correct, .*eval_problems"
        ):
            make_task(config)

    def test_what_is_not_there_is_refused(self) -> None:
        with pytest.raises(UserError, match=r"task: nowhere:Task cannot be imported from .*: ModuleNotFoundError"):
            make_task(TrainConfig(model="m", task="nowhere:Task"))

    def test_a_name_that_is_none_is_refused(self) -> None:
        with pytest.raises(ValidationError, match=r"must be one of arithmetic, .* or module:name for your own task"):
            TrainConfig(model="m", task="chess")
