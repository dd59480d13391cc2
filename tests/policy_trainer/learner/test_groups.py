"""Which groups and completions of a step take part, by hand; and what a batch must have."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from policy_trainer.config import LossConfig
from policy_trainer.learner.groups import make_group, missing_input, trains
from policy_trainer.objective.group import Group
from shared.batch import StepRewards
from tests.policy_trainer.learner.steps import ready_groups

Make = Callable[..., Any]
NAN = math.nan


def configured(**settings: Any) -> LossConfig:
    return LossConfig.model_validate(settings)


def made(batch: Any, **settings: Any) -> Group:
    return make_group(batch, configured(**settings))


def train(batch: Any, **settings: Any) -> bool:
    return trains(made(batch, **settings), configured(**settings))


def with_steps(batch: Any, rewards: list[float], ends: list[int], counts: list[int]) -> Any:
    steps = StepRewards(rewards=np.array(rewards, np.float32), ends=np.array(ends), counts=np.array(counts))
    object.__setattr__(batch.rollout, "steps", steps)
    return batch


class TestParticipation:
    @pytest.mark.parametrize(
        ("rewards", "drop", "varies", "trained"),
        [
            ([0.0, 1.0], True, True, True),
            ([1.0, 1.0], True, False, False),
            ([1.0, 1.0], False, False, True),
            ([NAN, 1.0], True, False, False),
            ([NAN, 1.0], False, False, True),
            ([NAN, NAN], False, False, False),
        ],
    )
    def test_groups(self, make_scored: Make, rewards: list[float], drop: bool, varies: bool, trained: bool) -> None:
        batch = make_scored([3], [[4], [5]], rewards)
        group = made(batch, drop_zero_variance=drop)
        assert (group.has_variance, train(batch, drop_zero_variance=drop)) == (varies, trained)
        assert group.sequence_mask.tolist() == [not math.isnan(reward) for reward in rewards]

    @pytest.mark.parametrize(
        ("truncated", "sequence_mask", "expected"),
        [
            # Of 0, 2 and 4 the first was cut off: mean 2 and std 2, or without it mean 3 and std sqrt(2).
            ("keep", [True, True, True], [-2 / 2.0001] * 2 + [0, 2 / 2.0001]),
            ("mask", [False, True, True], [-2 / 2.0001] * 2 + [0, 2 / 2.0001]),
            ("drop", [False, True, True], [0, 0, -1 / (math.sqrt(2) + 1e-4), 1 / (math.sqrt(2) + 1e-4)]),
        ],
    )
    def test_completions_that_were_cut_off(
        self, make_scored: Make, truncated: str, sequence_mask: list[bool], expected: list[float]
    ) -> None:
        batch = make_scored([3], [[4, 5], [6], [7]], [0.0, 2.0, 4.0])
        batch.rollout.finished[0] = False
        (group,) = ready_groups([batch], configured(truncated=truncated))
        assert group.sequence_mask.tolist() == sequence_mask
        assert group.mask.tolist() == np.repeat(sequence_mask, [2, 1, 1]).tolist()
        assert group.advantages.tolist() == pytest.approx(expected, rel=1e-6)

    @pytest.mark.parametrize(("truncated", "trained"), [("keep", True), ("mask", False), ("drop", False)])
    def test_a_group_that_was_all_cut_off(self, make_scored: Make, truncated: str, trained: bool) -> None:
        batch = make_scored([3], [[4], [5]], [0.0, 1.0])
        batch.rollout.finished[:] = False
        assert train(batch, truncated=truncated, drop_zero_variance=False) is trained

    def test_a_completion_with_a_step_that_could_not_be_made(self, make_scored: Make) -> None:
        """Only under process supervision."""
        batch = with_steps(
            make_scored([3], [[4, 5], [6], [7]], [0.0, 1.0, 1.0]), [0, NAN, 1, 2], [0, 1, 0, 0], [2, 1, 1]
        )
        group = made(batch, advantage="process")
        assert group.sequence_mask.tolist() == [False, True, True] and group.has_variance
        assert made(batch).sequence_mask.all()

    def test_steps_vary_and_not_outcomes_where_steps_are_supervised(self, make_scored: Make) -> None:
        equal = with_steps(make_scored([3], [[4], [5]], [0.0, 1.0]), [1, 1], [0, 0], [1, 1])
        assert made(equal).has_variance and not made(equal, advantage="process").has_variance
        varying = with_steps(make_scored([3], [[4], [5]], [1.0, 1.0]), [0, 1], [0, 0], [1, 1])
        assert not made(varying).has_variance and made(varying, advantage="process").has_variance


class TestMissingInput:
    @pytest.mark.parametrize(
        ("missing", "settings", "word"),
        [
            ("sampler_logps", {}, "sampler_logps"),
            ("sampler_logps", {"old_logps": "recomputed", "importance_sampling_correction": "mask"}, "sampler_logps"),
            ("sampler_logps", {"old_logps": "recomputed"}, None),
            ("sampler_logps", {"old_logps": "current"}, None),
            ("ref_logps", {}, "ref_logps"),
            ("ref_logps", {"kl_in": "reward"}, "ref_logps"),
            ("ref_logps", {"beta": 0}, None),
            ("steps", {"advantage": "process"}, "step_rewards"),
            ("steps", {}, None),
        ],
    )
    def test_is_named_and_refused(
        self, make_scored: Make, missing: str, settings: dict[str, Any], word: str | None
    ) -> None:
        batch = with_steps(make_scored([3], [[4], [5]], [0.0, 1.0]), [0, 1], [0, 0], [1, 1])
        if missing == "ref_logps":
            batch = batch.rollout
        else:
            object.__setattr__(batch.rollout, missing, None)
        reason = missing_input(batch, configured(**settings))
        if word is None:
            assert reason is None and train(batch, **settings)
            return
        assert reason is not None and word in reason
        with pytest.raises(ValueError, match=rf"batch 0{{8}}-.* cannot be trained on: .*{word}"):
            made(batch, **settings)


class TestSeveralRewards:
    WEIGHTS: ClassVar = {"right": 1.0, "short": 0.5, "logged": 0.0}

    def made(self, make_scored: Make, rewards: list[float], right: list[float], short: list[float]) -> Group:
        batch = make_scored([3], [[4], [5]], rewards)
        parts = {"right": np.array(right, np.float32), "short": np.array(short, np.float32)}
        batch = replace(batch, rollout=replace(batch.rollout, reward_parts=parts))
        assert missing_input(batch, configured(advantage="gdpo"), weights=self.WEIGHTS) is None
        return make_group(batch, configured(advantage="gdpo"), weights=self.WEIGHTS)

    @pytest.mark.parametrize(
        ("rewards", "right", "short", "trained"),
        [
            ([1.0, 1.0], [1.0, 0.5], [0.0, 1.0], True),
            ([1.0, 1.0], [1.0, 1.0], [0.0, 1.0], True),
            ([1.0, 2.0], [1.0, 1.0], [1.0, 1.0], False),
            ([1.0, 1.0], [1.0, NAN], [1.0, 1.0], False),
            ([1.0, NAN], [1.0, 0.0], [0.0, 1.0], False),
        ],
    )
    def test_a_group_trains_if_one_of_its_rewards_differs(
        self, make_scored: Make, rewards: list[float], right: list[float], short: list[float], trained: bool
    ) -> None:
        group = self.made(make_scored, rewards, right, short)
        assert (group.has_variance, trains(group, configured(advantage="gdpo"))) == (trained, trained)

    def test_a_batch_of_other_rewards_is_refused(self, make_scored: Make) -> None:
        batch, loss = make_scored([3], [[4], [5]], [0.0, 1.0]), configured(advantage="gdpo")
        assert "no reward/right" in (missing_input(batch, loss, weights=self.WEIGHTS) or "")
        with pytest.raises(ValueError, match="cannot be trained on: it has no reward/right"):
            make_group(batch, loss, weights=self.WEIGHTS)
        assert missing_input(batch, configured(), weights=self.WEIGHTS) is None
