"""The mathematics of a step, written as naively as it reads: loops over completions and tokens in float64, plain exp.

It shares nothing with the product but the settings. Numbers are floats, or scalar tensors where a gradient is wanted.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from policy_trainer.config import LossConfig


@dataclass(frozen=True)
class Completion:
    """T tokens and what came of them. logps: under the policy now, scalar tensors or floats; old: under the one before
    the first update on the batch. entropies: of the policy now, as logps are. steps: (reward, index of the last token)
    of process supervision. staleness: versions between the sampler's weights and those that the step begins with.
    parts: (weight, reward) of several rewards, NaN for none. norms: of the gradient of each log-prob with respect
    to the logits, squared, under the policy before the first update."""

    reward: float
    logps: Sequence[Any]
    old: list[float]
    sampler: list[float]
    reference: list[float]
    mask: list[bool]
    entropies: Sequence[Any] = ()
    finished: bool = True
    teacher: Sequence[float] = ()
    steps: Sequence[tuple[float, int]] = ()
    staleness: int = 0
    parts: Sequence[tuple[float, float]] = ()
    norms: Sequence[float] = ()

    @property
    def trained(self) -> list[int]:
        return [t for t, trained in enumerate(self.mask) if trained]


Group = Sequence[Completion]
# Of each completion of each group, a number for each token.
PerToken = list[list[list[float]]]


def step_loss(
    groups: Sequence[Group], config: LossConfig, *, max_tokens: int, minibatch: int = 0, minibatches: int = 1
) -> Tensor:
    """The one number that an update descends: of the whole step, or of one minibatch of it."""
    taking_part = minibatch_of(groups, config, minibatch, minibatches)
    threshold = entropy_threshold([group for group, _ in taking_part], config)
    per_completion = [
        (completion, token_losses(completion, per_token, config, threshold))
        for completion, per_token in completions_that_train(taking_part, config)
    ]
    total: Any = torch.zeros(())
    tokens = sum(len(completion.trained) for completion, _ in per_completion)
    for completion, losses in per_completion:
        for t in completion.trained:
            if config.aggregation == "sequence_mean":
                total = total + losses[t] / len(completion.trained) / len(per_completion)
            elif config.aggregation == "token_mean":
                total = total + losses[t] / tokens
            elif config.aggregation == "luspo":
                total = total + losses[t] / len(per_completion)
            else:
                total = total + losses[t] / (len(per_completion) * max_tokens)
    trained = [completion for completion, _ in per_completion]
    return total - entropy_bonus(trained, config, threshold) + config.echo_coef * echo_loss(trained)


def minibatch_of(
    groups: Sequence[Group], config: LossConfig, minibatch: int, minibatches: int
) -> list[tuple[Group, list[list[float]]]]:
    """Its groups, with the advantages of their tokens, which come from the whole step."""
    groups = [group for group in groups if teaches(group, config)]
    everything = list(zip(groups, advantages(groups, config), strict=True))
    start, end = (len(groups) * part // minibatches for part in (minibatch, minibatch + 1))
    return everything[start:end]


def completions_that_train(
    groups: Sequence[tuple[Group, list[list[float]]]], config: LossConfig
) -> list[tuple[Completion, list[float]]]:
    return [
        (completion, per_token)
        for group, group_advantages in groups
        for completion, per_token in zip(group, group_advantages, strict=True)
        if trains(completion, config)
    ]


def entropy_threshold(groups: Sequence[Group], config: LossConfig) -> float:
    """Of tokens that train, the share top_entropy_quantile has no lower entropy. Between two of them: on a line."""
    if config.top_entropy_quantile == 1:
        return -math.inf
    known = sorted(
        float(stopped(completion.entropies[t]))
        for group in groups
        for completion in group
        if trains(completion, config)
        for t in completion.trained
    )
    place = (1 - config.top_entropy_quantile) * max(len(known) - 1, 0)
    below, above = known[math.floor(place) :][:1], known[math.ceil(place) :][:1]
    value = below[0] + (place - math.floor(place)) * (above[0] - below[0]) if known else 0.0
    return value - 1e-6  # equal ones may be rounded apart


def entropy_bonus(completions: Sequence[Completion], config: LossConfig, threshold: float) -> Any:
    """Of a fixed coefficient: over all kept tokens alike, whatever the aggregation."""
    kept = [
        completion.entropies[t]
        for completion in completions
        for t in completion.trained
        if completion.entropies and completion.entropies[t] >= threshold
    ]
    return config.entropy.coef * sum(kept) / max(len(kept), 1)


def echo_loss(completions: Sequence[Completion]) -> Any:
    """The mean surprise at what the model did not sample, after the first token that it did."""
    surprises = [
        -completion.logps[t]
        for completion in completions
        for t, sampled in enumerate(completion.mask)
        if not sampled and any(completion.mask[:t])
    ]
    return sum(surprises) / max(len(surprises), 1)


# Who takes part.


def counts(completion: Completion, config: LossConfig) -> bool:
    """In the statistics of its group."""
    judged = not math.isnan(completion.reward)
    if config.advantage == "process":
        judged = judged and not any(math.isnan(reward) for reward, _ in completion.steps)
    return judged and (completion.finished or config.truncated != "drop")


def trains(completion: Completion, config: LossConfig) -> bool:
    return counts(completion, config) and (completion.finished or config.truncated == "keep")


def teaches(group: Group, config: LossConfig) -> bool:
    """Whether a group takes part in the step. Its raw rewards are looked at, before any KL is taken off."""
    needs_none = coefficient(config) or config.echo_coef
    dropped = not varies(group, config) and config.drop_zero_variance and not needs_none
    return any(trains(completion, config) for completion in group) and not dropped


def varies(group: Group, config: LossConfig) -> bool:
    """Whether the rewards that are compared differ."""
    if config.advantage == "gdpo":
        return any(len(set(part_of(group, place, config).values())) > 1 for place in range(len(group[0].parts)))
    judged = [completion for completion in group if counts(completion, config)]
    if config.advantage == "process":
        return len({reward for completion in judged for reward, _ in completion.steps}) > 1
    return len({completion.reward for completion in judged}) > 1


# Advantages.


def advantages(groups: Sequence[Group], config: LossConfig) -> PerToken:
    """What rewards say of each token, less what it departs from the teacher."""
    result = rewarded(groups, config)
    for group, values in zip(groups, result, strict=True):
        for completion, per_token in zip(group, values, strict=True):
            old = completion.sampler if config.old_logps in ("sampler", "log_linear") else completion.old
            for t in completion.trained if coefficient(config) and trains(completion, config) else ():
                per_token[t] -= coefficient(config) * (old[t] - completion.teacher[t])
    return result


def coefficient(config: LossConfig) -> float:
    if config.distillation_coef is not None:
        return config.distillation_coef
    return 1.0 if config.advantage == "distill" else 0.0


def rewarded(groups: Sequence[Group], config: LossConfig) -> PerToken:
    if config.advantage == "distill":
        return [[[0.0] * len(completion.logps) for completion in group] for group in groups]
    if config.advantage == "process":
        return process(groups, config)
    if config.advantage == "reinforce++":
        return reinforce_plus_plus(groups, config)
    if config.advantage == "gdpo":
        return gdpo(groups, config)
    if config.advantage == "maxrl":
        return maxrl(groups, config)
    if config.advantage == "optimal_token_baseline":
        return [optimal_token_baseline(group, config) for group in groups]
    scale = config.scale_rewards or ("group" if config.advantage == "outcome" else "none")
    everyone = [reward for group in groups for reward in rewards(group, config) if not math.isnan(reward)]
    result: PerToken = []
    for group in groups:
        of_group = rewards(group, config)
        known = [reward for reward in of_group if not math.isnan(reward)]
        result.append([])
        for completion, reward in zip(group, of_group, strict=True):
            if math.isnan(reward):
                value = 0.0
            elif config.advantage == "rloo":
                value = reward - (sum(known) - reward) / (len(known) - 1) if len(known) > 1 else 0.0
            else:
                value = reward - sum(known) / len(known)
            if scale == "group":
                value /= deviation(known, config) + config.advantage_eps
            if scale == "batch":
                value /= deviation(everyone, config) + config.advantage_eps
            result[-1].append([value] * len(completion.logps))
    return result


def maxrl(groups: Sequence[Group], config: LossConfig) -> PerToken:
    """How far a reward is from the mean, in means; 0 without any reward."""
    result: PerToken = []
    for group in groups:
        known = [completion.reward for completion in group if counts(completion, config)]
        mean = sum(known) / len(known) if known else 0.0
        shares = [
            (completion.reward - mean) / mean if counts(completion, config) and mean else 0.0 for completion in group
        ]
        result.append([[share] * len(completion.logps) for completion, share in zip(group, shares, strict=True)])
    return result


def optimal_token_baseline(group: Group, config: LossConfig) -> list[list[float]]:
    """What is still to come, less its mean over the completions that have as many sampled tokens, each weighted by its
    norms so far; nothing is subtracted where there is only one."""

    def still_to_come(completion: Completion, place: int) -> float:
        penalties = frozen(completion, config)[place:] if config.kl_in in ("reward", "both") else []
        return completion.reward - config.beta * sum(kl_estimate(config, *pair) for pair in penalties)

    result = [[0.0] * len(completion.logps) for completion in group]
    judged = [completion for completion in group if counts(completion, config)]
    for completion, values in zip(group, result, strict=True):
        for place, t in enumerate(completion.trained if counts(completion, config) else ()):
            as_long = [other for other in judged if len(other.trained) > place]
            weights = [sum(other.norms[u] for u in other.trained[: place + 1]) for other in as_long]
            values[t] = still_to_come(completion, place)
            if len(as_long) > 1:
                returns = [still_to_come(other, place) for other in as_long]
                products = [weight * value for weight, value in zip(weights, returns, strict=True)]
                values[t] -= sum(products) / (sum(weights) + 1e-8)
    return result


def part_of(group: Group, place: int, config: LossConfig) -> dict[int, float]:
    """One of several rewards, of the completions that have it."""
    given = {row: completion.parts[place][1] for row, completion in enumerate(group) if counts(completion, config)}
    return {row: reward for row, reward in given.items() if not math.isnan(reward)}


def gdpo(groups: Sequence[Group], config: LossConfig) -> PerToken:
    """Each reward normalised in its group, their weighted sum over the step."""
    sums = {(number, row): 0.0 for number, group in enumerate(groups) for row, _ in enumerate(group)}
    for number, group in enumerate(groups):
        for place, (weight, _) in enumerate(group[0].parts):
            known = part_of(group, place, config)
            for row, reward in known.items():
                judged = [*known.values()]
                normalised = (reward - sum(judged) / len(judged)) / (deviation(judged, config) + config.advantage_eps)
                sums[number, row] += weight * normalised
    pool = [sums[number, row] for number, row in sums if counts(groups[number][row], config)]
    return [
        [
            [
                (sums[number, row] - sum(pool) / len(pool)) / (deviation(pool, config) + config.advantage_eps)
                if counts(completion, config)
                else 0.0
            ]
            * len(completion.logps)
            for row, completion in enumerate(group)
        ]
        for number, group in enumerate(groups)
    ]


def rewards(group: Group, config: LossConfig) -> list[float]:
    """NaN where a completion does not count; less the KL penalty where that is in the reward."""
    result = []
    for completion in group:
        reward = completion.reward if counts(completion, config) else math.nan
        if config.kl_in in ("reward", "both"):
            reward -= config.beta * sum(kl_estimate(config, *pair) for pair in frozen(completion, config))
        result.append(reward)
    return result


def frozen(completion: Completion, config: LossConfig) -> list[tuple[float, float]]:
    """(reference, old) of trained tokens. Rewards do not change with the updates that are made on them."""
    old = completion.sampler if config.old_logps == "sampler" else completion.old
    return [(completion.reference[t], old[t]) for t in completion.trained]


def process(groups: Sequence[Group], config: LossConfig) -> PerToken:
    """All step rewards of a group are normalised together; a token gets those of its step and of the later ones."""
    pools = [
        [reward for completion in group if counts(completion, config) for reward, _ in completion.steps]
        for group in groups
    ]
    scale = config.scale_rewards or "group"
    everything = [reward for pool in pools for reward in pool]
    result: PerToken = []
    for group, pool in zip(groups, pools, strict=True):
        divisor = {"group": deviation(pool, config), "batch": deviation(everything, config)}.get(scale)
        result.append([])
        for completion in group:
            per_token = [0.0] * len(completion.logps)
            if counts(completion, config):
                for t in range(len(per_token)):
                    for reward, end in completion.steps:
                        if end >= t:
                            value = reward - sum(pool) / len(pool)
                            per_token[t] += value if divisor is None else value / (divisor + config.advantage_eps)
            result[-1].append(per_token)
    return result


def reinforce_plus_plus(groups: Sequence[Group], config: LossConfig) -> PerToken:
    """Reward at the last trained token, the KL's k1 at each: what is still to come, standardised over all tokens."""
    returns: PerToken = []
    pool = []
    for group in groups:
        returns.append([])
        for completion in group:
            per_token = [0.0] * len(completion.logps)
            if counts(completion, config):
                penalties = dict(zip(completion.trained, frozen(completion, config), strict=True))
                for t in completion.trained:
                    per_token[t] = completion.reward
                    for later, (reference, old) in penalties.items():
                        if later >= t and config.kl_in in ("reward", "both"):
                            per_token[t] -= config.beta * (old - reference)
                    pool.append(per_token[t])
            returns[-1].append(per_token)
    for group, group_returns in zip(groups, returns, strict=True):
        for completion, per_token in zip(group, group_returns, strict=True):
            for t in range(len(per_token)):
                trained = counts(completion, config) and completion.mask[t]
                per_token[t] = per_token[t] - sum(pool) / len(pool) if trained else 0.0
                if config.scale_rewards != "none":
                    per_token[t] /= deviation(pool, config) + config.advantage_eps
    return returns


