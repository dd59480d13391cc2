"""Answers compared as mathematics."""

import math

import pytest

from policy_trainer.rewards import equal_math

NAN = math.nan


@pytest.mark.parametrize(
    ("answer", "gold", "expected"),
    [
        ("0.5", "1/2", 1),
        (r"\frac{1}{2}", "0.5", 1),
        (r"$\frac{1}{2}$", r"\frac{1}{2}", 1),
        (r"\frac{3}{4}", r"\frac{1}{2}", 0),
        ("1", r"\frac{1}{2}", 0),
        (r"\boxed{5}", "5", 1),
        ("x=5", "5", 1),
        ("1,000", "1000", 1),
        ("6", "5", 0),
        ("", "5", 0),
        ("no idea", "5", 0),
        ("((((", "5", 0),
        ("1/0", "5", 0),
        (r"\infty", "5", 0),
        ("1" * 900, "5", 0),
        ("\u0665", "5", 0),
        ("5", "", NAN),
        ("5", "???", NAN),
        ("5", "hello", NAN),
        ("inf", "inf", NAN),
        ("5", "1" * 5000, NAN),
    ],
)
def test_table(answer: str, gold: str, expected: float) -> None:
    assert equal_math(answer, gold) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        (r"2\sqrt{3}", r"$2\sqrt{3}$", "2"),
        ("x^2+1", "1+x^2", "x^2"),
        ("(1,2)", "(1, 2)", "(2, 1)"),
        (r"\frac{1}{2}", "0.5", "1"),
        (r"\pi", r"$\pi$", "3"),
        ("1/2", "0.5", "1"),
        ("49", "49", "48"),
    ],
)
def test_bare_latex_is_read_as_latex(gold: str, right: str, wrong: str) -> None:
    assert equal_math(right, gold) == 1.0
    assert equal_math(wrong, gold) == 0.0
