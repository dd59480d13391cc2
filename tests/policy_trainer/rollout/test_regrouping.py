"""Problems whose rewards are all equal are kept, sampled again, and trained on once their rewards differ."""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from transformers import PreTrainedTokenizerFast

from policy_trainer.config import RolloutConfig, RolloutLossConfig, SamplingConfig
from policy_trainer.data.completion import Completion
from policy_trainer.data.prompts import EncodedPrompt
from policy_trainer.rollout.rounds import Round, Rounds
from policy_trainer.rollout.sampling.sampler import SamplingParams
from tests.policy_trainer.rollout.fakes import Scripted, make_rounds, publication

Make = Callable[..., Any]
# For each problem how many of four completions are right in its first, second, … round.
Script = dict[int, Sequence[int]]


class ByRound(Scripted):
    """Right so many times of four as the script says; the lengths tell the rounds apart."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, script: Script) -> None:
        super().__init__(tokenizer, set())
        self.script = script
        self.rounds: list[list[int]] = []

    def answer_all(self, prompts: Sequence[EncodedPrompt], params: SamplingParams, seed: int) -> list[list[Completion]]:
        self.seeds.append(seed)
        numbers = [int(str(self.tokenizer.decode(prompt.ids))) for prompt in prompts]
        earlier = [sum(number in round for round in self.rounds) for number in numbers]
        self.rounds.append(numbers)
        return [
            [self.answer(number if i < self.script.get(number, [2] * 9)[times] else -1) for i in range(4)]
            for number, times in zip(numbers, earlier, strict=True)
        ]


class Rig:
    def __init__(self, rounds: Rounds, sampler: ByRound, prompts: int) -> None:
        self.rounds, self.sampler, self.prompts = rounds, sampler, prompts
        self.draw = count().__next__

    def next(self, version: int = 0, **fields: Any) -> Round:
        return self.rounds.next(self.draw, publication(version, **fields), self.prompts)


@pytest.fixture
def make(tokenizer: PreTrainedTokenizerFast) -> Callable[..., Rig]:
    def made(script: Script, *, regroup: int = 3, prompts: int = 3, advantage: str = "outcome") -> Rig:
        sampling = SamplingConfig(num_generations=4, prompts_per_round=prompts, regroup=regroup)
        config = RolloutConfig(model="m", sampling=sampling, loss=RolloutLossConfig(advantage=advantage))
        sampler = ByRound(tokenizer, script)
        return Rig(make_rounds(tokenizer, sampler, config), sampler, prompts)

    return made


def summary(result: Round) -> dict[int, tuple[list[float], list[int]]]:
    """Rewards and versions of each group, by its problem."""
    return {group.index: (group.judgement.rewards.tolist(), group.versions.tolist()) for group in result.groups}


MIXED = [1, 1, 0, 0]


def test_a_group_whose_rewards_differ_is_not_kept(make: Make) -> None:
    rig = make({})
    assert summary(rig.next(5)) == {index: (MIXED, [5] * 4) for index in range(3)}
    assert summary(rig.next(6)) == {index: (MIXED, [6] * 4) for index in range(3, 6)}


def test_completions_of_two_rounds_make_a_group(make: Make) -> None:
    """All wrong at first, all right later: only together they differ."""
    rig = make({1: [0, 4]})
    assert list(summary(rig.next(5))) == [0, 2]
    second = rig.next(6)
    assert rig.sampler.rounds == [[0, 1, 2], [3, 4, 1]]
    assert list(summary(second)) == [1, 3, 4]  # in the order of the problems
    group = second.groups[0]
    assert {(version, reward) for version, reward in zip(group.versions, group.judgement.rewards, strict=True)} == {
        (5, 0),
        (6, 1),
    }
    assert len(group.completions) == 4 and sorted(group.versions) == group.versions.tolist()
    assert group.versions.dtype == np.int64
    # All that belongs to a completion stayed with it.
    for completion, sample, reward, part in zip(
        group.completions,
        group.judgement.samples,
        group.judgement.rewards,
        group.judgement.parts["accuracy"],
        strict=True,
    ):
        assert tuple(completion.ids.tolist()) == sample.ids
        assert reward == part == ("<answer>1</answer>" in sample.completion)
    assert list(summary(rig.next(7))) == [5, 6, 7]  # it is kept no longer


def test_separate_rewards_stay_with_their_completions(make: Make) -> None:
    rig = make({1: [0, 4]}, advantage="gdpo")
    rig.next()
    group = rig.next().groups[0]
    assert len(group.completions) == 4
    assert group.compared_rewards.tolist() == [part.tolist() for part in group.judgement.parts.values()]
    assert sorted(group.judgement.rewards) != [0] * 4


def test_a_problem_is_kept_for_so_many_rounds_and_then_goes_as_it_is(make: Make) -> None:
    rig = make({1: [0] * 9}, regroup=2)
    assert [list(summary(rig.next(version))) for version in range(2)] == [[0, 2], [3, 4]]
    third = rig.next(2)
    assert summary(third)[1] == ([0] * 4, [2] * 4)  # its newest completions
    assert [1 in round for round in rig.sampler.rounds] == [True, True, True]
    rig.next(3)
    assert 1 not in rig.sampler.rounds[-1]


def test_each_round_has_a_new_problem_and_a_seed_of_its_own(make: Make) -> None:
    """A seed comes of the first problem: with that of a kept one the same completions would come again."""
    rig = make({index: [0] * 9 for index in range(99)}, regroup=4)
    rig.next()
    assert rig.sampler.rounds[0] == [0, 1, 2] and rig.sampler.rounds[1] == [3, 0, 1]
    assert len(set(rig.sampler.seeds)) == len(rig.sampler.seeds)


def test_a_round_goes_on_until_it_has_a_group(make: Make) -> None:
    rig = make({index: [0] * 9 for index in range(99)}, regroup=2)
    assert list(summary(rig.next())) == [0, 1, 2]
    assert len(rig.sampler.rounds) == 3


@pytest.mark.parametrize("fields", [{"epoch": 1}, {"lineage": "another"}])
def test_completions_of_another_epoch_or_lineage_are_forgotten(make: Make, fields: dict[str, Any]) -> None:
    rig = make({1: [0, 4]})
    rig.next()
    assert list(summary(rig.next(**fields))) == [3, 4, 5]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sampling": {"num_generations": 1}}, "regroup: rewards of a group of 1 never differ"),
        ({"sampling": {"max_resamples": 2}}, "regroup: max_resamples replaces the problems that it keeps"),
        ({"sampling": {"prompts_per_round": 1}}, "regroup: a round of one prompt has no place"),
        ({"judging": {"steps": True}}, r"sampling\.regroup: .* without judging\.steps"),
    ],
)
def test_settings_that_exclude_it(settings: dict[str, Any], words: str) -> None:
    sampling = {"regroup": 1, **settings.get("sampling", {})}
    with pytest.raises(ValidationError, match=words):
        RolloutConfig.model_validate({"model": "m", **settings, "sampling": sampling})
