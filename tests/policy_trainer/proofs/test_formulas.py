"""All formulas, in all combinations that are not refused, against loops in float64 that are written as they read."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from policy_trainer.config import LossConfig
from tests.policy_trainer.proofs.cases import random_groups
from tests.policy_trainer.proofs.formulas import TOKEN_VALUES, gradient_of, loss_and_gradient, token_advantages
from tests.policy_trainer.proofs.oracle import Group, advantages, step_loss, teaches
from tests.policy_trainer.proofs.settings import choices, random_settings

CASES = 60


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def naive_loss_and_gradient(groups: Sequence[Group], config: LossConfig, max_tokens: int) -> tuple[float, list[float]]:
    leaves = [
        torch.tensor(
            [float(element) for group in groups for completion in group for element in values(completion)]
        ).requires_grad_()
        for values in TOKEN_VALUES
    ]
    logps, entropies = (iter(leaf.unbind()) for leaf in leaves)
    given = [
        [
            replace(
                completion,
                logps=[next(logps) for _ in completion.logps],
                entropies=[next(entropies) for _ in completion.logps],
            )
            for completion in group
        ]
        for group in groups
    ]
    loss: Tensor = step_loss(given, config, max_tokens=max_tokens)
    if loss.requires_grad:  # it does not where nothing trains
        loss.backward()
    return loss.item(), torch.cat([gradient_of(leaf) for leaf in leaves]).tolist()


@pytest.mark.parametrize("ratio", choices("importance_sampling_level"))
@pytest.mark.parametrize("surrogate", choices("surrogate"))
def test_loss_and_gradient(surrogate: str, ratio: str) -> None:
    rng = random.Random(surrogate + ratio)
    for _ in range(CASES):
        config = random_settings(rng, surrogate=surrogate, importance_sampling_level=ratio)
        groups = random_groups(rng, count=3, unrewarded=0.1, unfinished=0.2)
        got, want = (f(groups, config, 8) for f in (loss_and_gradient, naive_loss_and_gradient))
        size = max(1e-6, *(abs(value) for value in (want[0], *want[1])))  # where all cancels, only rounding is left
        for got_value, exact in zip((got[0], *got[1]), (want[0], *want[1]), strict=True):
            assert abs(got_value - exact) <= 1e-9 * size, config


@pytest.mark.parametrize("advantage", choices("advantage"))
def test_advantages(advantage: str) -> None:
    rng = random.Random(advantage)
    for _ in range(3 * CASES):
        config = random_settings(rng, advantage=advantage)
        groups = random_groups(rng, count=4, unrewarded=0.2, unfinished=0.2)
        groups = [group for group in groups if teaches(group, config)]
        if not groups:
            continue
        for got_value, exact in zip(token_advantages(groups, config), advantages(groups, config), strict=True):
            assert got_value == pytest.approx(
                [value for completion in exact for value in completion], rel=1e-9, abs=1e-9
            ), config
