"""Mistakes in TRL's arguments of rewards, and what it warns of."""

import logging
import math
from functools import partial
from typing import Any

import pytest

from policy_trainer.reporting.samples import SampledCompletion, SampledGroup
from policy_trainer.trl import GRPOConfig
from policy_trainer.trl.cautions import cautions, refuse_contradictions, warn_of_unjudged
from policy_trainer.trl.rewards import check_rewards
from shared.errors import UserError


class Plain:
    def reset(self, **row: Any) -> None: ...


class Scored(Plain):
    def get_reward(self) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("rewards", "tokenizers", "weights", "environments", "message"),
    [
        ([], [], None, None, "reward_funcs: No reward source provided"),
        ([], [], None, Plain, "reward_funcs: No reward source provided"),
        ([], [], None, {"a": Plain, "b": lambda: Plain()}, "reward_funcs: No reward source provided"),
        ([len], [], None, object, "environment_factory: Each environment instance returned by"),
        ([len, len], [], [1.0], None, r"reward_weights: Number of reward weights \(1\) must match"),
        ([len], [], [1.0, 1.0], Scored, r"reward_weights: Number of reward weights \(2\) must match"),
        (["a/b", "c/d"], [object()], None, None, r"reward_processing_classes: .* must match the number of"),
    ],
)
def test_mistakes_have_trls_words(rewards: Any, tokenizers: Any, weights: Any, environments: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        check_rewards(GRPOConfig("out", reward_weights=weights), rewards, tokenizers, environments)


@pytest.mark.parametrize("environments", [Scored, {"a": Plain, "b": Scored}, lambda: Scored()])
def test_an_environment_may_have_the_reward(environments: Any) -> None:
    check_rewards(GRPOConfig("out"), [], [], environments)


@pytest.mark.parametrize(
    ("given", "warning"),
    [
        ({"importance_sampling_level": "sequence"}, "weights each sequence by its completion length"),
        ({"importance_sampling_level": "sequence", "loss_type": "grpo"}, ""),
        ({"loss_type": "luspo"}, "luspo is meant for 'sequence'"),
        ({"loss_type": "vespo", "importance_sampling_level": "sequence"}, "vespo computes weights of sequences itself"),
        ({}, ""),
    ],
)
def test_cautions(given: dict[str, Any], warning: str) -> None:
    yielded = list(cautions(GRPOConfig("out", **given)))
    assert len(yielded) == bool(warning) and all(warning in each for each in yielded)


@pytest.mark.parametrize(
    ("given", "adapts", "message"),
    [({}, False, "sync_ref_model: .* while `beta=0.0`"), ({"beta": 0.1}, True, "sync_ref_model: with adapters")],
)
def test_a_reference_that_cannot_be_synchronised(given: dict[str, Any], adapts: bool, message: str) -> None:
    check = partial(refuse_contradictions, adapts=adapts, in_4bit=False, held_out=False)
    check(GRPOConfig("out", **given))
    with pytest.raises(UserError, match=f"^{message}"):
        check(GRPOConfig("out", sync_ref_model=True, **given))


def test_completions_that_nothing_judged_are_shown(caplog: pytest.LogCaptureFixture) -> None:
    def group(*parts: dict[str, float]) -> SampledGroup:
        completions = [SampledCompletion(f"text {i}", 0.0, each, None, 1, True) for i, each in enumerate(parts)]
        return SampledGroup(1, "train", "b", None, 0, "the prompt", None, tuple(completions))

    unjudged = group({"f": 1.0, "g": math.nan}, {"f": math.nan, "g": math.nan})
    warn_of_unjudged({"unrewarded": 1}, lambda: [group({"f": 1.0}), unjudged])
    warn_of_unjudged({"unrewarded": 0}, lambda: [unjudged])
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING and "All reward functions returned None for the following" in caplog.text
    assert "text 1" in caplog.text and "the prompt" in caplog.text
