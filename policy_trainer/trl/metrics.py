"""Converts Tandem's metrics to TRL's names and units, for generation batches, updates and evaluations."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np

from policy_trainer.config import TrainConfig
from policy_trainer.config.names import TRL_METRICS
from policy_trainer.reporting.metrics import Metrics
from policy_trainer.reporting.samples import SampledGroup
from policy_trainer.trl.config import GRPOConfig

Named = dict[str, float]
# Values of loss_type that clip the ratio at two bounds.
_CLIPS = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
# Tandem's name by TRL's, for metrics whose values are the same.
_COPIED = {theirs: ours for theirs, (ours, note) in TRL_METRICS.items() if not note and "NAME" not in theirs}
# Prefixes of the metrics that TRL logs once per generation batch.
_OF_BATCH = ("completions/", "reward", "frac_reward_zero_std", "tools/", "sampling/")


def generation_metrics(record: Metrics, args: GRPOConfig, names: Mapping[str, str]) -> Named:
    """Returns the metrics that TRL logs once per generation batch; NaN where unknown. num_tokens is only this batch's.

    record: a step's, as in metrics.jsonl. names: TRL's name of each reward, by Tandem's.
    """
    lengths = _number(record["prompt_length_mean"]) + _number(record["completion_length_mean"])
    metrics = {
        name: _number(record[ours])
        for name, ours in _COPIED.items()
        if name.startswith(_OF_BATCH) and ours in record and _is_logged(name, args)
    }
    ended = {name: 0.0 for name, value in metrics.items() if "terminated" in name and math.isnan(value)}
    rewards = {}
    for ours, theirs in names.items():
        rewards[f"rewards/{theirs}/mean"] = _number(record.get(f"reward/{ours}"))
        rewards[f"rewards/{theirs}/std"] = _unbiased(record, f"/{ours}")
    deviation = _unbiased(record, "")
    if args.scale_rewards == "batch":  # the rewards of all groups are compared
        metrics["frac_reward_zero_std"] = float(deviation == 0)
    by_functions = {
        name.removeprefix("logged/"): _number(value) for name, value in record.items() if name.startswith("logged/")
    }
    tokens = round(record["completions"] * lengths)
    return {"num_tokens": tokens, **metrics, **ended, **rewards, "reward_std": deviation, **by_functions}


def update_metrics(record: Metrics, args: GRPOConfig, updates: int) -> Iterator[Named]:
    """Yields the metrics that TRL logs for each update of a step; loss and grad_norm are 0 if no group could train."""
    seconds = record["training_seconds"] / updates
    for place in range(updates):
        row = record["each_update"][place] if place < len(record["each_update"]) else {}
        metrics = {name: _number(row[ours]) for name, ours in _COPIED.items() if ours in row and _is_logged(name, args)}
        if math.isnan(metrics.get("aux_loss", 0.0)):  # the model has no routers, or no coefficient for them
            del metrics["aux_loss"]
        waiting = 0.0 if place else record["waiting_seconds"]
        nothing = {"loss": 0.0, "grad_norm": 0.0, "learning_rate": _number(record["learning_rate"])}
        yield {**nothing, **metrics, "step_time": waiting + seconds}


def _is_logged(name: str, args: GRPOConfig) -> bool:
    """Whether TRL logs the metric with these arguments."""
    bonus = _has_bonus(args)
    corrects = args.use_vllm and args.vllm_importance_sampling_correction
    shown = {"kl": args.beta != 0, "cispo_clip_ratio": args.loss_type == "cispo", "policy_loss": bonus}
    groups = {"clip_ratio": args.loss_type in _CLIPS, "sampling": corrects, "entropy_coef": bonus}
    return shown.get(name, groups.get(name.partition("/")[0], True))


def _has_bonus(args: GRPOConfig) -> bool:
    return bool(args.entropy_coef) or args.use_adaptive_entropy


def evaluation_metrics(
    groups: Sequence[SampledGroup], args: GRPOConfig, names: Mapping[str, str], config: TrainConfig
) -> Named:
    """Returns TRL's metrics of an evaluation: means over batches of per_device_eval_batch_size completions.

    kl and entropy are missing, since an evaluation computes no log-probs.
    """
    count = max(1, args.per_device_eval_batch_size // config.evaluation.num_generations)
    batches = [groups[start : start + count] for start in range(0, len(groups), count)]
    return means(_evaluated(batch, args, names, config) for batch in batches)


def means(parts: Iterable[Mapping[str, float]]) -> Named:
    """Returns the mean of each metric over the parts that have it, ignoring NaN; NaN if nothing is left."""
    values: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            values.setdefault(name, []).append(value)
    return {name: _mean(each) for name, each in values.items()}


def _evaluated(
    groups: Sequence[SampledGroup], args: GRPOConfig, names: Mapping[str, str], config: TrainConfig
) -> Named:
    answers = [answer for group in groups for answer in group.completions]
    lengths = [answer.tokens for answer in answers]
    ended = [answer.tokens for answer in answers if answer.finished] or [0]
    metrics: Named = {}
    if not args.beta and args.loss_type in _CLIPS:
        metrics["policy_loss" if _has_bonus(args) else "loss"] = _loss(groups, config)
    for kind, values in (("", lengths), ("terminated_", ended)):
        metrics |= {
            f"completions/mean_{kind}length": fmean(values),
            f"completions/min_{kind}length": min(values),
            f"completions/max_{kind}length": max(values),
        }
    metrics["completions/clipped_ratio"] = fmean(not answer.finished for answer in answers)
    for ours, theirs in names.items():
        parts = [answer.parts.get(ours, math.nan) for answer in answers]
        metrics |= {f"rewards/{theirs}/mean": _mean(parts), f"rewards/{theirs}/std": _std(parts)}
    rewards = [answer.reward for answer in answers]
    metrics |= {"reward": _mean(rewards), "reward_std": _std(rewards)}
    equal = [not _std([each.reward for each in group.completions]) > 0 for group in groups]
    metrics["frac_reward_zero_std"] = fmean(equal)
    if args.loss_type in _CLIPS:  # the weights have not changed since sampling
        metrics |= dict.fromkeys((name for name in TRL_METRICS if name.startswith("clip_ratio/")), 0.0)
    return metrics


def _loss(groups: Sequence[SampledGroup], config: TrainConfig) -> float:
    """Returns the loss at a ratio of 1 without penalties: the mean of -advantage, by loss.aggregation."""
    import torch

    from policy_trainer.algorithms.objective.advantages import advantages
    from policy_trainer.algorithms.objective.aggregation import token_weights
    from policy_trainer.algorithms.objective.group import Group, RewardParts
    from policy_trainer.learner.micro_batches import join, totals
    from shared.batch import TokenGroup

    weights = dict(zip(config.rewards, config.reward_weights or [1.0] * len(config.rewards), strict=True))

    def as_group(sampled: SampledGroup) -> Group:
        """Makes a group with dummy tokens of the right lengths. The same completions are masked as in training."""
        lengths = np.array([max(1, each.tokens) for each in sampled.completions], np.int64)
        tokens = TokenGroup(np.zeros(1, np.int64), np.zeros(lengths.sum(), np.int64), lengths)
        rewards = np.array([each.reward for each in sampled.completions], np.float32)
        parts = {name: np.array([each.parts[name] for each in sampled.completions]) for name in weights}
        apart = RewardParts.of(parts, weights) if config.loss.advantage == "gdpo" else None
        masked = [config.loss.truncated == "mask" and not each.finished for each in sampled.completions]
        return Group(tokens=tokens, rewards=rewards, sequence_mask=~(np.isnan(rewards) | masked), parts=apart)

    made = [as_group(group) for group in groups]
    made = [replace(group, advantages=each) for group, each in zip(made, advantages(made, config.loss), strict=True)]
    tokens, total = join(made, torch.device("cpu")), totals(made, config.sampling.max_completion_length)
    shares = token_weights(config.loss.aggregation, tokens.sequence_ids, tokens.mask, total)
    return -float((shares * tokens.advantages).sum())


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _unbiased(record: Metrics, name: str) -> float:
    """Returns a standard deviation over the step's completions, with n - 1 as in TRL; NaN for fewer than two."""
    judged = record["completions"] - record.get(f"unrewarded{name}", 0)
    deviation = _number(record.get(f"reward_std{name}"))
    return deviation * math.sqrt(judged / (judged - 1)) if judged > 1 else math.nan


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return fmean(known) if known else math.nan


def _std(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return float(np.std(known, ddof=1)) if len(known) > 1 else math.nan
