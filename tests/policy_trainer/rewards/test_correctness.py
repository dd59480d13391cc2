"""Whether a completion is right, in whatever form it says so."""

import math

import pytest

from policy_trainer.data.problem import Problem
from policy_trainer.rewards import Sample
from policy_trainer.rewards.correctness import math_accuracy

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
def test_math_accuracy(completion: str, gold: str, expected: float) -> None:
    assert math_accuracy(Sample(Problem(gold), completion)) == pytest.approx(expected, nan_ok=True)
