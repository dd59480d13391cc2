"""How a user's function is called, from the names of its parameters."""

from collections.abc import Callable
from typing import Any

import pytest

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
