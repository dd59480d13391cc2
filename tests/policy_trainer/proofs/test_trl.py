"""The formulas against TRL's trainers, from rewards to gradient, over random settings in float64.

Where TRL defines something otherwise trl_cases.py converts it by name; docs/mathematics.md lists them all.
"""

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from policy_trainer.algorithms.objective.advantages import advantages
from policy_trainer.algorithms.objective.aggregation import Totals, token_weights
from policy_trainer.algorithms.objective.entropy import EntropyBonus
from policy_trainer.algorithms.objective.group import LossInputs
from policy_trainer.algorithms.objective.kl import reverse_kl
from policy_trainer.algorithms.objective.loss import token_loss
from policy_trainer.config import EntropyConfig, LossConfig
from tests.policy_trainer.groups import make_group
from tests.policy_trainer.proofs.cases import random_groups
from tests.policy_trainer.proofs.formulas import loss_and_gradient
from tests.policy_trainer.proofs.oracle import Completion, Group, teaches, trains
from tests.policy_trainer.proofs.trl_cases import LOSS_TYPES, Case, assert_same, on_terms_of_trl, random_case
from tests.policy_trainer.proofs.trl_trainers import Trl

pytestmark = pytest.mark.slow  # TRL takes seconds to import

CASES = 200
STEPS = 1000
Groups = list[list[Completion]]


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def with_one(rng: random.Random, case: Case, groups: Groups, weights: Sequence[float]) -> Groups:
    """Its weight is 1 in ours, too."""
    return [[replace(completion, parts=[(1.0, completion.reward)]) for completion in group] for group in groups]


def with_sum(rng: random.Random, case: Case, groups: Groups, weights: Sequence[float]) -> Groups:
    """TRL's sum_then_normalize. Without a reward all its parts are missing: TRL takes a single one that is for 0."""

    def judged(completion: Completion) -> Completion:
        missing = math.isnan(completion.reward)
        parts = [(weight, math.nan if missing else rng.uniform(-1, 1)) for weight in weights]
        return replace(completion, parts=parts, reward=sum(weight * part for weight, part in parts))

    return [[judged(completion) for completion in group] for group in groups]