def deviation(values: list[float], config: LossConfig) -> float:
    freedom = len(values) - (1 if config.advantage_std == "unbiased" else 0)
    mean = sum(values) / len(values) if values else 0.0
    return math.sqrt(sum((value - mean) ** 2 for value in values) / freedom) if freedom > 0 else 0.0


# One completion's tokens.


def token_losses(
    completion: Completion, advantages: list[float], config: LossConfig, threshold: float = -math.inf
) -> list[Any]:
    """Surrogate and KL of each token; of no use where the mask is false."""
    log_ratios = log_ratio(completion, config)
    weights = correction(completion, config)
    trusted = trusted_tokens(completion, advantages, config)
    ratios = [exp(log_ratio) for log_ratio in log_ratios]
    surrogates = globals()[config.surrogate](completion, ratios, advantages, weights, config)
    result = []
    for t, logp in enumerate(completion.logps):
        rho = ratios[t]
        low = threshold > -math.inf and float(stopped(completion.entropies[t])) < threshold
        lost = low or not trusted[t]
        loss = 0.0 * logp if lost else surrogates[t]
        if config.kl_in in ("loss", "both"):
            kl = kl_estimate(config, completion.reference[t], logp)
            loss = loss + config.beta * (kl * rho if config.kl_weight == "ratio" else kl)
        loss = loss + config.mismatch_penalty * (logp - completion.sampler[t]) ** 2
        result.append(loss)
    return result


