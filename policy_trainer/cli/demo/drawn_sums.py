"""The task `arithmetic` with its sums in pictures: the numbers stand below each other, as in column addition.

The prompt has nothing but the picture.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from policy_trainer.config import SourceConfig
from policy_trainer.data.pictures import PLACEHOLDER, encode
from policy_trainer.data.problem import Problem
from policy_trainer.data.tasks.arithmetic import Arithmetic
from policy_trainer.data.tasks.problem_set import LazyProblems

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont, ImageFont

# Pixels of a cell's side. Two rows of three cells hold a digit or a plus each; the demo's model sees a cell as a token.
CELL = 28
ROWS, COLUMNS = 2, 3

# As values of the setting `task`.
DRAWN_SUMS, BLANK_SUMS = f"{__name__}:drawn_sums", f"{__name__}:blank_sums"


class DrawnSums:
    name = "drawn sums"
    correct = Arithmetic.correct
    default_rewards = Arithmetic.default_rewards
    training_problems = Arithmetic.training_problems

    def __init__(self, seed: int, *, blank: bool = False) -> None:
        """blank: leaves the sums out of the pictures, so that a model can only guess."""
        self._sums, self._blank = Arithmetic(seed), blank

    def problem(self, index: int) -> Problem:
        return drawn(self._sums.problem(index), blank=self._blank)

    def eval_problems(self) -> Sequence[Problem]:
        sums = self._sums.eval_problems()
        return LazyProblems(len(sums), lambda place: drawn(sums[place], blank=self._blank))


def drawn_sums(source: SourceConfig, seed: int) -> DrawnSums:
    return DrawnSums(seed)


def blank_sums(source: SourceConfig, seed: int) -> DrawnSums:
    return DrawnSums(seed, blank=True)


def drawn(problem: Problem, *, blank: bool = False) -> Problem:
    """A problem of the task `arithmetic` with a picture instead of its text."""
    message = {"role": "user", "content": PLACEHOLDER}
    return replace(problem, messages=(message,), images=(picture(problem.messages[0]["content"], blank=blank),))


def picture(question: str, *, blank: bool = False) -> bytes:
    """`54+58=?` as PNG. Colours, sizes and places are a pure function of the question."""
    from PIL import Image, ImageDraw

    chance = random.Random(question)
    paper, ink = (tuple(chance.randrange(*bounds) for _ in "RGB") for bounds in ((215, 256), (0, 110)))
    image = Image.new("RGB", (COLUMNS * CELL, ROWS * CELL), paper)
    pen = ImageDraw.Draw(image)
    for (column, row), character in _cells(question):
        place = (column + 0.5) * CELL + chance.randint(-3, 3), (row + 0.5) * CELL + chance.randint(-2, 2)
        if not blank:
            pen.text(place, character, fill=ink, font=_font(chance.randrange(20, 27)), anchor="mm")
    return encode(image)


def _cells(question: str) -> list[tuple[tuple[int, int], str]]:
    """The column and row of each character."""
    first, second = question.removesuffix("=?").split("+")
    rows = f"{first:>{COLUMNS}}", f"+{second:>{COLUMNS - 1}}"
    return [((column, row), text) for row, line in enumerate(rows) for column, text in enumerate(line) if text != " "]


@cache
def _font(size: int) -> "FreeTypeFont | ImageFont":
    from PIL import ImageFont

    return ImageFont.load_default(size)
