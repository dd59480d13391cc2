"""The entropy bonus in training: resumed, skipped, and off."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from policy_trainer.config import EntropyConfig, LossConfig, OptimizerConfig
from policy_trainer.learner.learner import Learner
from policy_trainer.run_files.checkpoint import Checkpoints, TrainState, read_state, restore
from shared.batch import Batch
from shared.logprobs import PackedForward
from shared.models import load_model
from tests.device import DEVICE
from tests.policy_trainer.learner.steps import make_learner

Make = Callable[..., Any]
ADAPTIVE = EntropyConfig(coef=0.2, target=9.0, delta=0.1, max=2.0)


def learner(model: PreTrainedModel, entropy: EntropyConfig, forward: Any = PackedForward, **settings: Any) -> Learner:
    loss = LossConfig.model_validate({"beta": 0.1, "entropy": entropy, "drop_zero_variance": False, **settings})
    return make_learner(
        model, forward(model), loss=loss, optimizer=OptimizerConfig(learning_rate=1e-2), num_iterations=2
    )


@pytest.fixture
def batch(make_scored: Make) -> Batch:
    return make_scored([3, 4], [[5, 6, 7], [8], [9, 10]], [0.0, 1.0, 0.5])


def same(model: PreTrainedModel, other: PreTrainedModel) -> bool:
    return all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_a_resumed_run_is_the_same_to_the_bit(tmp_path: Path, make_tiny: Make, tokenizer: Any, batch: Batch) -> None:
    """Four steps of two updates, or two, a new process, and two more."""
    first = learner(make_tiny(vocabulary=len(tokenizer)), ADAPTIVE)
    for step in range(2):
        first.step([batch], step=step)
    state = TrainState(step=2, entropy_coef=first.bonus.coef, last_entropy=first.bonus.entropy)
    path = Checkpoints(tmp_path, keep=1).save(state, first.model, tokenizer, first.weights)
    assert read_state(path) == state and state.last_entropy is not None and state.entropy_coef > 0.5

    def resumed() -> Learner:
        again = learner(load_model(str(path), revision=None, device=str(DEVICE), dtype="float32"), ADAPTIVE)
        restore(path, again.weights)
        return again

    restored, forgetful = resumed(), resumed()
    restored.restore_bonus(read_state(path).entropy_coef, state.last_entropy)
    for learns in (first, restored, forgetful):
        for step in range(2, 4):
            learns.step([batch], step=step)
    assert (restored.bonus.coef, restored.bonus.entropy) == (first.bonus.coef, first.bonus.entropy)
    assert same(restored.model, first.model)
    assert not same(forgetful.model, first.model)


def test_updates_that_are_skipped_or_train_nothing_leave_the_coefficient(
    make_tiny: Make, make_scored: Make, batch: Batch
) -> None:
    nothing = make_scored([3], [[4], [5]], [0.0, 1.0], loss_mask=[False, False])
    broken = make_scored([3], [[4], [5]], [0.0, 1.0])
    learns = learner(make_tiny(), ADAPTIVE)
    learns.step([batch], step=0)
    before = learns.bonus.coef, learns.bonus.entropy
    learns.step([nothing], step=1)
    assert (learns.bonus.coef, learns.bonus.entropy) == before
    with torch.no_grad():
        next(learns.model.parameters()).fill_(np.nan)
    assert learns.step([broken], step=2).not_finite
    assert (learns.bonus.coef, learns.bonus.entropy) == before


@pytest.mark.parametrize("surrogate", ["clip", "reinforce", "cispo", "sapo"])
def test_degenerate_batches_have_finite_gradients(make_tiny: Make, make_scored: Make, surrogate: str) -> None:
    """One token; an overflowing ratio without an advantage; no reward; nothing that trains. Together and apart."""
    batches = [
        make_scored([3], [[4]], [1.0], number=0),
        make_scored([3], [[4, 5], [6]], [1.0, 1.0], old_logps=[-500.0, -500, -500], number=1),
        make_scored([3], [[4, 5], [6]], [float("nan")] * 2, number=2),
        make_scored([3], [[4, 5], [6]], [0.0, 1.0], loss_mask=[False] * 3, number=3),
    ]
    for quantile in (0.0, 0.2):
        model = make_tiny()
        for part in (batches, *([batch] for batch in batches)):
            learns = learner(
                copy.deepcopy(model), EntropyConfig(coef=0.5), surrogate=surrogate, top_entropy_quantile=quantile
            )
            assert not learns.step(part, step=0).not_finite
            assert all(parameter.isfinite().all() for parameter in learns.model.parameters())


@pytest.mark.parametrize(("quantile", "forwards"), [(1.0, 2), (0.5, 4)])
def test_a_bonus_of_0_costs_no_forward_and_no_gradient(
    quantile: float, forwards: int, make_tiny: Make, batch: Batch
) -> None:
    """Forwards of the log-probs with entropies: one an update, and another for the quantile."""
    calls: list[bool] = []

    class Counted(PackedForward):
        def with_entropy(self, groups: Any, temperatures: Any, **options: Any) -> Any:
            logps, entropy = super().with_entropy(groups, temperatures, **options)
            calls.append(entropy.requires_grad)
            return logps, entropy

    learner(make_tiny(), EntropyConfig(), Counted, top_entropy_quantile=quantile).step([batch], step=0)
    assert calls == [False] * forwards
