"""The loss of the GRPO family, token by token: a surrogate, and a KL penalty to the reference.

The surrogates are in `policy_trainer/algorithms/surrogates/`. aggregation.py gives each token its weight in the loss of
the whole update, so that the losses of its micro-batches, however it is split, sum to that loss.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from policy_trainer.algorithms.objective.corrections import kept
from policy_trainer.algorithms.objective.functions import call_surrogate
from policy_trainer.algorithms.objective.group import LossInputs
from policy_trainer.algorithms.objective.kl import KL_ESTIMATORS
from policy_trainer.algorithms.objective.ratios import log_ratio
from policy_trainer.algorithms.surrogates import SurrogateInputs
from policy_trainer.algorithms.surrogates.sums import masked
from policy_trainer.config import LossConfig


@dataclass(frozen=True)
class TokenLoss:
    """Loss and statistics: one value per token. Only loss and kl have a gradient; they are 0 where masked.

    loss: surrogate and penalties, before aggregation. kl: the estimate without beta or another weight; NaN without
    ref_logps. ratio: before any truncation; 1 where masked. clipped_low, clipped_high: True where a bound removed
    the gradient or truncated the weight. untrusted: True where loss.mask removed the surrogate. metrics: the
    surrogate's own, 0 where masked.
    """

    loss: Float[Tensor, " C"]
    kl: Float[Tensor, " C"]
    ratio: Float[Tensor, " C"]
    clipped_low: Bool[Tensor, " C"]
    clipped_high: Bool[Tensor, " C"]
    untrusted: Bool[Tensor, " C"]
    metrics: Mapping[str, Float[Tensor, " C"]] = field(default_factory=dict)


def token_loss(logps: Float[Tensor, " C"], tokens: LossInputs, config: LossConfig) -> TokenLoss:
    """Returns the loss of each token of a micro-batch. logps: log-probs under the current policy, with gradient.

    Raises ValueError if tokens lack an input that a setting needs, UserError if a user's function fails.
    """
    _refuse_missing(tokens, config)
    mask, logps = tokens.mask, masked(logps, tokens.mask)
    old_logps = tokens.denominator(logps.detach())
    ratio = log_ratio(config.importance_sampling_level, logps - old_logps, tokens.sequence_ids, mask).exp()
    ref_logps = None if tokens.ref_logps is None else masked(tokens.ref_logps, mask)
    chosen, weights = config.chosen_surrogate, tokens.importance_weights
    result = (call_surrogate if chosen is None else chosen.loss)(
        SurrogateInputs(
            logps=logps,
            old_logps=masked(old_logps, mask),
            ratio=ratio,
            advantages=masked(tokens.advantages, mask),
            mask=mask,
            sequence_ids=tokens.sequence_ids,
            ref_logps=ref_logps,
            sampler_logps=tokens.sampler_logps,
            importance_weights=weights,
            config=config,
        )
    )
    surrogate = result.values
    if weights is not None and not config.weighs_completions:
        surrogate = surrogate * masked(weights, mask)
    trusted = _trusted(logps.detach(), old_logps, tokens, config)
    surrogate = masked(surrogate, trusted & tokens.explored)
    kl, loss = torch.full_like(surrogate, torch.nan), surrogate
    if ref_logps is not None:
        kl = KL_ESTIMATORS[config.kl](ref_logps - logps)
    if config.penalises_loss:
        loss = surrogate + config.beta * (kl * ratio if config.kl_weight == "ratio" else kl)
    if config.mismatch_penalty:
        # As in prime-rl, tokens whose surrogate a mask removed have this penalty, too.
        assert tokens.sampler_logps is not None
        loss = loss + config.mismatch_penalty * masked(logps - tokens.sampler_logps, mask).square()
    bounds = (result.clipped_low, result.clipped_high)
    low, high = (torch.zeros_like(mask) if clipped is None else mask & clipped for clipped in bounds)
    metrics = {name: masked(values.detach().to(logps.dtype), mask) for name, values in result.metrics.items()}
    return TokenLoss(loss, kl, ratio.detach(), low, high, mask & ~trusted, metrics)


def _refuse_missing(tokens: LossInputs, config: LossConfig) -> None:
    """Raises ValueError if an input is missing without which a different loss would silently be computed."""
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


def _trusted(
    logps: Float[Tensor, " C"], old_logps: Float[Tensor, " C"], tokens: LossInputs, config: LossConfig
) -> Bool[Tensor, " C"]:
    """Returns the tokens that train and whose surrogate loss.mask keeps. Unknown sampler log-probs are replaced
    by the old ones."""
    if not config.mask.active:
        return tokens.mask
    known = torch.full_like(logps, torch.nan) if tokens.sampler_logps is None else tokens.sampler_logps
    sampler_logps = torch.where(known.isnan(), old_logps, known)
    return kept(logps, replace(tokens, sampler_logps=sampler_logps), config.mask)
