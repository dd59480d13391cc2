"""Random settings in TRL's words and in ours, and what their losses have in common.

Where TRL defines something otherwise the difference is converted here by name; docs/mathematics.md lists them all.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from policy_trainer.config import LossConfig
from tests.policy_trainer.proofs.cases import without_tokens
from tests.policy_trainer.proofs.oracle import Completion, Group, trains

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
        case.set({"cispo": {"ratio_max": ratio_max}}, {"epsilon_high": ratio_max})
    elif case.ours["surrogate"] == "sapo":
        pos, neg = rng.uniform(0.5, 2), rng.uniform(0.5, 2)
        case.set(
            {"sapo": {"temperature_pos": pos, "temperature_neg": neg}},
            {"sapo_temperature_pos": pos, "sapo_temperature_neg": neg},
        )
    elif case.ours["surrogate"] == "vespo":
        shape = {name: rng.uniform(0.5, 4) for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")}
        case.set({"vespo": shape}, {f"vespo_{name}": value for name, value in shape.items()})
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
    given = [
        [without_tokens(completion) if math.isnan(completion.reward) else completion for completion in group]
        for group in groups
    ]
    everyone = [completion for group in groups for completion in group]
    training = sum(trains(completion, config) for completion in everyone)
    return given, 1.0 if config.aggregation == "token_mean" else len(everyone) / training


def assert_same(ours: tuple[float, list[float]], theirs: tuple[float, list[float]], factor: float = 1.0) -> None:
    """To 1e-9 of the largest number there."""
    size = factor * max(abs(value) for value in (theirs[0], *theirs[1]))
    assert size > 0 or not any((ours[0], *ours[1]))
    for ours_value, other in zip((ours[0], *ours[1]), (theirs[0], *theirs[1]), strict=True):
        assert abs(ours_value - factor * other) <= 1e-9 * size
