"""Completions to rewards: parts, weights, totals."""

import math
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from policy_trainer.cli.demo.base_model import make_tokenizer
from policy_trainer.config import DataConfig, TrainConfig
from policy_trainer.data.completion import Completion
from policy_trainer.data.problem import Problem
from policy_trainer.rewards import Comparison, equal_math, equal_number, equal_text
from policy_trainer.rewards.answers import ByAnswer
from policy_trainer.rewards.judging import RewardScorer
from shared.errors import UserError

USER = {"role": "user", "content": "1+1=?"}
PROBLEM = Problem(answer="2", messages=(USER,))


class FakeTask:
    name = "fake"
    default_rewards = ("accuracy", "tags")

    def __init__(self, compare: Comparison = equal_text) -> None:
        self.correct = ByAnswer(compare)

    def problem(self, index: int) -> Problem:
        raise NotImplementedError

    def eval_problems(self) -> list[Problem]:
        return []


def completed(tokenizer: PreTrainedTokenizerFast, text: str) -> Completion:
    ids = [*tokenizer.encode(text), 1]
    return Completion(np.array(ids), np.zeros(len(ids), np.float32), True)


RIGHT = "<think></think><answer>2</answer>"
TEXTS = (RIGHT, "<answer>2</answer>", "<think></think><answer>3</answer>", "well", RIGHT + RIGHT)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, [2, 1, 1, 0, 1]),
        ({"rewards": ["format"]}, [1, 0, 1, 0, 1]),
        ({"rewards": ["tags", "accuracy"], "reward_weights": [2.0, 0.25]}, [2.25, 0.25, 2, 0, 0.25]),
        ({"rewards": ["accuracy", "tags"], "reward_weights": [-1.0, 0.0]}, [-1, -1, 0, 0, -1]),
    ],
)
@pytest.mark.parametrize("compare", [equal_text, equal_math])
def test_totals(
    tokenizer: PreTrainedTokenizerFast, config: dict[str, Any], expected: list[float], compare: Comparison
) -> None:
    """Judged here and judged apart."""
    judge = RewardScorer(tokenizer, FakeTask(compare), TrainConfig(model="m", **config))
    (judged,) = judge.judge([(PROBLEM, [completed(tokenizer, text) for text in TEXTS])])
    assert judged.rewards.dtype == np.float32
    assert judged.rewards.tolist() == expected
    assert judge.right(judged.samples).tolist() == [1, 1, 0, 0, 1]  # whatever the rewards are
    if not config:
        parts = {name: part.tolist() for name, part in judged.parts.items()}
        assert parts == {"accuracy": [1, 1, 0, 0, 1], "tags": [1, 0, 1, 0, 0]}


def test_a_total_that_no_batch_takes_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    config = TrainConfig(model="m", rewards=["accuracy"], reward_weights=[-2e6])
    with pytest.raises(UserError, match=r"reward_weights: .* 2e\+06"):
        RewardScorer(tokenizer, FakeTask(), config).judge([(PROBLEM, [completed(tokenizer, text) for text in TEXTS])])


@pytest.mark.parametrize(("weight", "totals"), [(0.0, [1, 0]), (0.5, [math.nan, math.nan])])
def test_an_unjudged_part_with_a_weight_leaves_the_total_unrewarded(
    tokenizer: PreTrainedTokenizerFast, weight: float, totals: list[float]
) -> None:
    config = TrainConfig(model="m", rewards=["accuracy", "tags"], reward_weights=[weight, 1.0])
    judge = RewardScorer(tokenizer, FakeTask(equal_number), config)
    problem = Problem(answer="two", messages=(USER,))
    (judged,) = judge.judge([(problem, [completed(tokenizer, text) for text in (RIGHT, "well")])])
    assert judged.rewards.tolist() == pytest.approx(totals, nan_ok=True)
    assert judged.parts["tags"].tolist() == [1, 0] and np.isnan(judged.parts["accuracy"]).all()