def old_logps(completion: Completion, config: LossConfig) -> list[Any]:
    if config.old_logps == "sampler":
        return completion.sampler
    if config.old_logps == "recomputed":
        return completion.old
    if config.old_logps == "log_linear":
        behind, this = -completion.staleness, 1  # versions, with that of the weights before the step as 0
        alpha = (this - 1 - behind) / (this - behind)
        pairs = zip(completion.logps, completion.sampler, strict=True)
        return [before + alpha * (stopped(logp) - before) for logp, before in pairs]
    return [stopped(logp) for logp in completion.logps]


def log_ratio(completion: Completion, config: LossConfig) -> list[Any]:
    old = old_logps(completion, config)
    differences = [logp - before for logp, before in zip(completion.logps, old, strict=True)]
    if config.importance_sampling_level == "token":
        return differences
    total: Any = 0.0
    for t in completion.trained:
        total = total + differences[t]
    if config.importance_sampling_level == "sequence":
        total = total / max(len(completion.trained), 1)
    return [total] * len(differences)


# The surrogate of each token of a completion, each by its name in the settings. ratios: rho of each token. weights: the
# correction's, which multiply it.


def clip(completion: Completion, ratios: list[Any], advantages: list[float], weights: list[float], config: LossConfig):
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    result = []
    for rho, advantage, weight in zip(ratios, advantages, weights, strict=True):
        clipped = min(max(rho, 1 - config.epsilon), 1 + high)
        bounded = rho if config.delta is None else min(rho, config.delta)
        result.append(weight * -min(bounded * advantage, clipped * advantage))
    return result


