"""Rounds of a worker, with a scripted sampler."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs
from transformers import PreTrainedTokenizerFast

from policy_trainer.config import DataConfig, JudgingConfig, RolloutConfig, RolloutLossConfig, SamplingConfig
from policy_trainer.data.completion import Completion
from policy_trainer.data.problem import Problem, Sample
from policy_trainer.data.prompts import EncodedPrompt, PromptEncoder, PromptTooLong
from policy_trainer.data.tasks.arithmetic import Arithmetic
from policy_trainer.reporting.metrics import WastedSamples
from policy_trainer.rollout.rounds import Round
from policy_trainer.rollout.sampling.sampler import SamplingParams
from shared.errors import UserError
from tests.policy_trainer.rollout.fakes import Counting, Scripted, make_rounds, publication


@pytest.fixture
def made(tokenizer: PreTrainedTokenizerFast) -> Any:
    def make(
        mixed: set[int], *, draw: Iterator[int], data: DataConfig | None = None, **sampling: Any
    ) -> tuple[Round, Scripted]:
        config = RolloutConfig(
            model="m",
            data=data or DataConfig(),
            sampling=SamplingConfig(num_generations=2, prompts_per_round=3, **sampling),
        )
        sampler = Scripted(tokenizer, mixed)
        return make_rounds(tokenizer, sampler, config).next(lambda: next(draw), publication(), 3), sampler

    return make


def indexes(made: Round) -> list[int]:
    return [group.index for group in made.groups]


def test_a_batchs_sample_is_readable(made: Any) -> None:
    plain, _ = made({1}, draw=iter(range(100)))
    texts = [{"prompt": str(i), "answer": str(i)} for i in range(3)]
    assert [group.about for group in plain.groups] == texts and [group.index for group in plain.groups] == [0, 1, 2]
    begun, _ = made({1}, draw=iter(range(100)), data=DataConfig(assistant_prefill=f"{' ' * 300}\n"))
    assert begun.groups[1].about == texts[1] | {"start": f"{' ' * 199}\n"}
    turns = [("user", "2+3?"), ("user", "y" * 999), ("assistant", "6")]
    problem = Problem("5", tuple({"role": role, "content": text} for role, text in turns), prompt="x")
    judgement = replace(plain.groups[0].judgement, samples=[Sample(problem, "")])
    assert replace(plain.groups[0], judgement=judgement).about == {"prompt": "y" * 300, "answer": "5"}
    assert begun.groups[1].judgement.samples[0].start == f"{' ' * 300}\n"


def test_without_resampling_a_group_without_variance_is_kept(made: Any) -> None:
    result, sampler = made({1}, draw=iter(range(100)))
    assert indexes(result) == [0, 1, 2]
    assert (result.wasted, len(sampler.seeds)) == (WastedSamples(), 1)
    assert [group.judgement.rewards.tolist() for group in result.groups] == [[1, 1], [1, 0], [1, 1]]


def test_groups_without_variance_are_replaced(made: Any) -> None:
    result, sampler = made({1, 5, 6}, draw=iter(range(100)), max_resamples=9)
    # 0 and 2 are replaced by 3 and 4, and these by 5 and 6.
    assert indexes(result) == [1, 5, 6]
    assert result.wasted.resampled_groups == 4
    assert result.wasted.resampled_tokens == 4 * 2 * len(sampler.answer(0).ids)
    assert len(set(sampler.seeds)) == 3
    # A worker among several draws only its problems; the last groups stay whatever their rewards are.
    bounded, _ = made({6, 11}, draw=iter(range(1, 100, 5)), max_resamples=1)
    assert indexes(bounded) == [6, 11, 16]
    assert bounded.wasted.resampled_groups == 1


def test_too_long_prompts_are_dropped_and_counted_or_refused(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Problems from 10 on have two tokens."""
    result, _ = made(set(), draw=iter([8, 10, 9, 11, 7]), data=DataConfig(max_prompt_length=1))
    assert (indexes(result), result.wasted.dropped_prompts) == ([7, 8, 9], 2)
    refuse, unless = DataConfig(max_prompt_length=1, too_long="refuse"), r"or set --data\.too-long drop$"
    with pytest.raises(UserError, match=rf"^problem 10: .*has 2 tokens .*; raise that limit, {unless}"):
        made(set(), draw=iter([8, 10, 9]), data=refuse)
    with monkeypatch.context() as patch:
        patch.setattr(PromptEncoder, "_too_long", lambda *_: PromptTooLong("it is long", "shorten it"))
        with pytest.raises(UserError, match=rf"^problem 10: it is long; shorten it; {unless}"):
            made(set(), draw=iter([8, 10, 9]), data=refuse)
    monkeypatch.setattr("policy_trainer.rollout.rounds._MAX_DROPPED_IN_A_ROW", 5)
    with pytest.raises(UserError, match=r"^5 prompts in a row are unusable: a prompt has"):
        made(set(), draw=iter(range(10, 99)), data=DataConfig(max_prompt_length=1))


