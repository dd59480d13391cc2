"""Functions as rewards: by name where another process can import them, else called in this process."""

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


def test_a_function_of_a_module_is_named() -> None:
    assert importable_name(faulty.hanging) == "tests.policy_trainer.rewards.faulty:hanging"
    assert reward_input(["accuracy", faulty.hanging])[0] == [
        "accuracy",
        "tests.policy_trainer.rewards.faulty:hanging",
    ]


def in_a_notebook() -> Any:
    space: dict[str, Any] = {"__name__": "__main__"}
    exec("def f(completion): return 1.0", space)
    return space["f"]


def shadowed() -> Any:
    """A function whose name in its module has another value now."""
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
def test_functions_that_cannot_be_imported_run_here(function: Any) -> None:
    assert importable_name(function) is None
    names, here = reward_input(function)
    (name,) = here
    assert names == [f"caller:{name}"]


def test_names_are_unique_and_parameters_decide_the_calls() -> None:
    names, here = reward_input([lambda completion: 1.0, lambda completions: [1.0], Stateful(), "format"])
    assert names == ["caller:function", "caller:function_2", "caller:Stateful", "format"]
    assert [function.calls for function in here.values()] == ["each", "together", "together"]


def test_other_objects_are_refused() -> None:
    with pytest.raises(UserError, match="rewards: must be names and functions, got 3"):
        reward_input([3])  # type: ignore[list-item]