def reinforce(completion: Completion, ratios: list[Any], advantages: list[float], weights: list[float], config: Any):
    return [-w * advantage * logp for w, advantage, logp in zip(weights, advantages, completion.logps, strict=True)]


def cispo(completion: Completion, ratios: list[Any], advantages: list[float], weights: list[float], config: LossConfig):
    truncated = [w * min(stopped(rho), config.cispo.ratio_max) for w, rho in zip(weights, ratios, strict=True)]
    return reinforce(completion, ratios, advantages, truncated, config)


def sapo(completion: Completion, ratios: list[Any], advantages: list[float], weights: list[float], config: LossConfig):
    result = []
    for rho, advantage, weight in zip(ratios, advantages, weights, strict=True):
        tau = config.sapo.temperature_pos if advantage > 0 else config.sapo.temperature_neg
        result.append(weight * -4 / tau / (1 + exp(-tau * (rho - 1))) * advantage)
    return result


def vespo(completion: Completion, ratios: list[Any], advantages: list[float], weights: list[float], config: LossConfig):
    """phi weighs each token, and is 1 where the completion is as likely as it was. The weights are a part of it."""
    log_w = 0.0
    for t in completion.trained:
        difference = stopped(completion.logps[t]) - stopped(old_logps(completion, config)[t])
        log_w += min(max(float(difference), -20.0), 20.0)
        log_w += math.log(max(weights[t], 1e-8))
    log_w = min(max(log_w, math.log(1e-8)), 20.0)
    phi = []
    for advantage in advantages:
        k, lam = config.vespo.k_neg, config.vespo.lambda_neg
        if advantage >= 0:
            k, lam = config.vespo.k_pos, config.vespo.lambda_pos
        phi.append(math.exp(log_w) ** k * math.exp(lam - lam * math.exp(log_w)))
    return reinforce(completion, ratios, advantages, phi, config)


