"""Which groups and completions take part, what a batch must have, and the choices of old log-probs, by hand."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from policy_trainer.algorithms.objective.group import Group
from policy_trainer.config import LossConfig
from policy_trainer.learner.groups import make_group, missing_input, trains, with_old_logps
from policy_trainer.learner.micro_batches import join
from shared.batch import Array, StepRewards
from tests.device import DEVICE
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
    object.__setattr__(batch, "steps", steps)
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
        batch.finished[0] = False
        (group,) = ready_groups([batch], configured(truncated=truncated))
        assert group.sequence_mask.tolist() == sequence_mask
        assert group.mask.tolist() == np.repeat(sequence_mask, [2, 1, 1]).tolist()
        assert group.advantages.tolist() == pytest.approx(expected, rel=1e-6)

    @pytest.mark.parametrize(("truncated", "trained"), [("keep", True), ("mask", False), ("drop", False)])
    def test_a_group_that_was_all_cut_off(self, make_scored: Make, truncated: str, trained: bool) -> None:
        batch = make_scored([3], [[4], [5]], [0.0, 1.0])
        batch.finished[:] = False
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


class TestAdvantagesOfCompletions:
    def test_are_means_over_the_tokens_that_train(self, make_scored: Make) -> None:
        """A completion whose tokens are all a tool's has none, nor has one without a reward."""
        mask = [True, False, False, False, True, True]
        batch = make_scored([3], [[4, 5, 6], [7], [8], [9]], [0.0, 1.0, 2.0, NAN], loss_mask=mask)
        group = replace(made(batch), advantages=np.array([1, 90, 90, 90, 3, 90], np.float32))
        assert group.completion_advantages.tolist() == pytest.approx([1, NAN, 3, NAN], nan_ok=True)


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
            batch = batch.without_scores()
        else:
            object.__setattr__(batch, missing, None)
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
        batch = replace(batch, reward_parts=parts)
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


SAMPLER = [[-1.0, -2.0], [-3.0, -4.0, -5.0]]
REFERENCE = [[-1.5, -1.0], [-2.0, -4.5, -5.0]]
LEARNER = [[-0.5, -2.5], [-3.5, -4.0, -4.5]]
# beta times k1, which is log old policy - log reference.
PENALTY = {"kl_in": "reward", "kl": "k1", "beta": 0.5}


class Recompute:
    """Answers LEARNER for the two groups, and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, groups: Sequence[Group]) -> list[Array]:
        self.calls += 1
        assert [len(group.mask) for group in groups] == [2, 3]
        return [np.array(row, np.float32) for row in LEARNER]


@pytest.fixture
def recompute() -> Recompute:
    return Recompute()


@pytest.fixture
def filled_in(make_scored: Any, recompute: Recompute) -> Any:
    """Settings of the loss -> two groups, of 2 and of 3 tokens, with their old log-probs."""

    def fill_in(**settings: Any) -> list[Group]:
        loss = LossConfig.model_validate(settings)
        batches = [
            make_scored([3], [[4], [5]], [0.0, 1.0], old_logps=SAMPLER[0], ref_logps=REFERENCE[0]),
            make_scored([3], [[4, 6], [5]], [0.0, 1.0], old_logps=SAMPLER[1], ref_logps=REFERENCE[1], number=1),
        ]
        groups = [make_group(batch, loss) for batch in batches]
        return with_old_logps(groups, loss, recompute)

    return fill_in


def values(arrays: Sequence[Array | None]) -> list[list[float] | None]:
    return [None if array is None else array.tolist() for array in arrays]


@pytest.mark.parametrize(
    ("settings", "in_ratio", "in_penalty", "calls"),
    [
        ({"old_logps": "sampler"}, SAMPLER, None, 0),
        ({"old_logps": "recomputed"}, LEARNER, None, 1),
        ({"old_logps": "current"}, [None, None], None, 0),  # the current policy
        ({"old_logps": "log_linear"}, SAMPLER, None, 0),
        # A penalty off the rewards needs log-probs even where the ratio does not.
        ({"old_logps": "sampler", **PENALTY}, SAMPLER, SAMPLER, 0),
        ({"old_logps": "recomputed", **PENALTY}, LEARNER, LEARNER, 1),
        ({"old_logps": "current", **PENALTY}, [None, None], LEARNER, 1),
    ],
)
def test_old_log_probs_of_ratio_and_penalty(
    filled_in: Any, recompute: Recompute, settings: dict[str, Any], in_ratio: list[Any], in_penalty: Any, calls: int
) -> None:
    groups = filled_in(**settings)
    assert values([group.old_logps for group in groups]) == in_ratio
    assert recompute.calls == calls
    if in_penalty is None:
        assert all(group.kl_penalty is None for group in groups)
        return
    for group, old, reference in zip(groups, in_penalty, REFERENCE, strict=True):
        np.testing.assert_allclose(group.kl_penalty, 0.5 * (np.array(old) - np.array(reference)))


@pytest.mark.parametrize(
    ("version", "versions", "alphas"),
    [
        (4, None, [0, 0]),  # fresh: the weights that the fifth step trains are version 4, and it makes version 5
        (3, None, [1 / 2, 1 / 2]),
        (0, None, [4 / 5, 4 / 5]),
        (1, [3, 1], [1 / 2, 3 / 4]),
        (6, None, [0, 0]),  # of an abandoned life
    ],
)
def test_log_linear_moves_old_samples_towards_the_current_policy(
    make_scored: Any, version: int, versions: list[int] | None, alphas: list[float]
) -> None:
    """alpha = (v - 1 - v_b) / (v - v_b), v the version that the step makes: one more than the steps before it."""
    loss = LossConfig(old_logps="log_linear")
    batch = make_scored([3], [[4], [5]], [0.0, 1.0], old_logps=SAMPLER[0])
    named = None if versions is None else np.array(versions)
    batch = replace(batch, policy_version=version, policy_versions=named)
    group = make_group(batch, loss, step=4)
    [group] = with_old_logps([group], loss, Recompute())
    tokens = join([replace(group, advantages=np.zeros(2, np.float32))], DEVICE)
    current = torch.zeros(2)
    want = [old * (1 - alpha) for old, alpha in zip(SAMPLER[0], alphas, strict=True)]
    assert tokens.denominator(current).tolist() == pytest.approx(want)
