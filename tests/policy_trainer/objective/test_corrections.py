"""Weights of tokens whose sampler was not quite the learner, by hand."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from policy_trainer.config import LossConfig
from policy_trainer.objective.corrections import CORRECTIONS, ImportanceStats, importance_sampling_weights

# Completions of three and two tokens; the third token is masked, however absurd.
SEQUENCE_IDS = torch.tensor([0, 0, 0, 1, 1])
MASK = torch.tensor([True, True, False, True, True])
DIFFERENCES = torch.tensor([math.log(3.0), math.log(0.5), 3e38, math.log(0.1), math.log(2.0)])


def weights_of(**settings: Any) -> tuple[list[float], ImportanceStats]:
    config = LossConfig.model_validate({"old_logps": "recomputed"} | settings)
    old_logps = torch.tensor([-1.0, -2.0, 0.0, -4.0, -5.0])
    weights, stats = importance_sampling_weights(old_logps, old_logps - DIFFERENCES, SEQUENCE_IDS, MASK, config)
    assert not weights.requires_grad
    return weights.tolist(), stats


@pytest.mark.parametrize(
    ("settings", "weights", "clipped"),
    [
        ({"importance_sampling_correction": "none"}, [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]),
        ({"importance_sampling_correction": "tis"}, [2, 0.5, 1, 0.1, 2], [1, 0, 0, 0, 0]),
        ({"importance_sampling_correction": "tis", "correction_max": 1.5}, [1.5, 0.5, 1, 0.1, 1.5], [1, 0, 0, 0, 1]),
        (
            {"importance_sampling_correction": "tis", "correction_min": 0.3, "correction_max": 2.5},
            [2.5, 0.5, 1, 0.3, 2],
            [1, 0, 0, 1, 0],
        ),
        (
            {"importance_sampling_correction": "tis", "correction_level": "sequence", "correction_min": 0.4},
            [1.5, 1.5, 1, 0.4, 0.4],
            [0, 0, 0, 1, 1],
        ),
        ({"importance_sampling_correction": "mask"}, [3, 0.5, 1, 0, 2], [0, 0, 0, 1, 0]),
        (
            {"importance_sampling_correction": "mask", "correction_low": 0.09, "correction_high": 2.5},
            [0, 0.5, 1, 0.1, 2],
            [1, 0, 0, 0, 0],
        ),
        # Products over completions: 1.5 and 0.2.
        (
            {"importance_sampling_correction": "tis", "correction_level": "sequence"},
            [1.5, 1.5, 1, 0.2, 0.2],
            [0, 0, 0, 0, 0],
        ),
        (
            {"importance_sampling_correction": "tis", "correction_level": "sequence", "correction_max": 1.2},
            [1.2, 1.2, 1, 0.2, 0.2],
            [1, 1, 0, 0, 0],
        ),
        (
            {"importance_sampling_correction": "mask", "correction_level": "sequence"},
            [1.5, 1.5, 1, 0, 0],
            [0, 0, 0, 1, 1],
        ),
    ],
)
def test_hand_computed(settings: dict[str, Any], weights: list[float], clipped: list[int]) -> None:
    got, stats = weights_of(**settings)
    assert got == pytest.approx(weights, rel=1e-5)
    assert stats.clipped.tolist() == [bool(each) for each in clipped]


def test_the_weights_before_truncation() -> None:
    _, tokens = weights_of(importance_sampling_correction="tis", correction_max=0.01)
    assert tokens.weights.tolist() == pytest.approx([3, 0.5, 1, 0.1, 2], rel=1e-5)
    _, sequences = weights_of(importance_sampling_correction="mask", correction_level="sequence", correction_high=0.6)
    assert sequences.weights.tolist() == pytest.approx([1.5, 1.5, 1, 0.2, 0.2], rel=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence"])
@given(st.sampled_from(list(CORRECTIONS)), st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=1, max_size=5))
def test_whatever_the_difference_weights_are_finite_and_within_bounds(
    level: str, name: str, differences: list[float]
) -> None:
    config = LossConfig.model_validate(
        {
            "old_logps": "recomputed",
            "importance_sampling_correction": name,
            "correction_level": level,
            "correction_low": 0.25,
        }
    )
    old_logps, mask = torch.tensor(differences), torch.ones(len(differences), dtype=torch.bool)
    weights, stats = importance_sampling_weights(
        old_logps, torch.zeros(len(differences)), torch.zeros_like(mask).long(), mask, config
    )
    assert weights.isfinite().all() and stats.weights.isfinite().all() and (weights >= 0).all()
    if name == "tis":
        assert (weights <= 2).all()
    if name == "mask":
        assert ((weights == 0) | ((weights >= 0.25) & (weights <= 5))).all()


@pytest.mark.parametrize("name", CORRECTIONS)
def test_of_equal_log_probs_is_exactly_one(name: str) -> None:
    config = LossConfig.model_validate({"old_logps": "recomputed", "importance_sampling_correction": name})
    weights, stats = importance_sampling_weights(DIFFERENCES, DIFFERENCES, SEQUENCE_IDS, MASK, config)
    assert weights.tolist() == [1] * 5 and not stats.clipped.any() and stats.weights.tolist() == [1] * 5
