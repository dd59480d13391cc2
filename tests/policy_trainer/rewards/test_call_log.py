"""What functions log, by completion, wherever they run."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from policy_trainer.data.problem import Problem, Sample
from policy_trainer.rewards.call_log import KEY, CallLog, CallLogs, Logged
from policy_trainer.rewards.functions import reward_function

SAMPLES = [Sample(Problem(str(i), prompt=f"{i}?"), text) for i, text in enumerate(("a", "bb", "ccc"))]


def answers(function: Any) -> list[dict[str, Any]]:
    reward = reward_function("f", function)
    return [answer for call in reward.split(SAMPLES) for answer in reward.answers(call)]


def trl_style(completions: list[str], log_extra: Any = None, log_metric: Any = None, **columns: Any) -> list[float]:
    log_extra("length", [len(text) for text in completions])
    log_metric("mean", 1.0)
    log_metric("mean", 2.0)
    return [0.0] * len(completions)


def of_each(completion: str, log_extra: Any, log_metric: Any) -> float:
    log_metric("length", len(completion))
    if completion == "bb":
        log_extra("seen", ["yes"])
    return 0.0


async def concurrent(completion: str, log_metric: Any) -> float:
    log_metric("length", len(completion))
    return 0.0


def test_a_call_of_many_logs_for_each_of_them() -> None:
    logged = [Logged(**answer[KEY]) for answer in answers(trl_style)]
    assert logged == [Logged({"mean": 1.5}, {"length": length}) for length in (1, 2, 3)]


@pytest.mark.parametrize("function", [of_each, concurrent])
def test_a_call_of_one_logs_for_it(function: Any) -> None:
    metrics = [answer[KEY]["metrics"] for answer in answers(function)]
    assert metrics == [{"length": 1.0}, {"length": 2.0}, {"length": 3.0}]
    if function is of_each:
        assert [answer[KEY]["extras"] for answer in answers(function)] == [{}, {"seen": "yes"}, {}]


def test_functions_that_take_neither_get_neither() -> None:
    assert answers(lambda completion: 1.0) == [{"score": 1.0}] * 3


def test_a_column_of_another_length_is_a_failure() -> None:
    def wrong(completions: list[str], log_extra: Any) -> list[float]:
        log_extra("short", [1])
        return [0.0] * len(completions)

    (first, *_) = answers(wrong)
    assert "log_extra: short needs 3 values, one a completion; got 1" in first["error"]


def test_values_become_json() -> None:
    log = CallLog(6)
    log.log_extra("any", [np.float32(0.5), torch.tensor(2), None, float("nan"), [1, 2], True])
    log.log_metric("endless", float("inf"))
    log.log_metric("array", np.float64(3))
    values = [log.of(place)[KEY]["extras"]["any"] for place in range(6)]
    assert values == json.loads(json.dumps(values)) == [0.5, 2, None, None, "[1, 2]", True]
    assert log.of(0)[KEY]["metrics"] == {"array": 3.0}


def test_logs_of_several_rewards_are_joined_and_taken_once() -> None:
    logs = CallLogs()
    logs.add(SAMPLES, answers(of_each))
    logs.add(SAMPLES, answers(trl_style))
    assert logs.take(SAMPLES)[1] == Logged({"length": 2.0, "mean": 1.5}, {"seen": "yes", "length": 2})
    assert logs.take(SAMPLES) == [Logged()] * 3