def apart(rng: random.Random, case: Case, groups: Groups, weights: Sequence[float]) -> Groups:
    """TRL's normalize_then_sum, GDPO. Any of the rewards may be missing."""
    case.set(
        {"advantage": "gdpo", "scale_rewards": None},
        {"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "group"},
    )

    def judged(completion: Completion) -> Completion:
        parts = [(weight, math.nan if rng.random() < 0.2 else rng.uniform(-1, 1)) for weight in weights]
        return replace(completion, parts=parts, reward=math.nan if all(math.isnan(part) for _, part in parts) else 0.0)

    return [[judged(completion) for completion in group] for group in groups]


REWARDS: Sequence[Callable[[random.Random, Case, Groups, Sequence[float]], Groups]] = (with_one, with_sum, apart)


def micro_batches(rng: random.Random, case: Case, rows: int) -> int:
    """Into how many TRL may cut the step: not if its parts have separate averages."""
    uncut = case.theirs["loss_type"] == "bnpo" or {"entropy_coef", "top_entropy_quantile"} & case.theirs.keys()
    return 1 if uncut else rng.choice([parts for parts in (1, 2, 3, 4) if rows % parts == 0])


def test_steps_are_the_same() -> None:
    """A loss type with every other setting, one reward or several, groups of any number and size, micro-batches."""
    rng = random.Random(8)
    compared, cut, separate = 0, 0, 0
    while compared < STEPS:
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
        theirs_given, factor = on_terms_of_trl(groups, config)
        theirs: dict[str, Any] = case.theirs | {"entropy_coef": config.entropy.coef / factor}
        parts = micro_batches(rng, case, sum(len(group) for group in groups))
        rewards = torch.tensor([[part for _, part in completion.parts] for group in groups for completion in group])
        assert_same(
            loss_and_gradient(groups, config, case.max_tokens),
            Trl(**theirs).loss(theirs_given, parts=rewards, weights=weights, micro_batches=parts),
            factor,
        )
        compared, cut, separate = compared + 1, cut + (parts > 1), separate + (choose is apart)
    assert min(cut, separate) > STEPS / 10


@pytest.mark.parametrize("quantile", [1.0, 0.37])
def test_the_bonus_adapts_to_its_target(quantile: float) -> None:
    """Thirty updates: the coefficient, and every loss with it. Both bounds are reached. (TRL rounds its threshold to
    float32, and may lose a token whose entropy it is: with 0.37 it lies between two.)"""
    rng = random.Random(7)
    bounds: dict[str, Any] = {"delta": 0.05, "min": 0.02, "max": 0.3}
    settings: dict[str, Any] = {"old_logps": "recomputed", "beta": 0.1, "drop_zero_variance": False}
    settings["top_entropy_quantile"] = quantile
    target = 2.0 if quantile == 1 else 3.2
    bonus = EntropyBonus(EntropyConfig(coef=0.1, target=target, **bounds))
    theirs = Trl(
        beta=0.1, top_entropy_quantile=quantile, entropy_coef=0.1, use_adaptive_entropy=True, entropy_target=target,
        **{f"entropy_coef_{name}": value for name, value in bounds.items()},
    )  # fmt: skip
    coefficients, applied = [], []
    for number in range(30):
        level = (0.5, 1.5)[number // 10 % 2]
        groups = [
            [
                replace(completion, entropies=[level * entropy for entropy in completion.entropies])
                for completion in group
            ]
            for group in random_groups(rng, size=4)
        ]
        config = LossConfig(**settings, entropy=EntropyConfig(coef=bonus.applied))
        assert_same(loss_and_gradient(groups, config, 8), theirs.loss(groups))
        applied.append(bonus.applied)
        bonus.observe(_kept_entropy(groups, quantile))
        assert bonus.coef == pytest.approx(theirs.entropy_coef, abs=1e-12)
        coefficients.append(bonus.coef)
    assert applied[0] == 0 and max(applied) > 0 and 0 in applied[1:]
    assert min(coefficients) == 0.02 and max(coefficients) == 0.3


def _kept_entropy(groups: Sequence[Group], quantile: float) -> float:
    known = sorted(completion.entropies[t] for group in groups for completion in group for t in completion.trained)
    kept = known[math.ceil((1 - quantile) * (len(known) - 1)) :]
    return sum(kept) / len(kept)


@pytest.mark.parametrize(("loss_type", "same"), [("grpo", True), ("dapo", True), ("dr_grpo", True), ("bnpo", False)])
def test_gradient_accumulation(loss_type: str, same: bool) -> None:
    """TRL in three micro-batches is ours, but for bnpo: it averages token means of parts of unequal size."""
    rng = random.Random(3)
    config = LossConfig(**LOSS_TYPES[loss_type], old_logps="recomputed", beta=0.1, drop_zero_variance=False)
    for _ in range(20):
        groups = random_groups(rng, size=4)
        ours = loss_and_gradient(groups, config, 8)
        trainer = Trl(loss_type=loss_type, beta=0.1, max_completion_length=8)
        assert_same(ours, trainer.loss(groups))
        in_parts = trainer.loss(groups, micro_batches=3)
        if same:
            assert_same(ours, in_parts)
        else:
            assert abs(in_parts[0] / ours[0] - 1) > 1e-3


def test_rloo_trainer() -> None:
    """TRL's RLOOTrainer: whole completions as one action, and k1 in the reward.

    It divides by all completions, we by those that train; where a completion has no reward it adds 0 to the loss there.
    """
    rng = random.Random(4)
    for _ in range(CASES):
        clip, high, beta = rng.uniform(0.05, 0.4), rng.uniform(0.05, 0.6), rng.choice((0.0, rng.uniform(0.01, 1)))
        config = LossConfig(
            advantage="rloo", importance_sampling_level="sequence_sum", epsilon=clip, epsilon_high=high, beta=beta,
            kl="k1", kl_in="reward" if beta else "loss",
            old_logps="recomputed", drop_zero_variance=False,
        )  # fmt: skip
        groups = [
            [replace(completion, mask=[True] * len(completion.mask)) for completion in group]
            for group in random_groups(rng, size=4, unrewarded=rng.choice((0.0, 0.2)), noise=0.2)
        ]
        groups = [group for group in groups if teaches(group, config)]
        everyone = [completion for group in groups for completion in group]
        factor = len(everyone) / sum(trains(completion, config) for completion in everyone)
        theirs = Trl("RLOOTrainer", epsilon_low=clip, epsilon_high=high, beta=beta).loss(groups)
        assert_same(loss_and_gradient(groups, config, 8), theirs, factor)


def test_distillation(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's importance-weighted on-policy distillation without its weights (gamma 0), on the sampler's log-probs."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.iw_opd.iw_opd_trainer import IWOPDTrainer

    config = LossConfig(advantage="distill", surrogate="reinforce", aggregation="token_mean", beta=0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(CASES):
        rows, length, words = (int(torch.randint(1, most, (), generator=generator)) for most in (5, 7, 9))
        logits = torch.randn(rows, length, words + 1, generator=generator).requires_grad_()
        ids = torch.randint(0, words + 1, (rows, length), generator=generator)
        sampler, teacher = (-3 * torch.rand(rows, length, generator=generator) for _ in range(2))
        mask = torch.rand(rows, length, generator=generator) < 0.8
        mask[0, 0] = True
        trainer: Any = SimpleNamespace(
            temperature=0.7, iw_opd_gamma=0.0, iw_opd_epsilon=1e-8, model=SimpleNamespace(training=True),
            _metrics={"train": defaultdict(list)},
        )  # fmt: skip
        theirs = IWOPDTrainer._compute_iw_opd_loss(
            trainer, logits, ids, torch.where(mask, ids, -100), teacher, sampler, num_items_in_batch=mask.sum()
        )
        ours = _distilled(logits, ids, sampler, teacher, mask, config)
        (wanted,), (got,) = (torch.autograd.grad(loss, logits) for loss in (theirs, ours))
        assert ours.item() == pytest.approx(theirs.item(), rel=1e-6, abs=1e-6)  # advantages are float32
        assert (got - wanted).abs().max() <= 1e-6 * wanted.abs().max()


@pytest.mark.parametrize("surrogate", ["clip", "reinforce"])
def test_self_distillation(surrogate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's SDFTTrainer with `sampled_token`: mean over completions of their mean over tokens, on the policy."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.sdft.loss_utils import compute_sampled_token_self_distillation_loss

    config = LossConfig(advantage="distill", surrogate=surrogate, old_logps="current", beta=0)
    generator = torch.Generator().manual_seed(1)
    for _ in range(CASES):
        rows, length, words = (int(torch.randint(1, most, (), generator=generator)) for most in (5, 7, 9))
        logits, other = torch.randn(2, rows, length, words + 1, generator=generator).unbind()
        logits.requires_grad_()
        ids = torch.randint(0, words + 1, (rows, length), generator=generator)
        mask = torch.rand(rows, length, generator=generator) < 0.8
        mask[:, 0] = True
        scaled = logits / 0.7
        each = compute_sampled_token_self_distillation_loss(scaled, other, ids, distillation_alpha=1.0)
        theirs = ((each * mask).sum(-1) / mask.sum(-1)).mean()
        old, teacher = (
            values.detach().log_softmax(-1).gather(-1, ids[..., None])[..., 0] for values in (scaled, other)
        )
        ours = _distilled(logits, ids, old, teacher, mask, config)
        (wanted,), (got,) = (torch.autograd.grad(loss, logits) for loss in (theirs, ours))
        assert (got - wanted).abs().max() <= 1e-6 * wanted.abs().max()


def _distilled(
    logits: Tensor, ids: Tensor, sampler: Tensor, teacher: Tensor, mask: Tensor, config: LossConfig
) -> Tensor:
    """Our loss, of a group whose rows have equal lengths."""
    rows, length = ids.shape
    group = make_group(
        np.zeros(rows),
        np.full(rows, length),
        loss_mask=mask.flatten().numpy(),
        reverse_kl=reverse_kl(sampler.flatten().numpy(), teacher.flatten().numpy()),
    )
    (token_values,) = advantages([group], config)
    places = torch.arange(rows).repeat_interleave(length)
    tokens = LossInputs(places, mask.flatten(), torch.from_numpy(token_values).double(), sampler.flatten())
    logps = (logits / 0.7).log_softmax(-1).gather(-1, ids[..., None]).flatten()
    totals = Totals(completions=rows, tokens=int(mask.sum()), max_completion_length=length)
    weights = token_weights(config.aggregation, places, mask.flatten(), totals)
    return (weights * token_loss(logps, tokens, config).loss).sum()
