"""The formats of MATH and of OpenR1-Math: where the gold answer is, and what is refused."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy_trainer.config import DataConfig
from policy_trainer.data.problem import Problem
from policy_trainer.tasks.math import last_boxed, math
from shared.errors import UserError
from tests.policy_trainer.tasks.formats import DATA, write


def read(path: Path) -> list[Problem]:
    return list(math(DataConfig(path=path, eval_path=path), 0).eval_problems())


def test_gold_answers_of_math() -> None:
    problems = read(DATA / "math_like_math.jsonl")
    assert [problem.answer for problem in problems] == [
        "4",
        r"\frac{1}{2}",
        r"\{2,3\}",
        r"\left\{0,\tfrac{1}{2}\right.",
        "9",
    ]
    assert problems[1].messages == ({"role": "user", "content": "Solve $2x=1$."},) and problems[1].system_prompt


def test_gold_answers_of_open_r1() -> None:
    """The column goes before the solution, which stands in for one that is empty."""
    problems = read(DATA / "math_like_open_r1.jsonl")
    assert [problem.answer for problem in problems] == ["2", r"\sqrt{3}", "0", "4"]
    solution = r"It is $\boxed{3}$, said the author in error."
    assert [problem.extras for problem in problems] == [{"solution": solution}, {}, {"solution": r"$\boxed{0}$"}, {}]


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"\boxed{1} and \boxed{2}", "2"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\fbox{5}", "5"),
        (r"\fboxed{5}", None),
        (r"\boxed 5.", "5"),
        (r"$\boxed\pi$", r"\pi"),
        (r"\boxed{\}}", r"\}"),
        (r"\boxed{\\}", r"\\"),
        (r"\boxed{\text{a \boxed{b}}}", "b"),
        (r"\boxed{}", ""),
    ],
)
def test_the_last_box(text: str, boxed: str | None) -> None:
    assert last_boxed(text) == boxed


# Texts with balanced braces.
balanced = st.recursive(
    st.sampled_from(["", "x", "1,2", r"\pi", r"\{", r"\}", "é"]),
    lambda inner: st.builds("{{{}}}".format, inner) | st.builds("{}{}".format, inner, inner),
    max_leaves=12,
)


@given(balanced, balanced, balanced)
def test_a_box_holds_whatever_is_balanced(before: str, inside: str, after: str) -> None:
    assert last_boxed(rf"{before} \boxed{{7}} {after} \boxed{{{inside}}} {after}") == inside


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"problem": "x", "solution": "5"}, "must have an answer, or a solution with"),
        ({"problem": "x", "answer": "", "solution": ""}, "must have an answer, or a solution with"),
        ({"problem": "x", "solution": 5}, "solution must be a text"),
        ({"problem": "x", "answer": ["5"]}, "answer must be a number or a text"),
        ({"problem": "", "answer": "5"}, "problem must be a text"),
    ],
)
def test_a_malformed_row_is_named(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    file = write(tmp_path / "m.jsonl", {"problem": "x", "answer": "5"}, row)
    with pytest.raises(UserError, match=f"^{re.escape(str(file))}:2: {reason}"):
        math(DataConfig(path=file), 0)
