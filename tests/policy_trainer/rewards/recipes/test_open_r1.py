"""The rewards of Open-R1."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy_trainer.data.problem import Problem
from policy_trainer.rewards import Sample
from policy_trainer.rewards.recipes.open_r1 import open_r1_accuracy, open_r1_format, open_r1_tag_count

WHOLE = "<think>\n1+1\n</think>\n<answer>\n{}\n</answer>"


@pytest.mark.parametrize(
    ("completion", "gold", "expected"),
    [
        (WHOLE.format("2"), "2", 1),
        (WHOLE.format("3"), "2", 0),
        (WHOLE.format(r"$\frac{4}{2}$"), "2", 1),
        (WHOLE.format(r"\boxed{2}"), "2", 1),
        (r"It is \boxed{\frac{1}{2}}.", r"\frac{1}{2}", 1),
        (r"$1$, so \boxed{2}", "2", 1),
        (r"\boxed{2}", r"$2$", 1),
        (r"\boxed{x^2+1}", "1+x^2", 1),
        (r"\boxed{3}", "2", 0),
        (r"\boxed{2", "2", 0),
        ("no answer", "2", 0),
        ("", "2", 0),
        (r"\boxed{2}", "", math.nan),
        (r"\boxed{2}", "???", math.nan),
        (r"\boxed{2}", "two", 0),
        (r"\boxed{two}", "two", 1),
        (r"\boxed{\text{Two}}", "two", 1),
        (r"\boxed{tow}", "two", 0),
        (r"$\text{listen}$, no: \boxed{\text{silent}}", "listen", 0),
        (r"It is \boxed{\text{no solution}}.", "no solution", 1),
        (r"\boxed{1, 2}", "1, 2", 1),
        (r"\boxed{2, 1}", "1, 2", 1),
        (r"\boxed{7, 2}", "1, 2", 0),
        (r"\boxed{2}", "1, 2", 0),
        (r"\boxed{B}", "B", 1),
        (r"\boxed{A}", "B", 0),
        (r"\boxed{x>3}", "x>3", 1),
        (r"\boxed{x<3}", "x>3", 0),
        (r"\boxed{1\,000}", "1000", 1),
        (r"\boxed{7 3/4}", "7.75", 1),
        (r"\boxed{2√3}", "2", 0),
        (r"\boxed{\$18}", r"\$18", 1),
    ],
)
def test_accuracy(completion: str, gold: str, expected: float) -> None:
    assert open_r1_accuracy(Sample(Problem(gold), completion)) == pytest.approx(expected, nan_ok=True)


# completion, score of the format, tags that stand once
TABLE = (
    (WHOLE, 1, 4),
    ("<think>\n\n</think>\n<answer>\n\n</answer>", 1, 4),
    (WHOLE + "\n", 1, 4),
    (WHOLE + "\nand so on", 1, 4),  # `$` matches at every line's end
    (WHOLE + " and so on", 0, 4),
    (WHOLE + "\r\n", 0, 4),
    ("\n" + WHOLE, 0, 4),
    (" " + WHOLE, 0, 4),
    (WHOLE.replace("\n", "\r\n"), 0, 1),
    (WHOLE.replace("\n", ""), 0, 0),
    ("<think>\n</think>\n<answer>\n</answer>", 0, 4),
    ("<think>\na\n</think>\n\n<answer>\nb\n</answer>", 0, 4),
    (WHOLE + "\n" + WHOLE, 1, 0),
    ("<think>\n" + WHOLE, 1, 3),
    ("<think>\na\n</think>\n<answer>\nb", 0, 3),
    ("", 0, 0),
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