class Unusable(Counting):
    """Problems from 10 on, from two rows, have a text without tokens."""

    training_problems = 20

    def problem(self, index: int) -> Problem:
        if index < 10:
            return super().problem(index)
        return Problem(answer="1", prompt="", where=f"rows.jsonl:{index % 2 + 30}")


def test_unusable_problems_are_left_out_counted_and_named_once(tokenizer: PreTrainedTokenizerFast) -> None:
    config = RolloutConfig(model="m", sampling=SamplingConfig(num_generations=2, prompts_per_round=3))
    rounds = make_rounds(tokenizer, Scripted(tokenizer, set()), config, task=Unusable())
    with capture_logs() as events:
        result = rounds.next(iter([8, 10, 9, 12, 14, 11, 7]).__next__, publication(), 3)
    assert (indexes(result), result.wasted.dropped_prompts) == ([7, 8, 9], 4)
    reasons = [event["reason"].partition(": ")[0] for event in events if event["event"] == "a problem is left out"]
    assert reasons == ["rows.jsonl:30", "rows.jsonl:31"]
    with pytest.raises(UserError, match=r"^40 prompts in a row are unusable: rows\.jsonl:31: .*has no tokens"):
        rounds.next(iter(range(10, 99)).__next__, publication(), 3)


class EachOtherwise(Unusable):
    """All but the first ten have a row of their own."""

    training_problems = 60

    def problem(self, index: int) -> Problem:
        return replace(super().problem(index), where=f"rows.jsonl:{index}")


def test_only_the_first_reasons_are_named(tokenizer: PreTrainedTokenizerFast) -> None:
    config = RolloutConfig(model="m", sampling=SamplingConfig(num_generations=2, prompts_per_round=1))
    rounds = make_rounds(tokenizer, Scripted(tokenizer, set()), config, task=EachOtherwise())
    with capture_logs() as events:
        result = rounds.next(iter([*range(10, 40), 8]).__next__, publication(), 1)
    assert result.wasted.dropped_prompts == 30
    named = [event["problem"] for event in events if event["event"] == "a problem is left out"]
    assert named == [*range(10, 20)]
    assert events[-1]["event"] == "a problem is left out: further ones are only counted"


def test_steps_travel_with_the_group(tokenizer: PreTrainedTokenizerFast) -> None:
    task = Arithmetic(0)
    problem = task.problem(0)
    a, b = (int(n) for n in problem.messages[0]["content"].removesuffix("=?").split("+"))
    text = f"<think>{a % 10}+{b % 10}={a % 10 + b % 10},1+1=3</think><answer>{a + b}</answer>"

    class Worked(Scripted):
        def answer_all(
            self, prompts: Sequence[EncodedPrompt], params: SamplingParams, seed: int
        ) -> list[list[Completion]]:
            ids = np.array([*tokenizer.encode(text), tokenizer.eos_token_id])
            blurted = np.array([*tokenizer.encode("<answer>-1</answer>"), tokenizer.eos_token_id])
            return [[Completion(i, np.zeros(len(i), dtype=np.float32), True) for i in (ids, blurted)]]

    config = RolloutConfig(
        model="m",
        judging=JudgingConfig(steps=True),
        # The outcomes differ, and so do the steps: no other problem is drawn, of which there is none.
        sampling=SamplingConfig(num_generations=2, prompts_per_round=1, max_resamples=1),
    )
    rounds = make_rounds(tokenizer, Worked(tokenizer, set()), config, task)
    steps = rounds.next(iter([0]).__next__, publication(), 1).groups[0].steps
    assert steps is not None
    assert steps.counts.tolist() == [3, 1]
    assert steps.rewards.tolist() == [1, 0, 1, 0]
    assert steps.ends[2] == len(tokenizer.encode(text)) - 1  # the tag: the end token has no text


@pytest.mark.parametrize(("advantage", "kept"), [("gdpo", [0, 1, 2]), ("outcome", [9, 10, 11])])
def test_gdpo_compares_rewards_separately(tokenizer: PreTrainedTokenizerFast, advantage: str, kept: list[int]) -> None:
    """A right answer without tags and a wrong one with them: 1 each."""

    class Either(Scripted):
        def answer_all(
            self, prompts: Sequence[EncodedPrompt], params: SamplingParams, seed: int
        ) -> list[list[Completion]]:
            return [[self.say("<answer>7</answer>"), self.say("<think>7</think><answer>1</answer>")] for _ in prompts]

        def say(self, text: str) -> Completion:
            ids = np.array(tokenizer.encode(text))
            return Completion(ids, np.zeros(len(ids), dtype=np.float32), finished=True)

    class Sevens(Counting):
        def problem(self, index: int) -> Problem:
            return Problem(answer="7", prompt=str(index))

    config = RolloutConfig(
        model="m",
        rewards=["accuracy", "format"],
        sampling=SamplingConfig(num_generations=2, prompts_per_round=3, max_resamples=3),
        loss=RolloutLossConfig(advantage=advantage),
    )
    rounds = make_rounds(tokenizer, Either(tokenizer, set()), config, Sevens())
    assert indexes(rounds.next(iter(range(100)).__next__, publication(), 3)) == kept
