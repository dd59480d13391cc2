"""The rewards of Open-R1."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy_trainer.data.problem import Problem
from policy_trainer.rewards import Sample
from policy_trainer.rewards.recipes import open_r1_accuracy, open_r1_format, open_r1_tag_count

WHOLE = "<think>\n1+1\n</think>\n<answer>\n{}\n</answer>"


# completion, the row's solution, score
ACCURACIES = (
    (r"\boxed{2}", r"So $1+1=\boxed{2}$.", 1),
    (WHOLE.format(r"$\frac{4}{2}$"), r"\boxed{2}", 1),
    (WHOLE.format(r"\boxed{2}"), "2", 1),
    (r"$3$, so \boxed{2}, and $4$", "$2$", 1),  # what is boxed goes first
    (r"\boxed{2}, the answer is $3$", "$2$", 1),
    (r"\boxed{2} or \boxed{3}", "$2$", 0),  # neighbours are a set
    ("the answer is $2$", "$2$", 1),  # then what is called the answer
    ("the answer is $3$, no, the answer is $2$", "$2$", 1),
    ("so $2$", "$2$", 0),
    # A bare number is no LaTeX.
    (WHOLE.format("2"), "2", 0),
    (r"\frac{4}{2}", "2", 0),
    # Nor is malformed LaTeX repaired, or a notation read that math-verify misreads.
    (r"\boxed{2", "2", 0),
    (r"\boxed{7 3/4}", "7.75", 0),
    (r"\boxed{tow}", r"\boxed{two}", 1),  # words are products of letters
    # Nothing is read in the solution.
    (r"\boxed{2}", "???", None),
    (r"\boxed{\sqrt{3}}", r"\sqrt{3}", None),
)


@pytest.mark.parametrize(("completion", "solution", "expected"), ACCURACIES)
def test_accuracy(completion: str, solution: str, expected: float | None) -> None:
    assert open_r1_accuracy(Sample(Problem("5", extras={"solution": solution}), completion)) == expected


@pytest.mark.parametrize("extras", [{}, {"solution": ""}, {"solution": None}])
@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        (r"\boxed{2}", "2", 1),
        (r"\boxed{2}", "$2$", 1),
        (r"\boxed{\sqrt{3}}", r"\sqrt{3}", 1),
        (r"\boxed{2}", "", None),
    ],
)
def test_accuracy_without_a_solution(completion: str, answer: str, extras: Any, expected: float | None) -> None:
    assert open_r1_accuracy(Sample(Problem(answer, extras=extras), completion)) == expected


# completion, score of the format, tags that stand once
TABLE = (
    (WHOLE, 1, 4),
    ("<think>\n\n</think>\n<answer>\n\n</answer>", 1, 4),
    (WHOLE + "\n", 1, 4),
    (WHOLE + "\nand so on", 1, 4),  # `$` matches at every line's end
    (WHOLE + "\r\n", 0, 4),
    ("\n" + WHOLE, 0, 4),
    (WHOLE.replace("\n", "\r\n"), 0, 1),
    ("<think>\n</think>\n<answer>\n</answer>", 0, 4),
    (WHOLE + "\n" + WHOLE, 1, 0),
    ("<think>\na\n</think>\n<answer>\nb", 0, 3),
)


@pytest.mark.parametrize(("completion", "form", "tags"), TABLE)
def test_form(completion: str, form: float, tags: int) -> None:
    sample = Sample(Problem("2"), completion)
    assert (open_r1_format(sample), open_r1_tag_count(sample)) == (form, 0.25 * tags)


LINES = ["<think>\n", "\n</think>\n", "<answer>\n", "\n</answer>", "\n<answer>\n", "x", "\n", " "]


@given(st.lists(st.sampled_from(LINES), max_size=12) | st.permutations(LINES))
def test_format_is_the_plain_pattern(pieces: list[str]) -> None:
    text = "".join(pieces)
    pattern = r"^<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>$"
    assert open_r1_format(Sample(Problem(""), text)) == bool(re.match(pattern, text, re.DOTALL | re.MULTILINE))
