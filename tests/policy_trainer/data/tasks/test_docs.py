"""docs/tasks.md: its commands, its table and its example of a task."""

import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from policy_trainer.cli.settings import FileSchema
from policy_trainer.config import DataConfig, EvalConfig
from policy_trainer.config.data import TASK_NAMES
from policy_trainer.data.problem import Problem, Task
from policy_trainer.data.steps import Step, step_judge
from policy_trainer.data.tasks.registry import make_task
from shared.settings import load_settings
from tests.docs.pages import ROOT, texts
from tests.policy_trainer.data.tasks.formats import write

PAGE = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")


COMMANDS = [
    line
    for block in texts("tasks.md", "sh")
    for line in block.replace("\\\n", " ").splitlines()
    if "words:Reversal" not in line  # the example below
]


@pytest.fixture(autouse=True)
def root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command: str) -> None:
    program, verb, *arguments = shlex.split(command.replace("$MODEL", "model"))
    assert (program, verb) == ("policy-trainer", "eval")
    config = load_settings(EvalConfig, arguments, prog="policy-trainer", schema=FileSchema)
    task = make_task(config)
    assert task.eval_problems() and (task.problem(0).answer or config.rewards)


def test_there_is_a_row_and_a_heading_for_every_task() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| (`.*`) \|$", PAGE, re.MULTILINE))
    assert set(rows) == set(TASK_NAMES)
    assert set(re.findall(r"^## (\w+)$", PAGE, re.MULTILINE)) == set(rows) - {"arithmetic"}
    for command in COMMANDS:
        arguments = shlex.split(command)[2:]
        task = make_task(load_settings(EvalConfig, arguments, prog="policy-trainer", schema=FileSchema))
        assert tuple(re.findall(r"`(.*?)`", rows[task.name])) == task.default_rewards


def test_the_mixture() -> None:
    task = make_task(EvalConfig.model_validate({"model": "m", **tomllib.loads(texts("tasks.md", "toml")[0])}))
    drawn = [task.problem(i).task for i in range(1000)]
    assert (drawn.count("gsm8k"), drawn.count("countdown")) == (750, 250)


def test_the_lines_of_a_file(tmp_path: Path) -> None:
    file = write(tmp_path / "p.jsonl", *texts("tasks.md", "json")[0].splitlines())
    task = make_task(EvalConfig(model="m", task="jsonl", data=DataConfig(path=file, eval_path=file)))
    assert [problem.answer for problem in task.eval_problems()] == ["4", "49"]


def own_task(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Task:
    (directory / "words.py").write_text("\n".join([*texts("tasks.md", "python"), "Reversal.steps = steps"]))
    monkeypatch.chdir(directory)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "words", raising=False)
    command = re.findall(r"^policy-trainer eval .*words:Reversal$", PAGE, re.MULTILINE)[0].replace("$MODEL", "model")
    return make_task(load_settings(EvalConfig, shlex.split(command)[2:], prog="policy-trainer", schema=FileSchema))


def test_the_example_of_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = own_task(tmp_path, monkeypatch)
    problem = task.eval_problems()[0]
    assert task.correct(problem, f"<think></think><answer>{problem.answer}</answer>") == 1
    judge = step_judge(task)
    assert judge and list(judge(Problem("pmal"), "pm\nxy\nal")) == [Step(3, 1.0), Step(6, 0.0), Step(8, 1.0)]
    assert {task.problem(i).answer for i in range(8)}.isdisjoint(problem.answer for problem in task.eval_problems())
