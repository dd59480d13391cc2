"""Functions as rewards: by name where another process finds them, else by way of the caller."""

import functools
from typing import Any

import pytest

from policy_trainer.python_api.inputs import importable_name, reward_input
from shared.errors import UserError
from tests.policy_trainer.rewards import faulty


def of_this_module(completion: str) -> float:
    return 0.0


class Stateful:
    def __call__(self, completions: list[str]) -> list[float]:
        return [0.0] * len(completions)

    def method(self, completion: str) -> float:
        return 0.0


def test_a_function_of_a_module_goes_by_its_name() -> None:
    assert importable_name(faulty.hanging) == "tests.policy_trainer.rewards.faulty:hanging"
    assert reward_input(["accuracy", faulty.hanging]).names == [
        "accuracy",
        "tests.policy_trainer.rewards.faulty:hanging",
    ]


def in_a_notebook() -> Any:
    space: dict[str, Any] = {"__name__": "__main__"}
    exec("def f(completion): return 1.0", space)
    return space["f"]


def shadowed() -> Any:
    """A function that its module has under this name no more."""
    space: dict[str, Any] = {"__name__": faulty.__name__}
    exec("def hanging(completion): return 1.0", space)
    return space["hanging"]


@pytest.mark.parametrize(
    "function",
    [
        lambda completion: 1.0,
        in_a_notebook(),
        shadowed(),
        Stateful(),
        Stateful().method,
        Stateful.method,
        functools.partial(of_this_module),
        functools.wraps(of_this_module)(lambda completion: 1.0),
    ],
)
def test_what_no_other_process_finds_runs_here(function: Any) -> None:
    assert importable_name(function) is None
    rewards = reward_input(function)
    ((name, _),) = rewards.here.items()
    assert rewards.names == [f"caller:{name}"]


def test_each_has_a_name_of_its_own_and_is_called_as_its_parameters_ask() -> None:
    rewards = reward_input([lambda completion: 1.0, lambda completions: [1.0], Stateful(), "format"])
    assert rewards.names == ["caller:function", "caller:function_2", "caller:Stateful", "format"]
    assert [function.calls for function in rewards.here.values()] == ["each", "together", "together"]


def test_what_is_no_reward_is_refused() -> None:
    with pytest.raises(UserError, match="rewards: must be names and functions, got 3"):
        reward_input([3])  # type: ignore[list-item]
