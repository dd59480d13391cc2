"""Completions to rewards: parts, weights, totals."""

import math
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from policy_trainer.config import TrainConfig
from policy_trainer.judging import Judge
from policy_trainer.rewards import Comparison, equal_math, equal_number, equal_text
from policy_trainer.rewards.correct import ByAnswer
from policy_trainer.sampling.interface import Completion
from policy_trainer.tasks.interface import Problem
from shared.refusal import Refused

USER = {"role": "user", "content": "1+1=?"}
ASKED = Problem(answer="2", messages=(USER,))


class FakeTask:
    name = "fake"
    default_rewards = ("accuracy", "tags")

    def __init__(self, compare: Comparison = equal_text) -> None:
        self.correct = ByAnswer(compare)

    def problem(self, index: int) -> Problem:
        raise NotImplementedError

    def held_out(self) -> list[Problem]:
        return []


def said(tokenizer: PreTrainedTokenizerFast, text: str) -> Completion:
    ids = [*tokenizer.encode(text), 1]
    return Completion(np.array(ids), np.zeros(len(ids), np.float32), True)


RIGHT = "<think></think><answer>2</answer>"
TEXTS = (RIGHT, "<answer>2</answer>", "<think></think><answer>3</answer>", "well", RIGHT + RIGHT)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, [2, 1, 1, 0, 1]),
        ({"rewards": ["accuracy"]}, [1, 1, 0, 0, 1]),
        ({"rewards": ["accuracy", "format"]}, [2, 1, 1, 0, 2]),
        ({"rewards": ["accuracy", "tags"], "reward_weights": [2.0, 0.25]}, [2.25, 2, 0.25, 0, 2]),
        ({"rewards": ["tags", "accuracy"], "reward_weights": [2.0, 0.25]}, [2.25, 0.25, 2, 0, 0.25]),
        ({"rewards": ["accuracy", "tags"], "reward_weights": [-1.0, 0.0]}, [-1, -1, 0, 0, -1]),
    ],
)
@pytest.mark.parametrize("compare", [equal_text, equal_math])
def test_totals(
    tokenizer: PreTrainedTokenizerFast, config: dict[str, Any], expected: list[float], compare: Comparison
) -> None:
    """Judged here and judged apart."""
    judge = Judge(tokenizer, FakeTask(compare), TrainConfig(model="m", **config))
    judged = judge.judge(ASKED, [said(tokenizer, text) for text in TEXTS])
    assert judged.rewards.dtype == np.float32
    assert judged.rewards.tolist() == expected


def test_parts(tokenizer: PreTrainedTokenizerFast) -> None:
    judge = Judge(tokenizer, FakeTask(), TrainConfig(model="m"))
    parts = judge.judge(ASKED, [said(tokenizer, text) for text in TEXTS]).parts
    assert {name: part.tolist() for name, part in parts.items()} == {
        "accuracy": [1, 1, 0, 0, 1],
        "tags": [1, 0, 1, 0, 0],
    }
    assert all(part.dtype == np.float32 for part in parts.values())


def test_an_unjudged_part_leaves_the_total_unjudged(tokenizer: PreTrainedTokenizerFast) -> None:
    judge = Judge(tokenizer, FakeTask(equal_number), TrainConfig(model="m"))
    judged = judge.judge(Problem(answer="two", messages=(USER,)), [said(tokenizer, RIGHT)])
    assert math.isnan(judged.rewards[0]) and judged.parts["tags"].tolist() == [1]


def test_text_is_without_special_tokens_but_with_tags(tokenizer: PreTrainedTokenizerFast) -> None:
    judge = Judge(tokenizer, FakeTask(), TrainConfig(model="m"))
    assert judge.text(said(tokenizer, RIGHT + " é日")) == RIGHT + " é日"


@pytest.mark.parametrize("compare", [equal_text, equal_math])
def test_what_is_right_does_not_depend_on_the_rewards(tokenizer: PreTrainedTokenizerFast, compare: Comparison) -> None:
    judge = Judge(tokenizer, FakeTask(compare), TrainConfig(model="m", rewards=["format"]))
    samples = [judge.sample(ASKED, said(tokenizer, text)) for text in TEXTS]
    assert judge.right(samples).tolist() == [1, 1, 0, 0, 1]
    assert judge.score(samples).rewards.tolist() == [1, 0, 1, 0, 1]


def test_samples_say_how_a_completion_came_about(tokenizer: PreTrainedTokenizerFast) -> None:
    judge = Judge(tokenizer, FakeTask(), TrainConfig(model="m"))
    cut_off = Completion(np.array(tokenizer.encode("1+1")), np.zeros(3, np.float32), False)
    sample = judge.sample(ASKED, cut_off)
    assert (sample.problem, sample.completion, sample.tokens, sample.finished) == (ASKED, "1+1", 3, False)


def test_an_unknown_reward_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(Refused, match="rewards: 'speed'"):
        Judge(tokenizer, FakeTask(), TrainConfig(model="m", rewards=["speed"]))
