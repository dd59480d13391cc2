"""Rewards by name: which are chosen, and errors."""

from functools import partial
from typing import Any
from unittest.mock import ANY

import pytest

from policy_trainer.config import CommonConfig, TrainConfig
from policy_trainer.data.problem import Correct, Problem
from policy_trainer.rewards import Comparison, Sample, equal_math, equal_text
from policy_trainer.rewards.answers import ByAnswer, ByTask, format_reward, tags_reward, task_accuracy
from policy_trainer.rewards.registry import (
    RULES,
    SUMS,
    choose_rewards,
    length_penalty,
    part_weights,
    repetition_penalty,
    soft_overlong_penalty,
)
from policy_trainer.rewards.sandbox import Sandboxed
from policy_trainer.tasks.arithmetic import Arithmetic
from shared.errors import UserError


class FakeTask(Arithmetic):
    def __init__(self, correct: Correct) -> None:
        self.correct = correct  # type: ignore[misc]


def chosen(*names: str, correct: Correct = ByAnswer(equal_text), **config: Any) -> dict[str, Any]:  # noqa: B008
    return choose_rewards(TrainConfig(model="m", rewards=list(names), **config), FakeTask(correct))


def test_by_name_in_order_and_by_the_tasks_own() -> None:
    rewards = chosen("tags", "format", "my.rewards:reward")
    assert list(rewards) == ["tags", "format", "my.rewards:reward"]
    assert [*rewards.values()] == [tags_reward, format_reward, Sandboxed("my.rewards:reward", cut_off=ANY)]
    assert list(chosen()) == ["accuracy", "tags"]


@pytest.mark.parametrize("name", SUMS)
def test_a_recipe_is_its_parts(name: str) -> None:
    assert chosen(name) == {part: RULES[part] for part in SUMS[name]}
    assert part_weights(CommonConfig(model="m", rewards=[name]), Arithmetic(0)) == SUMS[name]


@pytest.mark.parametrize(
    ("correct", "in_sandbox"),
    [
        (ByAnswer(equal_text), False),
        (ByAnswer(equal_math), True),
        (ByTask({"a": ByAnswer(equal_text), "b": ByAnswer(equal_math)}), True),
        (lambda problem, completion: 1.0, False),
    ],
)
def test_accuracy_with_math_verify_is_sandboxed(correct: Correct, in_sandbox: bool) -> None:
    rule = chosen("accuracy", correct=correct)["accuracy"]
    assert isinstance(rule, Sandboxed) == in_sandbox
    reward: Any = rule.score if isinstance(rule, Sandboxed) else rule
    assert reward.args == (correct,)


@pytest.mark.parametrize(("compare", "answer"), [(equal_text, "2"), (equal_math, "4/2")])
def test_a_mixture_is_judged_by_the_task_of_each_problem(compare: Comparison, answer: str) -> None:
    reward = partial(task_accuracy, ByTask({"text": ByAnswer(equal_text), "other": ByAnswer(compare)}))
    completion = f"<answer>{answer}</answer>"
    assert reward(Sample(Problem("2", task="other"), completion)) == 1
    assert reward(Sample(Problem("2", task="text"), completion)) == (answer == "2")


def test_penalties_take_their_settings() -> None:
    penalty = {"length_tokens": 10, "repetition_ngram": 1, "repetition_max": 4.0, "overlong_tokens": 5}
    sampling = {"max_completion_length": 20}
    rules = chosen("length", "repetition", "soft_overlong", judging={"penalty": penalty}, sampling=sampling)
    sample = Sample(Problem(""), "a a", 17)
    scores = [rule(sample) for rule in rules.values()]
    assert scores == [-1, -2, pytest.approx(-0.4)]


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({}, {"accuracy": 1.0, "tags": 1.0}),
        ({"rewards": ["model", "format"], "reward_weights": [2.0, 0.0]}, {"model": 2.0, "format": 0.0}),
        (
            {"rewards": ["countdown/grpo_zero", "my.own:reward"], "reward_weights": [2.0, 3.0]},
            {"grpo_zero/format": 0.2, "grpo_zero/equation": 2.0, "my.own:reward": 3.0},
        ),
    ],
)
def test_weights_by_the_names_in_a_batch_without_loading_a_reward(
    settings: dict[str, Any], weights: dict[str, float]
) -> None:
    """The reward model's directory is missing, and the function is nowhere."""
    assert part_weights(CommonConfig(model="m", **settings), Arithmetic(0)) == weights


@pytest.mark.parametrize(
    ("names", "config", "words"),
    [
        (
            ("accuracy", "speed"),
            {},
            r"rewards: 'speed' is none of accuracy, .*, tags; give module:function or http://… for your own",
        ),
        (("format", "accuracy", "format"), {}, r"rewards: 'format' is given twice"),
        (("gsm8k/simple_grpo", "simple_grpo/format"), {}, r"rewards: 'simple_grpo/format' is given twice"),
        (("model",), {}, r"judging\.model\.path: reward `model` needs the directory or hub id"),
        (("model",), {"judging": {"model": {"path": "/nowhere"}}}, r"judging\.model\.path: .*there is no directory"),
        (
            ("soft_overlong",),
            {"sampling": {"max_completion_length": 100}},
            r"judging\.penalty\.overlong_tokens: must be at most sampling\.max_completion_length \(100\), got 128",
        ),
    ],
)
def test_refusals(names: tuple[str, ...], config: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        chosen(*names, **config)


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0), (1, -0.01), (100, -1), (101, -1)])
def test_length(tokens: int, expected: float) -> None:
    assert length_penalty(100)(Sample(Problem(""), "", tokens)) == expected


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0), (80, 0), (81, -0.05), (100, -1), (200, -1)])
def test_soft_overlong(tokens: int, expected: float) -> None:
    assert soft_overlong_penalty(100, 20)(Sample(Problem(""), "", tokens)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0),
        ("a a", 0),  # one run of two words
        ("a a a", -1),  # the second of two
        ("a A\ta\na", -4 / 3),
        ("a b a b", -2 / 3),
        ("a " * 1001, -2 * 999 / 1000),
    ],
)
def test_repetition(text: str, expected: float) -> None:
    assert repetition_penalty(2, 2.0)(Sample(Problem(""), text)) == pytest.approx(expected)
