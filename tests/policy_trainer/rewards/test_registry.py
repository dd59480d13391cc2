"""Rewards by name: which are chosen, and errors."""

from typing import Any
from unittest.mock import ANY

import pytest

from policy_trainer.config import CommonConfig, TrainConfig
from policy_trainer.data.problem import Correct, Problem
from policy_trainer.data.tasks.arithmetic import Arithmetic
from policy_trainer.rewards import Sample, equal_math, equal_text, registry
from policy_trainer.rewards.answers import ByAnswer, ByTask, format_reward, tags_reward
from policy_trainer.rewards.registry import RULES, SUMS, choose_rewards, part_weights
from policy_trainer.rewards.sandbox import Sandboxed
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


def test_several_reward_models_have_their_own_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "RewardModel", lambda config: (config.path, config.batch_size))
    rewards = chosen("model/some/hub-id", "model//a/directory", judging={"model": {"batch_size": 3}})
    assert rewards == {"model/some/hub-id": ("some/hub-id", 3), "model//a/directory": ("/a/directory", 3)}


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


@pytest.mark.parametrize(
    ("name", "sample", "expected"),
    [
        ("length", (0, ""), 0),
        ("length", (1, ""), -0.01),
        ("length", (101, ""), -1),
        ("soft_overlong", (80, ""), 0),
        ("soft_overlong", (81, ""), -0.05),
        ("soft_overlong", (200, ""), -1),
        ("repetition", (0, ""), 0),
        ("repetition", (0, "a a"), 0),  # one run of two words
        ("repetition", (0, "a a a"), -1),  # the second of two
        ("repetition", (0, "a A\ta\na"), -4 / 3),
        ("repetition", (0, "a b a b"), -2 / 3),
        ("repetition", (0, "a " * 1001), -2 * 999 / 1000),
    ],
)
def test_penalties(name: str, sample: tuple[int, str], expected: float) -> None:
    """soft_overlong: of 100 tokens the last 20."""
    penalty = {"length_tokens": 100, "repetition_ngram": 2, "repetition_max": 2.0, "overlong_tokens": 20}
    (score,) = chosen(name, judging={"penalty": penalty}, sampling={"max_completion_length": 100}).values()
    tokens, text = sample
    assert score(Sample(Problem(""), text, tokens)) == pytest.approx(expected)


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
        (
            ("model",),
            {"judging": {"model": {"path": "/dev/null/no"}}},
            r"judging\.model\.path: .*there is no directory",
        ),
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
