"""Penalties, by hand."""

import pytest

from policy_trainer.data.problem import Problem
from policy_trainer.rewards import Sample
from policy_trainer.rewards.penalties import length_penalty, repetition_penalty, soft_overlong_penalty


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0), (1, -0.01), (50, -0.5), (100, -1), (101, -1), (10**9, -1)])
def test_length(tokens: int, expected: float) -> None:
    assert length_penalty(100)(Sample(Problem(""), "", tokens)) == expected


@pytest.mark.parametrize(
    ("tokens", "expected"), [(0, 0), (79, 0), (80, 0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1), (200, -1)]
)
def test_soft_overlong(tokens: int, expected: float) -> None:
    assert soft_overlong_penalty(100, 20)(Sample(Problem(""), "", tokens)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0),
        ("a", 0),
        ("a a", 0),  # one run of two words
        ("a a a", -1),  # the second of two
        ("a A\ta\na", -4 / 3),
        ("a b a b", -2 / 3),
        ("a b c d", 0),
        ("a " * 1001, -2 * 999 / 1000),
    ],
)
def test_repetition(text: str, expected: float) -> None:
    assert repetition_penalty(2, 2.0)(Sample(Problem(""), text)) == pytest.approx(expected)
