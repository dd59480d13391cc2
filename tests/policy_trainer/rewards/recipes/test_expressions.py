"""The bounded evaluator compared with Python's, which is safe on what these tests generate."""

import warnings
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from policy_trainer.rewards.expressions import MAX_CHARACTERS, MAX_DEPTH, NoExpression, evaluate


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("(1+2)*3", 9),
        ("1/3+1/3+1/3", 1),
        ("1.5+.5", 2),
        ("5.*2", 10),
        ("05.5", Fraction(11, 2)),
        ("00", 0),
        ("(" * MAX_DEPTH + "7" + ")" * MAX_DEPTH, 7),
        ("+".join(["(1)"] * (MAX_DEPTH + 1)), MAX_DEPTH + 1),  # brackets that are closed count no longer
        ("1" * MAX_CHARACTERS, int("1" * MAX_CHARACTERS)),
        ("9007199254740993-9007199254740992", 1),  # as floats they would be equal
    ],
)
def test_values(text: str, value: Fraction | int) -> None:
    assert evaluate(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1+",
        "1 2",
        "2**3",
        "7//2",
        "7%2",
        "05",
        "1_000",
        "1e3",
        "1/0",
        "1\n+2",
        "1\u00a0+2",
        "\u0661+\u0662",
        "1\u00b2",
        "nan",
        "__import__('os').abort()",
        "98**99**97",
        "1" * (MAX_CHARACTERS + 1),
        "(" * (MAX_DEPTH + 1) + "7" + ")" * (MAX_DEPTH + 1),
        "(" * MAX_CHARACTERS,
        "1\x00",
    ],
)
def test_no_expressions(text: str) -> None:
    with pytest.raises(NoExpression):
        evaluate(text)


@given(st.text(alphabet="0123456789+-*/(). ", max_size=12) | st.text(alphabet="12+-*/()", max_size=9))
@example("1/(1-1)")
def test_is_python_without_powers_and_floor_division(text: str) -> None:
    try:
        value = evaluate(text)
    except NoExpression:
        assert _python(text) is None
    else:
        assert _python(text) == pytest.approx(float(value), rel=1e-9, abs=1e-9)


def _python(text: str) -> float | None:
    if "**" in text or "//" in text:
        return None
    try:
        with warnings.catch_warnings(action="ignore"):  # that a number cannot be called
            value = eval(text)
        return float(value)
    except (SyntaxError, TypeError, ZeroDivisionError, AttributeError):
        return None
