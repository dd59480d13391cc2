"""Sums in pictures: the same problems as in texts, drawn as a pure function of the sum."""

import numpy as np
import pytest

from policy_trainer.cli.demo.drawn_sums import BLANK_SUMS, CELL, DRAWN_SUMS, DrawnSums, picture
from policy_trainer.config import TrainConfig
from policy_trainer.data.pictures import decode
from policy_trainer.data.problem import Problem
from policy_trainer.data.tasks.arithmetic import Arithmetic
from policy_trainer.data.tasks.registry import make_task


def pixels(problem: Problem) -> np.ndarray:
    return np.asarray(decode(problem.images[0]))


def test_the_problems_and_answers_are_those_of_texts() -> None:
    drawn, written = DrawnSums(1), Arithmetic(1)
    for index in (0, 7, 12_000):
        text = written.problem(index)
        assert drawn.problem(index).answer == text.answer
        assert drawn.problem(index).images == (picture(text.messages[0]["content"]),)
        assert text.messages[0]["content"] not in str(drawn.problem(index).messages)
    held_out = drawn.eval_problems()
    assert [problem.answer for problem in held_out[:99]] == [each.answer for each in written.eval_problems()[:99]]
    assert len(held_out) == len(written.eval_problems())


def test_a_picture_depends_on_its_sum_only() -> None:
    assert picture("54+58=?") == picture("54+58=?") != picture("58+54=?")


@pytest.mark.parametrize(
    ("question", "inked"),
    [("54+58=?", ["011", "111"]), ("7+85=?", ["001", "111"]), ("85+7=?", ["011", "101"])],
)
def test_each_character_lies_in_its_cell(question: str, inked: list[str]) -> None:
    image = np.asarray(decode(picture(question))).astype(int)
    ink = (abs(image - image[0, 0]).sum(2) > 60).reshape(2, CELL, 3, CELL).sum((1, 3))
    assert ink[0, 0] == 0, "the first cell is always empty"
    assert [["1" if count > 8 else "0" for count in row] for row in ink] == [list(row) for row in inked]


def test_a_blank_picture_has_the_answer_and_nothing_to_see() -> None:
    (drawn, *_), (blank, *_) = (DrawnSums(0, blank=hidden).eval_problems()[:9] for hidden in (False, True))
    assert blank.answer == drawn.answer
    assert len(np.unique(pixels(drawn).reshape(-1, 3), axis=0)) > 1
    assert len(np.unique(pixels(blank).reshape(-1, 3), axis=0)) == 1


@pytest.mark.parametrize("name", [DRAWN_SUMS, BLANK_SUMS])
def test_both_can_be_named_as_tasks(name: str) -> None:
    task = make_task(TrainConfig(model="m", task=name))
    assert task.problem(0).images and task.default_rewards == ("accuracy", "tags")
