"""The statistics of a step, as naively as oracle.py: what each token that trains adds to them, and their means."""

import math
from collections.abc import Sequence
from typing import Any

from policy_trainer.config import LossConfig
from tests.policy_trainer.proofs.oracle import (
    Completion,
    Group,
    advantages,
    completions_that_train,
    kl_estimate,
    log_ratio,
    minibatch_of,
    old_logps,
    stopped,
    teaches,
    trusted_tokens,
    varies,
)

# Of a token, by name.
Seen = dict[str, float]


def seen_tokens(groups: Sequence[Group], config: LossConfig, minibatch: int = 0, minibatches: int = 1) -> list[Seen]:
    """What an update counts of each token that trains."""
    pairs = completions_that_train(minibatch_of(groups, config, minibatch, minibatches), config)
    return [seen for completion, per_token in pairs for seen in _seen_of(completion, per_token, config)]


def _seen_of(completion: Completion, per_token: list[float], config: LossConfig) -> list[Seen]:
    now = [float(stopped(logp)) for logp in completion.logps]
    learners = now if config.old_logps == "sampler" else [float(old) for old in old_logps(completion, config)]
    ratios, trusted = log_ratio(completion, config), trusted_tokens(completion, per_token, config)
    differences = {t: learners[t] - completion.sampler[t] for t in completion.trained}
    result = []
    for t in completion.trained:
        ratio = math.exp(float(stopped(ratios[t])))
        drift = differences[t] if config.correction_level == "token" else sum(differences.values())
        low, high = _clipped(ratio, per_token[t], config)
        result.append({
            "kl": float(kl_estimate(config, completion.reference[t], stopped(completion.logps[t]))),
            "entropy": float(stopped(completion.entropies[t])),
            "ratio": ratio,
            "low": low,
            "high": high,
            "weight": math.exp(drift),
            "cut": _is_cut(math.exp(drift), config),
            "difference": abs(differences[t]),
            "untrusted": not trusted[t],
        })  # fmt: skip
    return result


def _clipped(ratio: float, advantage: float, config: LossConfig) -> tuple[bool, bool]:
    """Whether the lower or the upper bound took the gradient, or cispo's bound the weight."""
    if config.surrogate == "cispo":
        return False, ratio > config.cispo.ratio_max
    if config.surrogate != "clip":
        return False, False
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    dual = config.delta is not None and ratio > config.delta and advantage < 0
    return ratio < 1 - config.epsilon and advantage < 0, (ratio > 1 + high and advantage > 0) or dual


def _is_cut(weight: float, config: LossConfig) -> bool:
    if config.importance_sampling_correction == "tis":
        return weight > config.correction_max or weight < (config.correction_min or 0)
    inside = config.correction_low <= weight <= config.correction_high
    return config.importance_sampling_correction == "mask" and not inside


def statistics(updates: Sequence[Sequence[Seen]], groups: Sequence[Group], config: LossConfig) -> dict[str, Any]:
    """By the names of the metrics. updates: the tokens of each. groups: of the step, as it began."""
    tokens = [seen for update in updates for seen in update]

    def mean(name: str) -> float:
        return sum(seen[name] for seen in tokens) / len(tokens) if tokens else math.nan

    def ends(name: str) -> tuple[float, float]:
        values = [seen[name] for seen in tokens] or [math.nan]
        return min(values), max(values)

    squares = sum(seen["weight"] ** 2 for seen in tokens)
    return {
        "kl": mean("kl"),
        "entropy": mean("entropy"),
        "clip_ratio_low": mean("low"),
        "clip_ratio_high": mean("high"),
        "ratio_min": ends("ratio")[0],
        "ratio_mean": mean("ratio"),
        "ratio_max": ends("ratio")[1],
        "effective_sample_size": mean("weight") ** 2 * len(tokens) / squares if tokens else math.nan,
        "sampling_logp_difference_mean": mean("difference"),
        "sampling_logp_difference_max": ends("difference")[1],
        "importance_sampling_ratio_mean": mean("weight"),
        "importance_sampling_clip_ratio": mean("cut"),
        "masked_ratio": mean("untrusted"),
        "advantage_std": _advantage_std(groups, config),
        "frac_reward_zero_std": sum(not varies(group, config) for group in groups) / len(groups),
    }


def _advantage_std(groups: Sequence[Group], config: LossConfig) -> float:
    """Over completions with a token that trains, each with the mean over those tokens."""
    groups = [group for group in groups if teaches(group, config)]
    pairs = completions_that_train([*zip(groups, advantages(groups, config), strict=True)], config)
    means = [
        sum(per_token[t] for t in completion.trained) / len(completion.trained)
        for completion, per_token in pairs
        if completion.trained
    ]
    if not means:
        return math.nan
    mean = sum(means) / len(means)
    return math.sqrt(sum((value - mean) ** 2 for value in means) / len(means))
