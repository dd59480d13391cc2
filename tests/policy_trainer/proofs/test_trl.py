"""The formulas beside TRL's own trainers, from rewards to gradient, over random settings in float64.

Where TRL defines something otherwise the difference is converted here by name; docs/mathematics.md lists them all.
"""

import math
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from policy_trainer.config import EntropyConfig, LossConfig
from policy_trainer.objective.advantages import advantages
from policy_trainer.objective.aggregation import Totals, token_weights
from policy_trainer.objective.distillation import reverse_kl
from policy_trainer.objective.entropy import choose_bonus
from policy_trainer.objective.loss import LossTokens, token_loss
from tests.policy_trainer.groups import make_group
from tests.policy_trainer.proofs.cases import random_groups, without_tokens
from tests.policy_trainer.proofs.formulas import loss_and_gradient
from tests.policy_trainer.proofs.oracle import Completion, Group, teaches, trains
from tests.policy_trainer.proofs.trl_trainers import Trl

pytestmark = pytest.mark.slow  # TRL takes seconds to import

CASES = 200
# TRL's loss types in our words.
LOSS_TYPES: dict[str, dict[str, Any]] = {
    "grpo": {"surrogate": "clip", "aggregation": "sequence_mean"},
    "bnpo": {"surrogate": "clip", "aggregation": "token_mean"},  # the same as dapo while a step is one micro-batch
    "dapo": {"surrogate": "clip", "aggregation": "token_mean"},
    "dr_grpo": {"surrogate": "clip", "aggregation": "constant"},
    "luspo": {"surrogate": "clip", "aggregation": "luspo"},
    "cispo": {"surrogate": "cispo", "aggregation": "token_mean"},
    "sapo": {"surrogate": "sapo", "aggregation": "sequence_mean"},
    "vespo": {"surrogate": "vespo", "aggregation": "token_mean"},
}
# TRL's modes for what the sampler's log-probs correct.
CORRECTIONS = {
    "token_truncate": {"importance_sampling_correction": "tis", "correction_level": "token"},
    "sequence_truncate": {"importance_sampling_correction": "tis", "correction_level": "sequence"},
    "token_mask": {"importance_sampling_correction": "mask", "correction_level": "token"},
    "sequence_mask": {"importance_sampling_correction": "mask", "correction_level": "sequence"},
}


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@dataclass
class Case:
    """One setting in both languages. max_tokens: our L_max."""

    ours: dict[str, Any] = field(default_factory=lambda: {"old_logps": "recomputed"})
    theirs: dict[str, Any] = field(default_factory=dict)
    max_tokens: int = 8

    def set(self, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
        self.ours.update(ours)
        self.theirs.update(theirs)


def random_case(rng: random.Random, loss_type: str) -> Case:
    case = Case(max_tokens=rng.randint(4, 12))
    case.set(LOSS_TYPES[loss_type], {"loss_type": loss_type, "max_completion_length": case.max_tokens})
    _choose_surrogate(rng, case)
    _choose_kl(rng, case)
    _choose_advantages(rng, case)
    _choose_policies(rng, case)
    _choose_mask(rng, case)
    _choose_entropy(rng, case)
    return case


def _choose_surrogate(rng: random.Random, case: Case) -> None:
    level = "token" if case.ours["surrogate"] == "vespo" else rng.choice(("token", "sequence"))
    case.set({"importance_sampling_level": level}, {"importance_sampling_level": level})
    if case.ours["surrogate"] == "cispo":
        ratio_max = rng.uniform(0.8, 1.5)  # TRL's epsilon_high is absolute here, as our ratio_max
        case.set({"ratio_max": ratio_max}, {"epsilon_high": ratio_max})
    elif case.ours["surrogate"] == "sapo":
        pos, neg = rng.uniform(0.5, 2), rng.uniform(0.5, 2)
        case.set(
            {"sapo_temperature_pos": pos, "sapo_temperature_neg": neg},
            {"sapo_temperature_pos": pos, "sapo_temperature_neg": neg},
        )
    elif case.ours["surrogate"] == "vespo":
        names = ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
        shape = {name: rng.uniform(0.5, 4) for name in names}
        case.set(shape, shape)
    else:
        low, high = rng.uniform(0.05, 0.4), rng.choice((None, rng.uniform(0.05, 0.6)))
        case.set(
            {"epsilon": low, "epsilon_high": high}, {"epsilon_low": low, "epsilon_high": low if high is None else high}
        )
        dual = rng.choice((None, 1 + (high or low) + rng.uniform(0.01, 0.5)))
        case.set({"delta": dual}, {"delta": dual})


def _choose_kl(rng: random.Random, case: Case) -> None:
    beta = rng.choice((0.0, rng.uniform(0.01, 1)))
    weighted = rng.random() < 0.5
    case.set(
        {"beta": beta, "kl_weight": "ratio" if weighted else "one"}, {"beta": beta, "use_bias_correction_kl": weighted}
    )


def _choose_advantages(rng: random.Random, case: Case) -> None:
    """TRL's eps is 1e-4 and its deviation the unbiased one, always; it drops no group by its variance."""
    scale = rng.choice(("group", "batch", "none"))
    advantage = "dr_grpo" if scale == "none" and rng.random() < 0.5 else "outcome"
    case.set({"advantage": advantage, "scale_rewards": scale, "drop_zero_variance": False}, {"scale_rewards": scale})
    truncated = rng.choice(("keep", "mask"))
    case.set({"truncated": truncated}, {"mask_truncated_completions": truncated == "mask"})


def _choose_policies(rng: random.Random, case: Case) -> None:
    """What the ratio is against, and the correction for the sampler, which wants the learner's own log-probs."""
    modes = [mode for mode in CORRECTIONS if case.ours["surrogate"] != "vespo" or mode.startswith("token")]
    mode = rng.choice((None, *modes))
    if mode is not None:
        high, low = rng.uniform(1.05, 3), rng.uniform(0.2, 0.95)
        bounds = {"correction_max": high, "correction_low": low, "correction_high": high}
        theirs = {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": high}
        if "mask" in mode or rng.random() < 0.5:
            theirs["vllm_importance_sampling_clip_min"] = low
            if "truncate" in mode:
                bounds["correction_min"] = low
        case.set({**CORRECTIONS[mode], **bounds}, {"use_vllm": True, **theirs})
    elif rng.random() < 0.4:
        case.set({"old_logps": "current"}, {"has_old": False})


def _choose_mask(rng: random.Random, case: Case) -> None:
    """DeepSeek-V3.2's, against the sampler on both sides."""
    if rng.random() < 0.5:
        bound = rng.uniform(0.01, 0.3)
        case.set({"mask": {"off_policy_sequence": bound}}, {"off_policy_mask_threshold": bound})


def _choose_entropy(rng: random.Random, case: Case) -> None:
    """A bonus, and the tokens of high entropy: TRL's quantile is of the micro-batch, which is all of it here."""
    if rng.random() < 0.4:
        coef = rng.uniform(0.01, 1)
        case.set({"entropy": {"coef": coef}}, {"entropy_coef": coef})
    if rng.random() < 0.4:
        quantile = rng.uniform(0.05, 0.95)
        case.set({"top_entropy_quantile": quantile}, {"top_entropy_quantile": quantile})


def on_terms_of_trl(groups: Sequence[Group], config: LossConfig) -> tuple[list[list[Completion]], float]:
    """What TRL is given, and the factor from its loss to ours.

    TRL divides by all completions of a batch; we by those that train. A completion without a reward feels KL in TRL and
    nothing in ours: TRL is told that it has no tokens.
    """
    told = [[without_tokens(one) if math.isnan(one.reward) else one for one in group] for group in groups]
    everyone = [one for group in groups for one in group]
    training = sum(trains(one, config) for one in everyone)
    return told, 1.0 if config.aggregation == "token_mean" else len(everyone) / training


def assert_same(ours: tuple[float, list[float]], theirs: tuple[float, list[float]], factor: float = 1.0) -> None:
    """To 1e-9 of the largest number there."""
    size = factor * max(abs(value) for value in (theirs[0], *theirs[1]))
    assert size > 0 or not any((ours[0], *ours[1]))
    for own, other in zip((ours[0], *ours[1]), (theirs[0], *theirs[1]), strict=True):
        assert abs(own - factor * other) <= 1e-9 * size


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_grpo_trainer(loss_type: str) -> None:
    rng = random.Random(loss_type)
    compared = 0
    while compared < CASES:
        case = random_case(rng, loss_type)
        config = LossConfig(**case.ours)
        groups = random_groups(rng, size=4, unrewarded=rng.choice((0.0, 0.3)), unfinished=rng.choice((0.0, 0.3)))
        groups = [group for group in groups if teaches(group, config)]
        if groups:
            told, factor = on_terms_of_trl(groups, config)
            theirs: dict[str, Any] = case.theirs | {
                "entropy_coef": config.entropy.coef / factor
            }  # the bonus is over tokens alone
            assert_same(loss_and_gradient(groups, config, case.max_tokens), Trl(**theirs).loss(told), factor)
            compared += 1


def test_groups_without_variance_are_dropped() -> None:
    """Ours without them is TRL on the others alone."""
    rng = random.Random(1)
    for _ in range(30):
        case = random_case(rng, "grpo")
        config = LossConfig(**{**case.ours, "drop_zero_variance": True})
        groups = random_groups(rng, count=5, size=2)
        varied = [group for group in groups if group[0].reward != group[1].reward]
        if not varied or not any(trains(one, config) for one in varied[0]):
            continue
        varied = [group for group in varied if teaches(group, config)]
        told, factor = on_terms_of_trl(varied, config)
        theirs: dict[str, Any] = case.theirs | {"entropy_coef": config.entropy.coef / factor}
        of_varied = loss_and_gradient(varied, config, case.max_tokens)
        assert_same(of_varied, Trl(**theirs).loss(told), factor)
        assert loss_and_gradient(groups, config, case.max_tokens)[0] == pytest.approx(of_varied[0], rel=1e-12)


@pytest.mark.parametrize("quantile", [1.0, 0.37])
def test_the_bonus_adapts_to_its_target(quantile: float) -> None:
    """Thirty updates: the coefficient, and every loss with it. Both bounds are reached. (TRL rounds its threshold to
    float32, and may lose a token whose entropy it is: with 0.37 it lies between two.)"""
    rng = random.Random(7)
    bounds: dict[str, Any] = {"delta": 0.05, "min": 0.02, "max": 0.3}
    settings: dict[str, Any] = {"old_logps": "recomputed", "beta": 0.1, "drop_zero_variance": False}
    settings["top_entropy_quantile"] = quantile
    target = 2.0 if quantile == 1 else 3.2
    bonus = choose_bonus(EntropyConfig(coef=0.1, target=target, **bounds))
    theirs = Trl(
        beta=0.1, top_entropy_quantile=quantile, entropy_coef=0.1, use_adaptive_entropy=True, entropy_target=target,
        **{f"entropy_coef_{name}": value for name, value in bounds.items()},
    )  # fmt: skip
    coefficients, applied = [], []
    for number in range(30):
        level = (0.5, 1.5)[number // 10 % 2]
        groups = [
            [replace(one, entropies=[level * entropy for entropy in one.entropies]) for one in group]
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
    known = sorted(one.entropies[t] for group in groups for one in group for t in one.trained)
    kept = known[math.ceil((1 - quantile) * (len(known) - 1)) :]
    return sum(kept) / len(kept)


def test_several_rewards_are_summed_by_weight() -> None:
    """TRL's sum_then_normalize. A part that is missing is 0 to TRL; here the completion has no reward then."""
    rng = random.Random(2)
    config = LossConfig(old_logps="recomputed", beta=0.1, drop_zero_variance=False)
    for _ in range(50):
        weights = [rng.uniform(-1, 2) for _ in range(3)]
        groups, parts = [], []
        for group in random_groups(rng, size=4):
            parts += [[rng.uniform(-1, 1) for _ in weights] for _ in group]
            totals = [sum(w * part for w, part in zip(weights, row, strict=True)) for row in parts[-len(group) :]]
            groups.append([replace(one, reward=total) for one, total in zip(group, totals, strict=True)])
        theirs = Trl(loss_type="grpo", beta=0.1).loss(groups, parts=torch.tensor(parts), weights=weights)
        assert_same(loss_and_gradient(groups, config, 8), theirs)


def test_several_rewards_are_normalised_apart() -> None:
    """TRL's normalize_then_sum, with rewards that completions lack. A completion that lacks all has none."""
    rng = random.Random(5)
    for _ in range(CASES):
        beta, names = rng.choice((0.0, 0.1)), range(rng.randint(1, 4))
        config = LossConfig(advantage="gdpo", old_logps="recomputed", beta=beta, drop_zero_variance=False)
        weights = [rng.uniform(-1, 2) for _ in names]
        groups = [
            [
                replace(one, parts=[(w, math.nan if rng.random() < 0.2 else rng.uniform(-1, 1)) for w in weights])
                for one in group
            ]
            for group in random_groups(rng, size=4)
        ]
        groups = [[_judged(one) for one in group] for group in groups]
        groups = [group for group in groups if teaches(group, config)]
        told, factor = on_terms_of_trl(groups, config)
        parts = torch.tensor([[reward for _, reward in one.parts] for group in groups for one in group])
        trainer = Trl(loss_type="grpo", beta=beta, multi_objective_aggregation="normalize_then_sum")
        assert_same(loss_and_gradient(groups, config, 8), trainer.loss(told, parts=parts, weights=weights), factor)


def _judged(one: Completion) -> Completion:
    return replace(one, reward=math.nan if all(math.isnan(reward) for _, reward in one.parts) else 0.0)


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
            [replace(one, mask=[True] * len(one.mask)) for one in group]
            for group in random_groups(rng, size=4, unrewarded=rng.choice((0.0, 0.2)), noise=0.2)
        ]
        groups = [group for group in groups if teaches(group, config)]
        everyone = [one for group in groups for one in group]
        factor = len(everyone) / sum(trains(one, config) for one in everyone)
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
    (own,) = advantages([group], config)
    places = torch.arange(rows).repeat_interleave(length)
    tokens = LossTokens(places, mask.flatten(), torch.from_numpy(own).double(), sampler.flatten())
    logps = (logits / 0.7).log_softmax(-1).gather(-1, ids[..., None]).flatten()
    totals = Totals(completions=rows, tokens=int(mask.sum()), max_completion_length=length)
    weights = token_weights("token_mean", places, mask.flatten(), totals)
    return (weights * token_loss(logps, tokens, config).loss).sum()
