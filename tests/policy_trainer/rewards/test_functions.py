"""How a user's function is called, from the names of its parameters."""

from collections.abc import Callable
from typing import Any

import pytest

from policy_trainer.data.problem import Problem, Sample
from policy_trainer.rewards.functions import RewardFunction, reward_function


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


def _emptying(lists: list[Any]) -> float:
    """The number of values in the lists, which are empty afterwards."""
    count = sum(map(len, lists))
    for each in lists:
        each.clear()
    return float(count)


def _each(completion: str, cases: Any, messages: Any) -> float:
    return _emptying([cases["in"], messages[0]["calls"], messages])


async def _concurrent(completion: str, cases: Any, messages: Any) -> float:
    return _each(completion, cases, messages)


def _together(prompts: Any, completions: Any, cases: Any, **columns: Any) -> list[float]:
    talks = zip(prompts, completions, cases, strict=True)
    return [
        _emptying([case["in"], talk[0]["tool_calls"][0]["names"], prompt[0]["calls"], prompt])
        for prompt, talk, case in talks
    ]


@pytest.mark.parametrize(("function", "score"), [(_each, 6.0), (_concurrent, 6.0), (_together, 7.0)])
def test_each_completion_and_each_reward_has_its_own_values(function: Callable[..., Any], score: float) -> None:
    """The completions of a problem share it: a reward's changes must not reach another call."""
    message: Any = {"role": "user", "content": "?", "calls": [1, 2]}
    problem = Problem("", messages=(message,), extras={"cases": {"in": [1, 2, 3]}})
    answer: Any = {"role": "assistant", "content": "a", "tool_calls": [{"names": ["f"]}]}
    samples = [Sample(problem, "a", messages=(answer,)) for _ in range(4)]
    reward: RewardFunction = reward_function("f", function)
    for _ in range(2):  # two rewards of a round
        scores = [each.get("score", each) for call in reward.split(samples) for each in reward.answers(call)]
        assert scores == [score] * 4


@pytest.mark.parametrize(
    "returned", [{0.5, 1.0}, frozenset({0.5, 1.0}), {0: 0.5, 1: 1.0}, {0: 0.5, 1: 1.0}.keys(), b"01", "01", 1.0]
)
def test_what_has_no_order_of_the_completions_is_no_list_of_rewards(returned: Any) -> None:
    """A set or a dict would assign rewards to the wrong completions."""
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