@pytest.fixture
def two_ends() -> PreTrainedTokenizerFast:
    """A tokenizer with a second end token, `<|eot|>`, that it does not mark as special."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens("<|eot|>")
    return tokenizer


@pytest.mark.parametrize(
    ("text", "finished", "eos", "judged"),
    [
        (RIGHT + "<|end|>", True, True, RIGHT),
        (RIGHT + "<|eot|>", True, True, RIGHT),
        # The last token of a stop text, or the one at the length limit.
        ("1<|eot|>" + RIGHT, True, False, "1<|eot|>" + RIGHT),
        ("1 é日<|eot|>", False, False, "1 é日<|eot|>"),
    ],
)
def test_only_an_eos_is_no_text(
    two_ends: PreTrainedTokenizerFast, text: str, finished: bool, eos: bool, judged: str
) -> None:
    judge = RewardScorer(two_ends, FakeTask(), TrainConfig(model="m"))
    ids = np.array(two_ends.encode(text))
    completion = Completion(ids, np.zeros(len(ids), np.float32), finished, eos)
    assert judge.text(completion) == judged
    (sample,) = judge.samples(PROBLEM, [completion])
    assert (sample.problem, sample.completion, sample.tokens, sample.finished) == (PROBLEM, judged, len(ids), finished)


@pytest.mark.parametrize(("opening", "given"), [("<think>", {}), ("", {"assistant_prefill": "<think>"})])
def test_rewards_see_the_whole_answer(opening: str, given: dict[str, str]) -> None:
    """With the tag that the chat template opens it with, or the prefill does."""
    tokenizer = make_tokenizer()
    assert isinstance(tokenizer.chat_template, str)
    tokenizer.chat_template = tokenizer.chat_template.replace("<|assistant|>", "<|assistant|>" + opening)
    config = TrainConfig(model="m", rewards=["format", "tags", "accuracy"], data=DataConfig.model_validate(given))
    judge = RewardScorer(tokenizer, FakeTask(), config)
    completions = [completed(tokenizer, text) for text in (RIGHT.removeprefix("<think>"), RIGHT)]
    (judged,) = judge.judge([(PROBLEM, completions)])
    assert judged.parts["format"].tolist() == [1, 1]
    assert judged.parts["tags"].tolist() == [1, 0]  # the second has the opening tag twice
    assert judged.samples[0].completion == RIGHT and judged.samples[0].sampled == RIGHT.removeprefix("<think>")
    assert judged.samples[0].ids == tuple(completions[0].ids)


def test_the_recipes_that_prepend_a_tag_see_the_sampled_part(tokenizer: PreTrainedTokenizerFast) -> None:
    problem = Problem("3", (USER,), extras={"numbers": (1, 2), "target": 3}, assistant_prefill="Let me see.\n<think>")
    judge = RewardScorer(
        tokenizer, FakeTask(), TrainConfig(model="m", rewards=["countdown/nano_aha", "grpo_zero/format"])
    )
    (judged,) = judge.judge([(problem, [completed(tokenizer, "1+2</think>\n<answer>1+2</answer>")])])
    assert {name: part.tolist() for name, part in judged.parts.items()} == {
        "nano_aha/format": [1],
        "nano_aha/equation": [1],
        "grpo_zero/format": [1],
    }


def test_a_round_is_judged_in_one_call_and_split_by_problem(tokenizer: PreTrainedTokenizerFast) -> None:
    other = Problem(answer="3", messages=(USER,))
    judge = RewardScorer(tokenizer, FakeTask(), TrainConfig(model="m"))
    judged = judge.judge([(problem, [completed(tokenizer, text) for text in TEXTS]) for problem in (PROBLEM, other)])
    assert [item.rewards.tolist() for item in judged] == [[2, 1, 1, 0, 1], [1, 0, 2, 0, 0]]
    assert [item.parts["accuracy"].tolist() for item in judged] == [[1, 1, 0, 0, 1], [0, 0, 1, 0, 0]]
    assert {sample.problem.answer for sample in judged[1].samples} == {"3"}


FAULTY = "tests.policy_trainer.rewards.faulty"


def test_none_leaves_a_reward_out_of_the_total(tokenizer: PreTrainedTokenizerFast) -> None:
    """NaN means that it cannot be judged; without any reward there is no total."""
    config = TrainConfig(model="m", rewards=["tags", f"{FAULTY}:unanswering"], reward_weights=[2.0, 1.0])
    judge = RewardScorer(tokenizer, FakeTask(), config)
    (judged,) = judge.judge([(PROBLEM, [completed(tokenizer, text) for text in ("none", "nan", "one", RIGHT)])])
    assert judged.rewards.tolist() == pytest.approx([0, math.nan, 1, 3], nan_ok=True)
    assert judged.parts[f"{FAULTY}:unanswering"].tolist() == pytest.approx([math.nan, math.nan, 1, 1], nan_ok=True)
    silent = RewardScorer(tokenizer, FakeTask(), TrainConfig(model="m", rewards=[f"{FAULTY}:silent"]))
    assert np.isnan(silent.judge([(PROBLEM, [completed(tokenizer, "a")])])[0].rewards).all()


def test_no_process_is_started_that_no_reward_needs(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    monkeypatch.setattr("policy_trainer.rewards.sandbox.UserProcess", lambda *what, **limits: started.append(what))
    judge = RewardScorer(tokenizer, FakeTask(equal_math), TrainConfig(model="m", rewards=["format"]))
    without = Problem(answer="", messages=(USER,))
    assert judge.judge([(PROBLEM, [completed(tokenizer, RIGHT)])])[0].rewards.tolist() == [1]
    assert np.isnan(judge.right(judge.samples(without, [completed(tokenizer, RIGHT)]))).all()
    assert started == []
