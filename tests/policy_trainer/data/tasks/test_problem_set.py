"""Which problems of a source are trained on, in which order, and which are held out."""

from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy_trainer.config import DataConfig
from policy_trainer.data.tasks.countdown import countdown
from policy_trainer.data.tasks.math import gsm8k, math
from policy_trainer.data.tasks.problem_set import Shuffle
from policy_trainer.data.tasks.user_rows import row_task
from shared.errors import UserError
from tests.policy_trainer.data.tasks.formats import write, write_parquet


def numbered(path: Path, count: int) -> Path:
    return write(path, *({"prompt": f"problem {i}", "answer": i} for i in range(count)))


def task_of(path: Path, **data: Any) -> Any:
    return row_task("jsonl", DataConfig(path=path, **data), 0)


def test_every_tenth_line_is_held_out(tmp_path: Path) -> None:
    task = task_of(numbered(tmp_path / "p", 25))
    assert [problem.answer for problem in task.eval_problems()] == ["0", "10", "20"]
    assert len(task.eval_problems()) == 3 and task.eval_problems()[-1].answer == "20"
    with pytest.raises(IndexError):
        task.eval_problems()[3]
    drawn = [task.problem(index).answer for index in range(22)]
    assert sorted(map(int, drawn)) == [i for i in range(25) if i % 10]


def test_a_problem_that_stands_twice_is_on_one_side(tmp_path: Path) -> None:
    twice = {"prompt": "problem 20", "answer": "another"}
    task = task_of(write(tmp_path / "p", *({"prompt": f"problem {i}", "answer": i} for i in range(25)), twice, twice))
    drawn = {task.problem(index).prompt for index in range(22)}
    assert drawn == {f"problem {i}" for i in range(25) if i % 10}


class TestColumns:
    RENAMED: ClassVar = {"question": "1+1=", "gold": "2"}

    @pytest.fixture(autouse=True)
    def cache(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")

    @pytest.mark.parametrize(
        ("make", "missing"),
        [
            (partial(row_task, "jsonl"), "prompt or messages or problem"),
            (partial(row_task, "dataset"), "prompt or messages or problem"),
            (gsm8k, "answer"),
            (math, "problem"),
            (countdown, "nums"),
        ],
    )
    def test_that_no_row_has_are_named_with_those_that_there_are(self, make: Any, missing: str, tmp_path: Path) -> None:
        remedy = r"For tasks dataset and jsonl, set data\.columns\.prompt and data\.columns\.answer to its names"
        remedy += "; without answers choose --rewards that need none"
        message = rf" has no column {missing}; its columns: question, gold\. {remedy}$"
        lines = write(tmp_path / "q.jsonl", self.RENAMED, {"question": "2+2="})
        table = write_parquet(tmp_path / "d" / "train-00000-of-00001.parquet", self.RENAMED)
        for path in (lines, table):
            with pytest.raises(UserError, match=f"^data\\.path: {path}{message}"):
                make(DataConfig(path=path), 0)
        with pytest.raises(UserError, match=rf"^data\.dataset: .*/d, split train,{message}"):
            make(DataConfig(dataset=str(tmp_path / "d")), 0)

    def test_of_held_out_problems_too(self, tmp_path: Path) -> None:
        eval_path = write(tmp_path / "held", {})
        with pytest.raises(UserError, match=r"^data\.eval_path: .* has no column prompt .*; its columns: none"):
            task_of(numbered(tmp_path / "p", 5), eval_path=eval_path)

    def test_are_not_required_twice(self, tmp_path: Path) -> None:
        """MATH has its answers only in solutions."""
        file = write(tmp_path / "p", *({"problem": f"{i}?", "solution": rf"\boxed{{{i}}}"} for i in range(3)))
        assert math(DataConfig(path=file), 0).problem(0).answer in ("1", "2")


def test_a_file_of_one_problem_leaves_none_to_train_on(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^data\.path: .* leaves no problem to train on.*--data.eval-path"):
        task_of(numbered(tmp_path / "p", 1))


@given(st.integers(1, 50), st.integers(0, 2**63), st.integers(0, 10**6))
def test_each_pass_has_every_place_once(size: int, seed: int, number: int) -> None:
    shuffle = Shuffle(size, seed)
    assert sorted(shuffle.place(number * size + i) for i in range(size)) == list(range(size))


def test_problems_may_keep_their_order(tmp_path: Path) -> None:
    task = task_of(numbered(tmp_path / "p", 5), eval_path=numbered(tmp_path / "e", 1), shuffle=False)
    assert [task.problem(index).answer for index in (*range(7), 12)] == ["0", "1", "2", "3", "4", "0", "1", "2"]
