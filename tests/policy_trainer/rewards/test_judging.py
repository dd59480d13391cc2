"""Completions to rewards: parts, weights, totals."""

import math
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from transformers import PreTrainedTokenizerFast

from policy_trainer.config import DataConfig, JudgingConfig, TrainConfig
from policy_trainer.data.completion import Completion
from policy_trainer.data.problem import Problem
from policy_trainer.demo.base_model import make_tokenizer
from policy_trainer.rewards import Comparison, equal_math, equal_number, equal_text
from policy_trainer.rewards.answers import ByAnswer
from policy_trainer.rewards.judging import Judge
from shared.errors import UserError

USER = {"role": "user", "content": "1+1=?"}
ASKED = Problem(answer="2", messages=(USER,))


class FakeTask:
    name = "fake"
    default_rewards = ("accuracy", "tags")

    def __init__(self, compare: Comparison = equal_text) -> None:
        self.correct = ByAnswer(compare)

    def problem(self, index: int) -> Problem:
        raise NotImplementedError

    def eval_problems(self) -> list[Problem]:
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
    (judged,) = judge.judge([(ASKED, [said(tokenizer, text) for text in TEXTS])])
    assert judged.rewards.dtype == np.float32
    assert judged.rewards.tolist() == expected


def test_a_total_that_no_batch_takes_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    config = TrainConfig(model="m", rewards=["accuracy"], reward_weights=[-2e6])
    with pytest.raises(UserError, match=r"reward_weights: .* 2e\+06"):
        Judge(tokenizer, FakeTask(), config).judge([(ASKED, [said(tokenizer, text) for text in TEXTS])])


def test_parts(tokenizer: PreTrainedTokenizerFast) -> None:
    judge = Judge(tokenizer, FakeTask(), TrainConfig(model="m"))
    parts = judge.judge([(ASKED, [said(tokenizer, text) for text in TEXTS])])[0].parts
    assert {name: part.tolist() for name, part in parts.items()} == {
        "accuracy": [1, 1, 0, 0, 1],
        "tags": [1, 0, 1, 0, 0],
    }
    assert all(part.dtype == np.float32 for part in parts.values())


def test_an_unjudged_part_leaves_the_total_unrewarded(tokenizer: PreTrainedTokenizerFast) -> None:
    judge = Judge(tokenizer, FakeTask(equal_number), TrainConfig(model="m"))
    (judged,) = judge.judge([(Problem(answer="two", messages=(USER,)), [said(tokenizer, RIGHT)])])
    assert math.isnan(judged.rewards[0]) and judged.parts["tags"].tolist() == [1]


def test_an_unjudged_part_without_weight_leaves_the_total_judged(tokenizer: PreTrainedTokenizerFast) -> None:
    config = TrainConfig(model="m", rewards=["accuracy", "tags"], reward_weights=[0.0, 1.0])
    judge = Judge(tokenizer, FakeTask(equal_number), config)
    asked = Problem(answer="two", messages=(USER,))
    (judged,) = judge.judge([(asked, [said(tokenizer, text) for text in (RIGHT, "well")])])
    assert judged.rewards.tolist() == [1, 0]
    assert all(math.isnan(score) for score in judged.parts["accuracy"])


def test_text_is_without_special_tokens_but_with_tags(tokenizer: PreTrainedTokenizerFast) -> None:
    judge = Judge(tokenizer, FakeTask(), TrainConfig(model="m"))
    assert judge.text(said(tokenizer, RIGHT + " é日")) == RIGHT + " é日"


