"""A thousand steps beside TRL's, in which all that both have is drawn at once.

That is a loss type with every other setting, one reward or several, groups of any number and size, micro-batches.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from policy_trainer.config import LossConfig
from tests.policy_trainer.proofs.cases import random_groups
from tests.policy_trainer.proofs.formulas import loss_and_gradient
from tests.policy_trainer.proofs.oracle import Completion, teaches
from tests.policy_trainer.proofs.trl_cases import LOSS_TYPES, Case, assert_same, on_terms_of_trl, random_case
from tests.policy_trainer.proofs.trl_trainers import Trl

pytestmark = pytest.mark.slow  # TRL takes seconds to import

CASES = 1000
Groups = list[list[Completion]]


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def with_one(rng: random.Random, case: Case, groups: Groups, weights: Sequence[float]) -> Groups:
    """Its weight is 1 in ours, too."""
    return [[replace(one, parts=[(1.0, one.reward)]) for one in group] for group in groups]


def with_sum(rng: random.Random, case: Case, groups: Groups, weights: Sequence[float]) -> Groups:
    """TRL's sum_then_normalize. Without a reward all its parts are missing: TRL takes a single one that is for 0."""

    def judged(one: Completion) -> Completion:
        missing = math.isnan(one.reward)
        parts = [(weight, math.nan if missing else rng.uniform(-1, 1)) for weight in weights]
        return replace(one, parts=parts, reward=sum(weight * part for weight, part in parts))

    return [[judged(one) for one in group] for group in groups]


def apart(rng: random.Random, case: Case, groups: Groups, weights: Sequence[float]) -> Groups:
    """TRL's normalize_then_sum, GDPO. Any of the rewards may be missing."""
    case.set(
        {"advantage": "gdpo", "scale_rewards": None},
        {"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "group"},
    )

    def judged(one: Completion) -> Completion:
        parts = [(weight, math.nan if rng.random() < 0.2 else rng.uniform(-1, 1)) for weight in weights]
        return replace(one, parts=parts, reward=math.nan if all(math.isnan(part) for _, part in parts) else 0.0)

    return [[judged(one) for one in group] for group in groups]


REWARDS: Sequence[Callable[[random.Random, Case, Groups, Sequence[float]], Groups]] = (with_one, with_sum, apart)


def micro_batches(rng: random.Random, case: Case, rows: int) -> int:
    """Into how many TRL may cut the step: not where its parts are averages of their own."""
    alone = case.theirs["loss_type"] == "bnpo" or {"entropy_coef", "top_entropy_quantile"} & case.theirs.keys()
    return 1 if alone else rng.choice([parts for parts in (1, 2, 3, 4) if rows % parts == 0])


def test_steps_are_the_same() -> None:
    rng = random.Random(8)
    compared, cut, apart_too = 0, 0, 0
    while compared < CASES:
        case = random_case(rng, rng.choice([*LOSS_TYPES]))
        groups = random_groups(
            rng, count=rng.randint(1, 5), size=rng.randint(2, 6), noise=rng.choice((0.1, 0.4, 1.0)),
            unrewarded=rng.choice((0.0, 0.3)), unfinished=rng.choice((0.0, 0.3)),
        )  # fmt: skip
        choose = rng.choice(REWARDS)
        weights = [1.0] if choose is with_one else [rng.uniform(-1, 2) for _ in range(rng.randint(1, 4))]
        groups = choose(rng, case, groups, weights)
        config = LossConfig(**case.ours)
        groups = [group for group in groups if teaches(group, config)]
        if not groups:
            continue
        told, factor = on_terms_of_trl(groups, config)
        theirs: dict[str, Any] = case.theirs | {"entropy_coef": config.entropy.coef / factor}
        parts = micro_batches(rng, case, sum(len(group) for group in groups))
        rewards = torch.tensor([[part for _, part in one.parts] for group in groups for one in group])
        assert_same(
            loss_and_gradient(groups, config, case.max_tokens),
            Trl(**theirs).loss(told, parts=rewards, weights=weights, micro_batches=parts),
            factor,
        )
        compared, cut, apart_too = compared + 1, cut + (parts > 1), apart_too + (choose is apart)
    assert min(cut, apart_too) > CASES / 10
