"""Problems as Python objects reach the run's processes as a file, with all their columns; functions as rewards by name
where another process can import them, else they are called in this process."""

import datetime
import functools
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

from policy_trainer.config import SourceConfig
from policy_trainer.data.problem import Problem
from policy_trainer.python_api.inputs import ProblemInput, problem_input, reward_input
from policy_trainer.tasks.user_rows import row_task
from shared.errors import UserError
from tests.policy_trainer.rewards import faulty

ROWS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i), "level": i} for i in range(20)]


def problems_of(data: ProblemInput, directory: Path) -> list[Problem]:
    data.write(directory)
    task = row_task("jsonl", SourceConfig(path=Path(data.placed(directory)["path"])), 0)
    return sorted((task.problem(i) for i in range(18)), key=lambda problem: problem.extras["level"])


@pytest.mark.parametrize("problems", [ROWS, Dataset.from_list(ROWS), Dataset.from_list(ROWS).with_format("numpy")])
def test_rows_become_a_file_with_all_columns(problems: Any, tmp_path: Path) -> None:
    first = problems_of(problem_input(problems, "dataset"), tmp_path / "run" / "data")[0]
    assert first.answer == "2" and first.prompt == "1+1=" and first.extras["level"] == 1
    assert [file.name[0] for file in (tmp_path / "run" / "data").iterdir()] == ["d"]


def test_a_selection_keeps_its_rows_and_types(tmp_path: Path) -> None:
    dated = [{**row, "day": datetime.date(2025, 1, 1 + row["level"])} for row in ROWS]  # type: ignore[operator]
    chosen = Dataset.from_list(dated).shuffle(seed=3).filter(lambda row: row["level"] > -1)
    rows = [problem.extras for problem in problems_of(problem_input(chosen, "dataset"), tmp_path)]
    assert all(extras["day"] == datetime.date(2025, 1, 1 + extras["level"]) for extras in rows)


@pytest.mark.parametrize("kind", [list, Dataset.from_list])
def test_the_files_name_depends_on_the_problems(kind: Any, tmp_path: Path) -> None:
    first, same, others = (
        problem_input(kind(rows), "dataset").placed(tmp_path) for rows in (ROWS, list(ROWS), ROWS[1:])
    )
    assert first == same != others
    assert problem_input("missing.jsonl", "dataset").placed(tmp_path) == {"path": "missing.jsonl"}


@pytest.mark.parametrize(
    "problems",
    [
        [],
        ["text"],
        {"prompt": ["a"]},
        DatasetDict({"train": Dataset.from_list(ROWS)}),
        Dataset.from_list(ROWS).to_iterable_dataset(),
    ],
)
def test_other_objects_are_refused(problems: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"dataset: must be a datasets.Dataset or a list of dicts"):
        problem_input(problems, "dataset")


def test_a_value_that_json_lacks_is_refused_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"dataset\[1\]: cannot be written as JSON: .*; a datasets.Dataset keeps"):
        problem_input([{"prompt": "a"}, {"prompt": b"b"}], "dataset")


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    problems = problem_input(ROWS, "dataset")
    with pytest.raises(UserError, match=r"run_dir: .* cannot be written"):
        problems.write(tmp_path / "file" / "data")


def of_this_module(completion: str) -> float:
    return 0.0


class Stateful:
    def __call__(self, completions: list[str]) -> list[float]:
        return [0.0] * len(completions)

    def method(self, completion: str) -> float:
        return 0.0


def test_a_function_of_a_module_is_named() -> None:
    assert reward_input(["accuracy", faulty.hanging]) == (
        ["accuracy", "tests.policy_trainer.rewards.faulty:hanging"],
        {},
    )


def in_a_notebook() -> Any:
    space: dict[str, Any] = {"__name__": "__main__"}
    exec("def f(completion): return 1.0", space)
    return space["f"]


def shadowed() -> Any:
    """A function whose name in its module has another value now."""
    space: dict[str, Any] = {"__name__": faulty.__name__}
    exec("def hanging(completion): return 1.0", space)
    return space["hanging"]


@pytest.mark.parametrize(
    "function",
    [
        lambda completion: 1.0,
        in_a_notebook(),
        shadowed(),
        Stateful(),
        Stateful().method,
        Stateful.method,
        functools.partial(of_this_module),
        functools.wraps(of_this_module)(lambda completion: 1.0),
    ],
)
def test_functions_that_cannot_be_imported_run_here(function: Any) -> None:
    names, here = reward_input(function)
    (name,) = here
    assert names == [f"caller:{name}"]


def test_names_are_unique_and_parameters_decide_the_calls() -> None:
    names, here = reward_input([lambda completion: 1.0, lambda completions: [1.0], Stateful(), "format"])
    assert names == ["caller:function", "caller:function_2", "caller:Stateful", "format"]
    assert [function.calls for function in here.values()] == ["each", "together", "together"]


def test_rewards_are_names_and_functions() -> None:
    with pytest.raises(UserError, match="rewards: must be names and functions, got 3"):
        reward_input([3])  # type: ignore[list-item]