@pytest.fixture
def two_ends() -> PreTrainedTokenizerFast:
    """A tokenizer with a second end token, `<|eot|>`, that it does not mark as special."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens("<|eot|>")
    return tokenizer


@pytest.mark.parametrize("end", ["<|end|>", "<|eot|>"])
def test_no_rule_sees_an_eos(two_ends: PreTrainedTokenizerFast, end: str) -> None:
    config = TrainConfig(model="m", rewards=["accuracy", "format", "tags"])
    judge = Judge(two_ends, FakeTask(), config)
    ids = np.array(two_ends.encode(RIGHT + end))
    completion = Completion(ids, np.zeros(len(ids), np.float32), finished=True, eos=True)
    assert judge.text(completion) == RIGHT
    assert judge.judge([(ASKED, [completion])])[0].rewards.tolist() == [3]
    assert judge.samples(ASKED, [completion])[0].tokens == len(ids)


@pytest.mark.parametrize("finished", [True, False])
def test_what_is_no_eos_is_text(two_ends: PreTrainedTokenizerFast, finished: bool) -> None:
    """The last token of a stop text, or the one at the length limit."""
    judge = Judge(two_ends, FakeTask(), TrainConfig(model="m"))
    ids = np.array(two_ends.encode("1<|eot|>" + RIGHT))
    completion = Completion(ids, np.zeros(len(ids), np.float32), finished)
    assert judge.text(completion) == "1<|eot|>" + RIGHT


@pytest.mark.parametrize("compare", [equal_text, equal_math])
def test_what_is_right_does_not_depend_on_the_rewards(tokenizer: PreTrainedTokenizerFast, compare: Comparison) -> None:
    judge = Judge(tokenizer, FakeTask(compare), TrainConfig(model="m", rewards=["format"]))
    samples = judge.samples(ASKED, [said(tokenizer, text) for text in TEXTS])
    assert judge.right(samples).tolist() == [1, 1, 0, 0, 1]
    assert judge.score(samples).rewards.tolist() == [1, 0, 1, 0, 1]


@pytest.mark.parametrize(("said_there", "given"), [("<think>", {}), ("", {"assistant_prefill": "<think>"})])
def test_rewards_see_the_answer_whole(said_there: str, given: dict[str, str]) -> None:
    """With the tag that the chat template opens it with, or the prefill does."""
    tokenizer = make_tokenizer()
    assert isinstance(tokenizer.chat_template, str)
    tokenizer.chat_template = tokenizer.chat_template.replace("<|assistant|>", "<|assistant|>" + said_there)
    config = TrainConfig(model="m", rewards=["format", "tags", "accuracy"], data=DataConfig.model_validate(given))
    judge = Judge(tokenizer, FakeTask(), config)
    (judged,) = judge.judge([(ASKED, [said(tokenizer, RIGHT.removeprefix("<think>")), said(tokenizer, RIGHT)])])
    assert judged.parts["format"].tolist() == [1, 1]
    assert judged.parts["tags"].tolist() == [1, 0]  # the second has the opening tag twice
    assert judged.samples[0].completion == RIGHT and judged.samples[0].sampled == RIGHT.removeprefix("<think>")
    assert judged.samples[0].ids == tuple(said(tokenizer, RIGHT.removeprefix("<think>")).ids)
    assert judged.samples[0].tokens == len(judged.samples[0].ids)


def test_the_recipes_that_prepend_a_tag_see_the_sampled_part(tokenizer: PreTrainedTokenizerFast) -> None:
    asked = Problem("3", (USER,), extras={"numbers": (1, 2), "target": 3}, assistant_prefill="Let me see.\n<think>")
    judge = Judge(tokenizer, FakeTask(), TrainConfig(model="m", rewards=["countdown/nano_aha", "grpo_zero/format"]))
    (judged,) = judge.judge([(asked, [said(tokenizer, "1+2</think>\n<answer>1+2</answer>")])])
    assert {name: part.tolist() for name, part in judged.parts.items()} == {
        "nano_aha/format": [1],
        "nano_aha/equation": [1],
        "grpo_zero/format": [1],
    }


def test_a_round_is_judged_in_one_call_and_split_by_problem(tokenizer: PreTrainedTokenizerFast) -> None:
    other = Problem(answer="3", messages=(USER,))
    judge = Judge(tokenizer, FakeTask(), TrainConfig(model="m"))
    judged = judge.judge([(asked, [said(tokenizer, text) for text in TEXTS]) for asked in (ASKED, other)])
    assert [one.rewards.tolist() for one in judged] == [[2, 1, 1, 0, 1], [1, 0, 2, 0, 0]]
    assert [one.parts["accuracy"].tolist() for one in judged] == [[1, 1, 0, 0, 1], [0, 0, 1, 0, 0]]
    assert {sample.problem.answer for sample in judged[1].samples} == {"3"}


FAULTY = "tests.policy_trainer.rewards.faulty"


def test_none_leaves_a_reward_out_of_the_total(tokenizer: PreTrainedTokenizerFast) -> None:
    """NaN means that it cannot be judged; without any reward there is no total."""
    config = TrainConfig(model="m", rewards=["tags", f"{FAULTY}:unanswering"], reward_weights=[2.0, 1.0])
    judge = Judge(tokenizer, FakeTask(), config)
    (judged,) = judge.judge([(ASKED, [said(tokenizer, text) for text in ("none", "nan", "one", RIGHT)])])
    assert judged.rewards.tolist() == pytest.approx([0, math.nan, 1, 3], nan_ok=True)
    assert judged.parts[f"{FAULTY}:unanswering"].tolist() == pytest.approx([math.nan, math.nan, 1, 1], nan_ok=True)
    alone = Judge(tokenizer, FakeTask(), TrainConfig(model="m", rewards=[f"{FAULTY}:silent"]))
    assert np.isnan(alone.judge([(ASKED, [said(tokenizer, "a")])])[0].rewards).all()


def test_no_process_is_started_that_no_reward_needs(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    monkeypatch.setattr("policy_trainer.rewards.sandbox.SandboxProcess", lambda **limits: started.append(limits))
    judge = Judge(tokenizer, FakeTask(equal_math), TrainConfig(model="m", rewards=["format"]))
    without = Problem(answer="", messages=(USER,))
    assert judge.judge([(ASKED, [said(tokenizer, RIGHT)])])[0].rewards.tolist() == [1]
    assert np.isnan(judge.right(judge.samples(without, [said(tokenizer, RIGHT)]))).all()
    assert started == []


def test_samples_say_how_a_completion_came_about(tokenizer: PreTrainedTokenizerFast) -> None:
    judge = Judge(tokenizer, FakeTask(), TrainConfig(model="m"))
    cut_off = Completion(np.array(tokenizer.encode("1+1")), np.zeros(3, np.float32), False)
    (sample,) = judge.samples(ASKED, [cut_off])
    assert (sample.problem, sample.completion, sample.tokens, sample.finished) == (ASKED, "1+1", 3, False)


@pytest.mark.parametrize("limits", [{"seconds": 1e12}, {"seconds": 86_401}, {"seconds": 0}, {"memory_gib": -1}])
def test_limits_that_cannot_be_kept_are_refused(limits: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match=rf"(?s)judging\.{next(iter(limits))}.*(less|greater) than"):
        TrainConfig(model="m", judging=limits)  # pyright: ignore[reportArgumentType]


def test_the_longest_limit_is_kept(tokenizer: PreTrainedTokenizerFast) -> None:
    config = TrainConfig(model="m", judging=JudgingConfig(seconds=86_400))
    judge = Judge(tokenizer, FakeTask(equal_math), config)
    assert judge.right(judge.samples(ASKED, [said(tokenizer, RIGHT)])).tolist() == [1]


def test_an_unknown_reward_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UserError, match="rewards: 'speed'"):
        Judge(tokenizer, FakeTask(), TrainConfig(model="m", rewards=["speed"]))
