"""Failures of rewards travel with batches, and are summed up; batches of others may hold anything."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from policy_trainer.processes.lifecycle.endings import RunFailed
from policy_trainer.reporting.reward_failures import RewardFailures, reported
from shared.errors import UserError

ERROR = 'Traceback (most recent call last):\n  File "/home/me/mine.py", line 3, in f\nKeyError: "no\x1b[31m"\n'


def batch(count: int = 0, *, rewards: tuple[float, ...] = (1.0, np.nan)) -> Any:
    sample = {"index": 3, **reported({"mine:f": (count, ERROR)} if count else {})}
    return SimpleNamespace(rewards=np.array(rewards), sample=json.dumps(sample))


def test_the_first_failure_and_the_sum_at_the_end_are_told() -> None:
    failures = RewardFailures(after=8)
    assert failures.observe([batch()]) == [] == failures.summary()
    (sentence,) = failures.observe([batch(3), batch(2)])
    assert (
        sentence
        == 'mine:f failed on 5 completions so far; the first error: KeyError: "no\\x1b[31m" (/home/me/mine.py:3)'
    )
    assert failures.summary() == []  # nothing has failed since
    assert failures.observe([batch(1)]) == []
    assert [text.split(";")[0] for text in failures.summary()] == ["mine:f failed on 6 completions so far"]


def test_first_steps_without_any_reward_end_the_run() -> None:
    nothing = (np.nan, np.nan)
    failures = RewardFailures(after=2)
    failures.observe([batch(2, rewards=nothing)])
    with pytest.raises(RunFailed, match=r"mine:f failed on the first 4 completions: KeyError") as failure:
        failures.observe([batch(2, rewards=nothing)])
    assert isinstance(failure.value, UserError) and "KeyError" in str(failure.value.__cause__)


@pytest.mark.parametrize(
    "sample",
    [None, "[]", '{"reward_failures": 1}', '{"reward_failures": {"f": 1}}', '{"reward_failures": {"f": {}}}',
     '{"reward_failures": {"f": {"completions": -1, "error": "x"}}}',
     '{"reward_failures": {"f": {"completions": 1, "error": ["x"]}}}',
     '{"reward_failures": {"f": {"completions": %s, "error": "x"}}}' % ("9" * 4300)],
)  # fmt: skip
def test_what_others_put_there_is_ignored(sample: str | None) -> None:
    strange: Any = SimpleNamespace(rewards=np.ones(2), sample=sample)
    assert RewardFailures(after=1).observe([strange, strange]) == []


def test_many_and_long_errors_fit_into_a_sample() -> None:
    many = {f"mine:{'f' * 100}{i}": (1, "\N{GRINNING FACE}" * 9000) for i in range(50)}
    assert len(json.dumps(reported(many))) < 2000


def test_invented_names_are_few() -> None:
    failures, sentences = RewardFailures(after=1), list[str]()
    for number in range(100):
        sample = json.dumps({"reward_failures": {f"reward {number}": {"completions": 1, "error": "x"}}})
        stranger: Any = SimpleNamespace(rewards=np.ones(2), sample=sample)
        sentences += failures.observe([batch(1), stranger])
    assert len(sentences) == 64
    assert [sentence.split(";")[0] for sentence in failures.summary()] == ["mine:f failed on 100 completions so far"]
