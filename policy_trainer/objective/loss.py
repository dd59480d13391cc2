"""The loss of the GRPO family, token by token: a surrogate, and a KL penalty to the reference.

Each formula is a function in a dictionary, keyed by the value of its setting. aggregation.py gives each token its
weight in the loss of the whole update, so that the sum over any micro-batches is that loss.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from policy_trainer.config import LossConfig
from policy_trainer.config.functions import is_function
from policy_trainer.objective.corrections import kept
from policy_trainer.objective.functions import Surrogate, SurrogateInputs, call_surrogate, nowhere
from policy_trainer.objective.group import LossInputs
from policy_trainer.objective.kl import KL_ESTIMATORS
from policy_trainer.objective.ratios import log_ratio, masked, sequence_sums

# VESPO, as in the paper's code and in TRL: bounds of a token's log-ratio, and of a completion's weight.
_MAX_TOKEN_LOG_RATIO = 20.0
_MIN_WEIGHT, _MAX_LOG_WEIGHT = 1e-8, 20.0


@dataclass(frozen=True)
class TokenLoss:
    """Per token, (C,). Only loss and kl have a gradient; they are 0 where masked.

    loss: surrogate and penalties, before aggregation. kl: the unweighted estimate; NaN without ref_logps. ratio: before
    truncation; 1 where masked. clipped_low, clipped_high: bool, where a bound removed the gradient, or cispo truncated
    the weight. untrusted: bool, where a mask of loss.mask took the surrogate away.
    """

    loss: Tensor
    kl: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    untrusted: Tensor


def token_loss(logps: Tensor, tokens: LossInputs, config: LossConfig) -> TokenLoss:
    """The loss of each token of a micro-batch. logps: (C,), of the current policy, with a gradient.

    Raises ValueError for tokens without an input that a setting needs, UserError for a user's function that fails.
    """
    _refuse_missing(tokens, config)
    mask, logps = tokens.mask, masked(logps, tokens.mask)
    old_logps = tokens.denominator(logps.detach())
    ratio = log_ratio(config.importance_sampling_level, logps - old_logps, tokens.sequence_ids, mask).exp()
    ref_logps = None if tokens.ref_logps is None else masked(tokens.ref_logps, mask)
    compute = call_surrogate if is_function(config.surrogate) else SURROGATES[config.surrogate]
    surrogate, low, high = compute(
        SurrogateInputs(
            logps=logps,
            old_logps=masked(old_logps, mask),
            ratio=ratio,
            advantages=masked(tokens.advantages, mask),
            mask=mask,
            sequence_ids=tokens.sequence_ids,
            ref_logps=ref_logps,
            sampler_logps=tokens.sampler_logps,
            config=config,
        )
    )
    weights = tokens.importance_weights
    if config.surrogate == "vespo":
        weights = _vespo_weights(logps - old_logps, tokens, config)
    if weights is not None:
        surrogate = surrogate * masked(weights, mask)
    trusted = _trusted(logps.detach(), old_logps, tokens, config)
    surrogate = masked(surrogate, trusted & tokens.explored)
    kl, loss = torch.full_like(surrogate, torch.nan), surrogate
    if ref_logps is not None:
        kl = KL_ESTIMATORS[config.kl](ref_logps - logps)
    if config.penalises_loss:
        loss = surrogate + config.beta * (kl * ratio if config.kl_weight == "ratio" else kl)
    if config.mismatch_penalty:
        # As in prime-rl: also of tokens that a mask took away.
        assert tokens.sampler_logps is not None
        loss = loss + config.mismatch_penalty * masked(logps - tokens.sampler_logps, mask).square()
    return TokenLoss(loss, kl, ratio.detach(), mask & low, mask & high, mask & ~trusted)


def _refuse_missing(tokens: LossInputs, config: LossConfig) -> None:
    """Raises ValueError if an input is missing without which this would silently compute a different loss."""
    correction = config.importance_sampling_correction
    for name, needed, setting, remedy in (
        ("old_logps", config.old_logps != "current", f"loss.old_logps = {config.old_logps}",
         "add them with with_old_logps, or set loss.old_logps = current, whose ratio is always 1"),
        ("staleness", config.old_logps == "log_linear", "loss.old_logps = log_linear", "add it with make_group"),
        ("ref_logps", config.penalises_loss, "the KL penalty (loss.beta > 0)",
         "score the batches first, or set loss.beta = 0"),
        ("sampler_logps", config.mismatch_penalty > 0, "the mismatch penalty",
         "give those of the sampler, or set loss.mismatch_penalty = 0"),
        ("importance_weights", correction != "none", f"loss.importance_sampling_correction = {correction}",
         "compute them with importance_sampling_weights, or set none"),
        ("high_entropy", config.top_entropy_quantile < 1, "loss.top_entropy_quantile < 1",
         "add it with with_high_entropy, or set 1"),
    ):  # fmt: skip
        if needed and getattr(tokens, name) is None:
            raise ValueError(f"{name}: {setting} needs {name} for every group of the micro-batch: {remedy}")


def _trusted(logps: Tensor, old_logps: Tensor, tokens: LossInputs, config: LossConfig) -> Tensor:
    """bool (C,): tokens that train and keep their surrogate. Unknown sampler log-probs are replaced by the old ones."""
    if not config.mask.active:
        return tokens.mask
    known = torch.full_like(logps, torch.nan) if tokens.sampler_logps is None else tokens.sampler_logps
    sampler_logps = torch.where(known.isnan(), old_logps, known)
    return kept(logps, replace(tokens, sampler_logps=sampler_logps), config.mask)


@torch.no_grad()
def _vespo_weights(difference: Tensor, tokens: LossInputs, config: LossConfig) -> Tensor:
    """VESPO's weight of -A l at each token, (C,): exp(lambda + k S - lambda e^S). It is 1 at S = 0, and small for
    completions that have become much more or much less likely. k and lambda depend on the advantage's sign.

    difference: (C,), l - l_old. S is its sum over a completion's tokens, and that of the logarithms of their importance
    weights, which are not applied again.
    """
    log_ratios = difference.clamp(-_MAX_TOKEN_LOG_RATIO, _MAX_TOKEN_LOG_RATIO)
    if tokens.importance_weights is not None:
        # A weight may be 0.
        log_ratios = log_ratios + tokens.importance_weights.clamp(min=_MIN_WEIGHT).log().clamp(max=_MAX_LOG_WEIGHT)
    log_weight = sequence_sums(masked(log_ratios, tokens.mask), tokens.sequence_ids)[tokens.sequence_ids]
    log_weight = log_weight.clamp(math.log(_MIN_WEIGHT), _MAX_LOG_WEIGHT)
    gains = masked(tokens.advantages, tokens.mask) >= 0
    k = torch.where(gains, config.vespo_k_pos, config.vespo_k_neg)
    decay = torch.where(gains, config.vespo_lambda_pos, config.vespo_lambda_neg)
    return (decay + k * log_weight - decay * log_weight.exp()).exp().to(difference.dtype)


def _clip(tokens: SurrogateInputs) -> Surrogate:
    """PPO's clipped surrogate (DeepSeekMath, arXiv 2402.03300, eq. 3), with a separate upper bound (DAPO, 2503.14476)
    and dual clip (1912.09729)."""
    ratio, advantages, config = tokens.ratio, tokens.advantages, tokens.config
    low, high = 1 - config.epsilon, 1 + (config.epsilon if config.epsilon_high is None else config.epsilon_high)
    bounded = ratio if config.delta is None else ratio.clamp(max=config.delta)
    values = -torch.minimum(bounded * advantages, ratio.clamp(low, high) * advantages)
    above = (ratio > high) & (advantages > 0)
    if config.delta is not None:
        above = above | ((ratio > config.delta) & (advantages < 0))
    return values, (ratio < low) & (advantages < 0), above


def _reinforce(tokens: SurrogateInputs) -> Surrogate:
    """The policy gradient: no ratio, no clip (nano-aha-moment, GRPO:Zero). VESPO weighs it."""
    return -tokens.advantages * tokens.logps, nowhere(tokens.logps), nowhere(tokens.logps)


def _cispo(tokens: SurrogateInputs) -> Surrogate:
    """MiniMax-M1 (arXiv 2506.13585, eq. 4): the ratio is a truncated weight without gradient."""
    ratio_max = tokens.config.ratio_max
    values = -tokens.ratio.detach().clamp(max=ratio_max) * tokens.advantages * tokens.logps
    return values, nowhere(tokens.logps), tokens.ratio > ratio_max


def _sapo(tokens: SurrogateInputs) -> Surrogate:
    """SAPO (arXiv 2511.20347): a soft gate, which closes sooner for negative advantages."""
    ratio, advantages, config = tokens.ratio, tokens.advantages, tokens.config
    tau = torch.full_like(ratio, config.sapo_temperature_neg).masked_fill(advantages > 0, config.sapo_temperature_pos)
    return -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantages, nowhere(ratio), nowhere(ratio)


SURROGATES: dict[str, Callable[[SurrogateInputs], Surrogate]] = {
    "clip": _clip,
    "reinforce": _reinforce,
    "cispo": _cispo,
    "sapo": _sapo,
    "vespo": _reinforce,
}
