"""Tasks by name, as the configuration gives them."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from policy_trainer.config import DataConfig, JudgingConfig, SourceConfig, TrainConfig
from policy_trainer.config.data import TASK_NAMES
from policy_trainer.data.problem import Problem, Task
from policy_trainer.data.steps import step_judge
from policy_trainer.data.tasks.arithmetic import Arithmetic
from policy_trainer.data.tasks.countdown import countdown
from policy_trainer.data.tasks.registry import ROW_TASKS, TASKS, make_task, steps_of_epochs
from policy_trainer.rewards import Sample
from policy_trainer.rewards.registry import RULES, SUMS, needs_answers
from shared.errors import UserError
from shared.settings import from_values
from tests.policy_trainer.data.tasks.formats import DATA, write


def test_every_name_has_a_task() -> None:
    assert {*TASKS, *ROW_TASKS, "mixture"} == set(TASK_NAMES)


@pytest.mark.parametrize("name", ["arithmetic", "countdown", "gsm8k", "mixture"])
def test_a_problem_is_a_function_of_seed_and_index(name: str) -> None:
    file = {"path": DATA / "gsm8k.jsonl"}
    sources = [{"task": "arithmetic"}, {"task": "gsm8k", **file}]
    data = {"gsm8k": file, "mixture": {"mixture": sources}, "countdown": {"countdown": {"operators": "+*"}}}

    def drawn(seed: int, indexes: list[int]) -> list[Problem]:
        config = TrainConfig.model_validate({"model": "m", "task": name, "data": data.get(name, {}), "seed": seed})
        task = make_task(config)
        return [task.problem(index) for index in indexes]

    indexes = [2500, 0, 1, 999, 1000, 2500, 2**62]
    assert drawn(3, indexes) == drawn(3, indexes[::-1])[::-1]
    assert drawn(3, list(range(9))) != drawn(4, list(range(9)))


def test_judging_steps_needs_a_task_that_judges_them() -> None:
    judging = JudgingConfig(steps=True)
    assert make_task(TrainConfig(model="m", judging=judging)).name == "arithmetic"
    with pytest.raises(UserError, match=r"judging\.steps: task countdown"):
        make_task(TrainConfig(model="m", task="countdown", judging=judging))


def test_a_mixture_judges_steps_where_all_of_its_tasks_do() -> None:
    def mixture(*names: str) -> Task:
        data = DataConfig.model_validate({"mixture": [{"task": name} for name in names]})
        return make_task(TrainConfig(model="m", task="mixture", data=data, judging=JudgingConfig(steps=True)))

    task = mixture("arithmetic", "arithmetic")
    judge = step_judge(task)
    problem, completion = task.problem(0), "<think>1+1=2</think><answer>0</answer>"
    assert judge and judge(problem, completion) == Arithmetic(0).steps(problem, completion) != []
    with pytest.raises(UserError, match=r"judging\.steps: task mixture"):
        mixture("arithmetic", "countdown")


ROWS = ({"messages": [{"role": "user", "content": "1+1"}], "answer": "2"}, {"prompt": "1+1=", "answer": "2"})


@pytest.mark.parametrize(
    ("settings", "tags"),
    [
        ({}, True),
        ({"rewards": ["length"]}, False),
        ({"rewards": ["my_rewards:concise", "length"]}, False),
        ({"rewards": ["lm_book/tags"]}, False),  # a form of its own
    ],
)
def test_prompts_ask_for_the_tags_that_rewards_look_for(settings: dict[str, Any], tags: bool, tmp_path: Path) -> None:
    file = write(tmp_path / "p.jsonl", *ROWS)
    data = DataConfig(path=file, eval_path=file)
    for problem in make_task(TrainConfig(model="m", task="jsonl", data=data, **settings)).eval_problems():
        assert ("<answer>" in problem.system_prompt) is tags


@pytest.mark.parametrize("task", ["jsonl", "dataset"])
@pytest.mark.parametrize(
    ("rewards", "needs"),
    [
        ([], True),
        (["my:f", "gsm8k/lm_book"], True),
        (["my:f", "format", "countdown/nano_aha"], False),
    ],
)
def test_gold_answers_are_required_where_a_reward_needs_them(
    task: str, rewards: list[str], needs: bool, tmp_path: Path
) -> None:
    file = write(tmp_path / "p.jsonl", {"prompt": "Sing.", "key": "C"}, {"prompt": "Hum.", "key": "D", "answer": None})
    data = DataConfig(path=file, eval_path=file)
    config = TrainConfig(model="m", task=task, data=data, rewards=rewards)
    if needs:
        with pytest.raises(UserError, match=r"p\.jsonl:1: answer must be a number or a text"):
            make_task(config)
    else:
        problems = make_task(config).eval_problems()
        assert [(item.answer, item.extras["key"], item.extras["answer"]) for item in problems] == [
            ("", "C", None),
            ("", "D", None),
        ]


@pytest.mark.parametrize("name", [*(name for name in RULES if name != "environment"), *SUMS])
def test_rewards_that_compare_with_a_gold_answer_are_known(name: str) -> None:
    """The others judge a problem without one; none of them says that it cannot be judged."""
    if needs_answers([name]):
        return
    problem = Problem("", extras={"numbers": (1, 2), "target": 3})
    for part in SUMS.get(name, [name]):
        rule = RULES[part]
        assert callable(rule) and rule(Sample(problem, "<think></think><answer>1</answer>")) is not None


OWN_TASK = """
def fail(where):
    return where