def kl_estimate(config: LossConfig, reference: Any, logp: Any) -> Any:
    x = reference - logp
    if config.kl == "k1":
        return -x
    if config.kl == "k2":
        return x**2 / 2
    return exp(x) - x - 1


def correction(completion: Completion, config: LossConfig) -> list[float]:
    """The weight of each token's surrogate, for a sampler that is not the learner."""
    learners = old_logps(completion, config) if config.old_logps == "log_linear" else completion.old
    differences = [float(old) - sampler for old, sampler in zip(learners, completion.sampler, strict=True)]
    if config.importance_sampling_correction == "none":
        return [1.0] * len(differences)
    if config.correction_level == "sequence":
        differences = [sum(differences[t] for t in completion.trained)] * len(differences)
    if config.importance_sampling_correction == "tis":
        return [min(max(math.exp(d), config.correction_min or 0), config.correction_max) for d in differences]
    inside = [config.correction_low <= math.exp(d) <= config.correction_high for d in differences]
    return [math.exp(d) if ok else 0.0 for d, ok in zip(differences, inside, strict=True)]


def trusted_tokens(completion: Completion, advantages: list[float], config: LossConfig) -> list[bool]:
    """Where every mask leaves the surrogate. A bound that is not set holds nothing back."""
    bounds, now, then = config.mask, [float(stopped(logp)) for logp in completion.logps], completion.sampler
    mean = sum(now[t] - then[t] for t in completion.trained) / max(len(completion.trained), 1)
    result = []
    for t, advantage in enumerate(advantages):
        change = math.exp(now[t]) - math.exp(then[t])
        lost = [
            bounds.off_policy_sequence is not None and advantage < 0 and -mean > bounds.off_policy_sequence,
            bounds.geometric_low is not None and math.exp(mean) < bounds.geometric_low,
            bounds.geometric_high is not None and math.exp(mean) > bounds.geometric_high,
            bounds.dppo_low is not None and advantage < 0 and change < -bounds.dppo_low,
            bounds.dppo_high is not None and advantage > 0 and change > bounds.dppo_high,
            bounds.ipo is not None and abs(change) > bounds.ipo,
        ]
        result.append(not any(lost))
    return result


def exp(value: Any) -> Any:
    return value.exp() if isinstance(value, Tensor) else math.exp(value)


def stopped(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
