"""Which problems of a source are trained on, in which order, and which are held out."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from policy_trainer.config import DataConfig
from policy_trainer.tasks.jsonl import jsonl
from shared.refusal import Refused
from tests.policy_trainer.tasks.formats import write

GOOD = {"prompt": "1+1=", "answer": "2"}


def numbered(path: Path, count: int) -> Path:
    return write(path, *({"prompt": f"problem {i}", "answer": i} for i in range(count)))


def task_of(path: Path, seed: int = 0, **data: Any) -> Any:
    return jsonl(DataConfig(path=path, **data), seed)


def test_every_tenth_line_is_held_out(tmp_path: Path) -> None:
    task = task_of(numbered(tmp_path / "p", 25))
    assert [problem.answer for problem in task.held_out()] == ["0", "10", "20"]
    assert [problem.answer for problem in task.held_out()[:2]] == ["0", "10"]
    assert len(task.held_out()) == 3 and task.held_out()[-1].answer == "20"
    with pytest.raises(IndexError):
        task.held_out()[3]
    drawn = [task.problem(index).answer for index in range(22)]
    assert sorted(map(int, drawn)) == [i for i in range(25) if i % 10]


def test_a_problem_that_stands_twice_is_on_one_side(tmp_path: Path) -> None:
    twice = {"prompt": "problem 20", "answer": "another"}
    task = task_of(write(tmp_path / "p", *({"prompt": f"problem {i}", "answer": i} for i in range(25)), twice, twice))
    drawn = {task.problem(index).prompt for index in range(22)}
    assert drawn == {f"problem {i}" for i in range(25) if i % 10}


def test_a_file_of_held_out_problems(tmp_path: Path) -> None:
    task = task_of(numbered(tmp_path / "p", 5), held_out_path=write(tmp_path / "held", GOOD))
    assert [problem.prompt for problem in task.held_out()] == ["1+1="]
    assert sorted(task.problem(index).answer for index in range(5)) == list("01234")


def test_every_pass_covers_every_place(tmp_path: Path) -> None:
    task = task_of(numbered(tmp_path / "p", 12), seed=7, held_out_path=write(tmp_path / "held", GOOD))
    passes = [[task.problem(12 * k + i).answer for i in range(12)] for k in range(4)]
    assert all(sorted(one, key=int) == [str(i) for i in range(12)] for one in passes)
    assert len({tuple(one) for one in passes}) == 4


def test_is_a_pure_function_of_seed_and_index(tmp_path: Path) -> None:
    file = numbered(tmp_path / "p", 12)
    indexes = [30, 2, 11, 2, 0]
    one, other = task_of(file, seed=7), task_of(file, seed=7)
    assert [one.problem(i) for i in indexes] == [other.problem(i) for i in indexes[::-1]][::-1]
    assert [task_of(file, seed=8).problem(i) for i in range(10)] != [one.problem(i) for i in range(10)]


@pytest.mark.parametrize("workers", [1, 3, 4])
def test_workers_together_cover_all(tmp_path: Path, workers: int) -> None:
    """Worker k of n takes the indexes that are k modulo n."""
    file = numbered(tmp_path / "p", 14)
    tasks = [task_of(file) for _ in range(workers)]
    drawn = Counter(tasks[k].problem(i).answer for k in range(workers) for i in range(k, 3 * 12, workers))
    assert drawn == {str(i): 3 for i in range(14) if i % 10}


def test_a_file_of_one_problem_leaves_none_to_train_on(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"^data\.path: .* too few"):
        task_of(numbered(tmp_path / "p", 1))