class Own:
    name = "own"
    default_rewards = ("accuracy",)
    def __init__(self, data, seed): fail("make")
    def correct(self, problem, completion): return fail("correct")
    def problem(self, index): return fail("problem")
    def eval_problems(self): return fail("eval_problems")
"""


class TestUserTasks:
    def test_what_is_no_task_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        config = TrainConfig(model="m", task="types:SimpleNamespace")
        with pytest.raises(UserError, match=r"task: .* positional"):
            make_task(config)
        monkeypatch.setattr("types.SimpleNamespace", lambda source, seed: type("Half", (), {"name": "half"}))
        with pytest.raises(
            UserError, match=r"task: the result of types:SimpleNamespace has no correct, .*eval_problems"
        ):
            make_task(config)

    @pytest.mark.parametrize("name", ["make", "problem", "correct", "eval_problems"])
    def test_errors_are_explained_with_the_users_lines(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A TypeError too, which is no wrong signature."""
        (tmp_path / f"own_{name}.py").write_text(OWN_TASK.replace(f'"{name}"', '"it" + 1'))
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(UserError) as refused:
            task = make_task(TrainConfig(model="m", task=f"own_{name}:Own"))
            task.correct(task.problem(3), "42")
            task.eval_problems()
        lines = str(refused.value).splitlines()
        assert lines[0].startswith(f"task: own_{name}:Own") and "raised TypeError: can only concatenate" in lines[0]
        assert f"own_{name}.py, line " in lines[-2] and '"it" + 1' in lines[-1]
        assert len(lines) <= 5 and not any("policy_trainer" in line for line in lines)

    def test_a_wrong_name_is_refused(self) -> None:
        with pytest.raises(UserError, match=r"task: nowhere:Task cannot be imported from .*: ModuleNotFoundError"):
            make_task(TrainConfig(model="m", task="nowhere:Task"))
        with pytest.raises(ValidationError, match=r"must be one of arithmetic, .* or module:name for your own task"):
            TrainConfig(model="m", task="chess")


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


def finite(data: SourceConfig, seed: int) -> Task:
    return Arithmetic(seed)


def without_end(data: SourceConfig, seed: int) -> Task:
    return countdown(data, seed)


def test_a_users_task_has_passes_if_it_gives_their_length() -> None:
    assert steps(task=f"{__name__}:finite", num_train_epochs=1, groups_per_step=9) == 1000


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
