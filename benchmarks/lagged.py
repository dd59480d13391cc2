"""Training in one process on samples of the weights of some steps ago: no server, and the same numbers every time.

`settings` are those that off_policy.py and sensitivity.py share.
"""

import argparse
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import UUID

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policy_trainer.algorithms.objective.kl import k3
from policy_trainer.config import TrainConfig
from policy_trainer.data.completion import group_tokens
from policy_trainer.data.prompts import PromptEncoder
from policy_trainer.data.tasks.registry import make_task
from policy_trainer.learner.learner import Learner
from policy_trainer.learner.step_stats import StepStats
from policy_trainer.rewards.judging import RewardScorer
from policy_trainer.rollout.sampling.hf import HFSampler
from policy_trainer.rollout.sampling.sampler import sample, sampling_params
from policy_trainer.trainer.evaluation.evaluator import make_evaluator
from shared.batch import Batch
from shared.logprobs import choose_forward
from shared.models import load_model, load_tokenizer
from shared.settings import from_values


class LaggedSampler:
    """Samples the groups of a step with the weights of `lag` steps before it, or with the first ones."""

    def __init__(
        self, config: TrainConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, lag: int
    ) -> None:
        """model: it gets the weights of each step."""
        self._config = config
        self._model = model
        self._sampler = HFSampler(model, tokenizer)
        self._task = make_task(config)
        self._encoder = PromptEncoder(tokenizer, config.data)
        self._judge = RewardScorer(tokenizer, self._task, config)
        self._kept: deque[tuple[int, dict[str, torch.Tensor]]] = deque(maxlen=lag + 1)

    def keep(self, version: int, state: dict[str, torch.Tensor]) -> None:
        """Weights that `version` steps made. Versions come in order."""
        self._kept.append((version, state))

    def sample(self, step: int) -> list[Batch]:
        """The samples depend only on seed, step and weights."""
        version, state = self._kept[0]
        self._model.load_state_dict(state)
        config, count = self._config, self._config.groups_per_step
        problems = [self._task.problem(step * count + place) for place in range(count)]
        prompts = [self._encoder.encode(problem) for problem in problems]
        seed = config.seed * 1_000_003 + step
        sampled = sample(self._sampler, prompts, sampling_params(config.sampling), seed)
        judged = self._judge.judge(list(zip(problems, sampled, strict=True)))
        batches = []
        for place, (prompt, completions, judgement) in enumerate(zip(prompts, sampled, judged, strict=True)):
            tokens, logps, finished = group_tokens(prompt, completions)
            batch = Batch(
                id=str(UUID(int=(7 << 76) | (2 << 62) | (step * count + place))), run="lagged", epoch=0,
                policy_version=version, temperature=config.sampling.temperature, group=tokens,
                rewards=judgement.rewards, finished=finished, sampler_logps=logps,
            )  # fmt: skip
            batches.append(batch)
        return batches


@dataclass(frozen=True)
class Outcome:
    """After the last step. accuracy: greedy, on held-out problems. kl: k3 to the first weights, entropy: both in nats a
    token, on fresh samples of the last weights. bounded: mean share of tokens that the clip, the correction or a mask
    acted on."""

    accuracy: float
    kl: float
    entropy: float
    bounded: float


def mean(outcomes: Sequence[Outcome], figure: str) -> float:
    return statistics.mean(getattr(outcome, figure) for outcome in outcomes)


def accuracy_span(outcomes: Sequence[Outcome]) -> str:
    """The mean over the seeds, and the range."""
    accuracies = [outcome.accuracy for outcome in outcomes]
    return f"{statistics.mean(accuracies):.2f} ({min(accuracies):.2f} to {max(accuracies):.2f})"


def settings(model: Path, *, seed: int, steps: int, **changes: Any) -> TrainConfig:
    """The demo's task. changes: by field, `section__field` for one of a section."""
    fields: dict[str, Any] = {
        "model": str(model), "seed": seed, "max_steps": steps, "task": "arithmetic", "rewards": ["accuracy", "tags"],
        "groups_per_step": 8, "sampling": {"num_generations": 8, "max_completion_length": 40},
        "optimizer": {"learning_rate": 3e-4, "warmup_steps": 5}, "evaluation": {"problems": 256, "batch_size": 256},
        "loss": {},
    }  # fmt: skip
    for name, value in changes.items():
        section, _, field = name.rpartition("__")
        (fields[section] if section else fields)[field] = value
    return from_values(TrainConfig, **fields)


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Options that both tables have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    return parser


def outcome_of(config: TrainConfig, lag: int) -> Outcome:
    """Trains the model of the settings."""
    models = [load_model(config.model, revision=None, device="cpu", dtype="float32") for _ in range(3)]
    return train(config, models, load_tokenizer(config.model), lag)


def train(
    config: TrainConfig, models: Sequence[PreTrainedModel], tokenizer: PreTrainedTokenizerBase, lag: int
) -> Outcome:
    """models: three with the same first weights: to train, to sample with, and to stay as it is, the reference."""
    policy, sampled, first = models
    sampler = LaggedSampler(config, sampled, tokenizer, lag)
    bounded = [
        stats.metrics["clip_ratio"] + stats.metrics["importance_sampling_clip_ratio"] + stats.metrics["masked_ratio"]
        for stats in _steps(config, policy, sampler, first)
        if stats.updates
    ]
    newest = LaggedSampler(config, sampled, tokenizer, 0)
    newest.keep(config.max_steps, policy.state_dict())
    kl, entropy = _drift(newest.sample(config.max_steps), policy, first)
    return Outcome(_accuracy(config, policy, tokenizer), kl, entropy, sum(bounded) / max(len(bounded), 1))


def _steps(
    config: TrainConfig, policy: PreTrainedModel, sampler: LaggedSampler, first: PreTrainedModel
) -> Iterator[StepStats]:
    learner = Learner(policy, choose_forward(policy), config)
    for step in range(config.max_steps):
        sampler.keep(step, {name: value.clone() for name, value in policy.state_dict().items()})
        batches = sampler.sample(step)
        yield learner.step([_scored(batch, first) for batch in batches] if config.loss.beta else batches, step=step)


@torch.no_grad()
def _scored(batch: Batch, reference: PreTrainedModel) -> Batch:
    ref_logps = choose_forward(reference)([batch.group], [batch.temperature]).numpy()
    return replace(batch, ref_logps=ref_logps, reference_version="0")


@torch.no_grad()
def _drift(batches: Sequence[Batch], policy: PreTrainedModel, first: PreTrainedModel) -> tuple[float, float]:
    groups, temperatures = [batch.group for batch in batches], [batch.temperature for batch in batches]
    logps, entropy = choose_forward(policy).with_entropy(groups, temperatures)
    drift = k3(choose_forward(first)(groups, temperatures) - logps)
    return float(drift.mean()), float(entropy.mean())


def _accuracy(config: TrainConfig, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> float:
    task = make_task(config)
    evaluation = config.evaluation
    evaluator = make_evaluator(
        config, task, RewardScorer(tokenizer, task, config), policy, batch_size=evaluation.batch_size
    )
    greedy = sampling_params(config.sampling, num_generations=1, temperature=0)
    return evaluator.evaluate(HFSampler(policy, tokenizer), greedy, evaluation.problems).accuracy
