"""How a user's function is called, from the names of its parameters."""

from collections.abc import Callable
from typing import Any

import pytest

from policy_trainer.data.problem import Problem, Sample
from policy_trainer.rewards.functions import reward_function


@pytest.mark.parametrize(
    ("function", "calls"),
    [
        (lambda completion, answer: 0.0, "each"),
        (lambda completions, **columns: [], "together"),
        (lambda environments, **columns: [], "together"),
        (lambda completion_ids, **columns: [], "together"),
        (lambda completion, environments: 0.0, "each"),  # a column of the rows
    ],
)
def test_a_name_of_many_values_asks_for_all_completions(function: Callable[..., Any], calls: str) -> None:
    assert reward_function("f", function).calls == calls


@pytest.mark.parametrize(
    "returned", [{0.5, 1.0}, frozenset({0.5, 1.0}), {0: 0.5, 1: 1.0}, {0: 0.5, 1: 1.0}.keys(), b"01", "01", 1.0]
)
def test_what_has_no_order_of_the_completions_is_no_list_of_rewards(returned: Any) -> None:
    """A set and a dict would give each completion a reward of another."""
    samples = [Sample(Problem("1"), "a"), Sample(Problem("1"), "b")]
    answers = reward_function("f", lambda completions: returned).answers(samples)
    assert [answer["error"].partition(", got")[0] for answer in answers] == [
        "ValueError: it must return a list of rewards, one for each completion"
    ] * 2


def test_values_of_a_dict_and_generators_are_rewards_in_order() -> None:
    samples = [Sample(Problem("1"), "a"), Sample(Problem("1"), "b")]
    for returned in ({"x": 0.5, "y": 1.0}.values(), (score for score in (0.5, 1.0))):
        answers = reward_function("f", lambda completions, returned=returned: returned).answers(samples)
        assert [answer["score"] for answer in answers] == [0.5, 1.0]
