"""Bradley-Terry compared with naive loops and with TRL's RewardTrainer; however pairs are cut into forwards."""

import copy
import math
from collections.abc import Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from policy_trainer.config import OptimizerConfig
from policy_trainer.rewards.reward_model import TextClassifier
from policy_trainer.supervised.reward_model.preferences import Pair
from policy_trainer.supervised.reward_model.training import PreferenceLearner, pair_losses
from tests.policy_trainer.supervised.reward_model.models import classifier

OPTIMIZER = OptimizerConfig(learning_rate=1e-2, betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=0.0)


def random_pairs(seed: int, count: int = 7, margins: bool = True) -> list[Pair]:
    chance = np.random.default_rng(seed)

    def ids() -> Any:
        return chance.integers(1, 200, size=chance.integers(1, 25)).astype(np.int32)

    # Halves, which float32 has exactly: TRL's collator makes float32 of them.
    return [Pair(ids(), ids(), float(chance.integers(0, 4)) / 2 if margins else 0.0) for _ in range(count)]


def learner(model: Any, limit: int = 10_000, center: float = 0.0, **changes: Any) -> PreferenceLearner:
    texts = TextClassifier(model, None, max_length=1000)  # type: ignore[arg-type]
    optimizer = OPTIMIZER.model_copy(update=changes)
    return PreferenceLearner(model, texts, optimizer=optimizer, micro_batch_tokens=limit, center=center)


def one_by_one(model: Any, pairs: Sequence[Pair]) -> list[tuple[Tensor, Tensor]]:
    """The scores of each pair's texts, each by itself: nothing is padded."""

    def score(ids: Any) -> Tensor:
        return model(input_ids=torch.tensor([ids.tolist()])).logits[0, 0]

    return [(score(pair.chosen), score(pair.rejected)) for pair in pairs]


def naive_loss(model: Any, pairs: Sequence[Pair], center: float) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for pair, (better, worse) in zip(pairs, one_by_one(model, pairs), strict=True):
        total = total - torch.log(1 / (1 + torch.exp(-(better - worse - pair.margin))))
        total = total + center * (better + worse) ** 2
    return total / len(pairs)


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_equal(result: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-9) -> None:
    assert result.keys() == expected.keys() and result
    for name, gradient in expected.items():
        torch.testing.assert_close(result[name], gradient, rtol=0, atol=tolerance)


@pytest.mark.parametrize("pad", [0, None])
@pytest.mark.parametrize("center", [0.0, 0.3])
@pytest.mark.parametrize("limit", [1, 60, 10_000])
def test_loss_and_gradient_are_those_of_naive_loops(pad: int | None, center: float, limit: int) -> None:
    model, pairs = classifier(pad), random_pairs(1)
    theirs = copy.deepcopy(model)
    loss = naive_loss(theirs, pairs, center)
    loss.backward()
    ours = learner(model, limit, center)

    stats = ours.step(pairs, lr=0.0)

    assert stats["loss"] == pytest.approx(float(loss.detach()), abs=1e-9)
    assert_equal(gradients(model), gradients(theirs))
    assert stats["tokens"] == sum(len(pair.chosen) + len(pair.rejected) for pair in pairs)
    scores = [(float(better.detach()), float(worse.detach())) for better, worse in one_by_one(theirs, pairs)]
    right = [better > worse for better, worse in scores]
    assert 0 < sum(right) < len(right)
    assert stats["accuracy"] == pytest.approx(sum(right) / len(right))
    assert stats["reward_margin"] == pytest.approx(sum(better - worse for better, worse in scores) / len(scores))
    assert stats["mean_reward"] == pytest.approx(sum(better + worse for better, worse in scores) / len(scores) / 2)
    result = ours.evaluate(pairs)
    assert result["eval_loss"] == pytest.approx(stats["loss"], abs=1e-9) and result["accuracy"] == stats["accuracy"]
    assert result["low"] < result["accuracy"] < result["high"]


@pytest.mark.slow
@pytest.mark.parametrize("margins", [False, True])
@pytest.mark.parametrize("center", [None, 0.01])
def test_loss_and_gradient_are_trls(center: float | None, margins: bool) -> None:
    """Its code from token ids to loss: the collator and compute_loss."""
    trl: Any = import_module("trl.trainer.reward_trainer")
    model, pairs = classifier(), random_pairs(2, margins=margins)
    theirs = copy.deepcopy(model)
    rows = [{"chosen_ids": pair.chosen.tolist(), "rejected_ids": pair.rejected.tolist()} for pair in pairs]
    if margins:
        rows = [{**row, "margin": pair.margin} for row, pair in zip(rows, pairs, strict=True)]
    trainer = object.__new__(trl.RewardTrainer)
    trainer.model = theirs
    trainer.args = SimpleNamespace(center_rewards_coefficient=center)
    trainer.accelerator = SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x)
    trainer._metrics = {
        "eval": {name: [] for name in ("min_reward", "mean_reward", "max_reward", "accuracy", "margin")}
    }
    trainer._total_train_tokens = 0
    loss = trainer.compute_loss(theirs, trl.DataCollatorForPreference(pad_token_id=0)(rows))
    loss.backward()

    stats = learner(model, 60, center or 0.0).step(pairs, lr=0.0)

    assert stats["loss"] == pytest.approx(float(loss.detach()), abs=1e-9)
    assert_equal(gradients(model), gradients(theirs))
    logged = trainer._metrics["eval"]
    assert stats["accuracy"] == pytest.approx(logged["accuracy"][0])
    assert stats["reward_margin"] == pytest.approx(logged["margin"][0])
    assert stats["mean_reward"] == pytest.approx(logged["mean_reward"][0])


def test_a_loss_that_no_float_can_exponentiate_is_finite() -> None:
    scores = torch.tensor([1e4, -1e4], dtype=torch.float32, requires_grad=True)
    losses = pair_losses(scores[:1], scores[1:], torch.zeros(1), 0.0) + pair_losses(
        scores[1:], scores[:1], torch.zeros(1), 0.0
    )
    losses.sum().backward()
    assert float(losses.detach()) == pytest.approx(2e4) and torch.isfinite(scores.grad).all()  # type: ignore[arg-type]


def test_a_tie_is_not_ranked_right() -> None:
    ids = np.array([5, 6], np.int32)
    assert learner(classifier()).evaluate([Pair(ids, ids)])["accuracy"] == 0


def test_a_loss_that_is_not_finite_changes_nothing() -> None:
    model = classifier(dtype=torch.float32)
    with torch.no_grad():
        model.score.weight[0, 0] = math.inf
    before = copy.deepcopy(model.state_dict())
    assert learner(model).step(random_pairs(0), lr=0.1)["not_finite"]
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
