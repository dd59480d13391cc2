"""Loads the policy of a training run, with its learner, sampler and evaluator."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policy_trainer.config import TrainConfig
from policy_trainer.config.cautions import cautions
from policy_trainer.data.problem import Task
from policy_trainer.data.prompts import PromptEncoder
from policy_trainer.evaluation.evaluator import Evaluator, make_evaluator
from policy_trainer.learner.gradient_checkpointing import checkpoint_layers
from policy_trainer.learner.learner import Learner
from policy_trainer.learner.optimizer import OFFLOADED_FROM_CPU, PURE_BFLOAT16
from policy_trainer.reporting.display import Display
from policy_trainer.rewards.judging import Judge
from policy_trainer.rewards.registry import tagged_rewards
from policy_trainer.run_files.checkpoint import restore
from policy_trainer.run_files.turns import Turns
from policy_trainer.sampling.hf import HFSampler
from shared.logprobs import choose_forward
from shared.models import load_model, load_tokenizer

# Said once: TRL takes such prompts as they stand.
TEXTS_ARE_MESSAGES = (
    "data: prompts that are texts are user messages of the model's chat template; "
    "--data.prompt-style plain takes them as they stand"
)


@dataclass(frozen=True)
class Policy:
    """A model's tokenizer, learner, sampler and evaluator. tagged_rewards: the rewards that look for answer tags.

    turns: when they may compute.
    """

    tokenizer: PreTrainedTokenizerBase
    learner: Learner
    sampler: HFSampler
    evaluator: Evaluator
    tagged_rewards: frozenset[str]
    turns: Turns


@dataclass(frozen=True)
class Judging:
    """What problems are and how they are judged: all of a policy that needs no weights."""

    task: Task
    tokenizer: PreTrainedTokenizerBase
    judge: Judge


def load_judging(config: TrainConfig, task: Task, checkpoint: Path | None) -> Judging:
    """Raises UserError for rewards, a tokenizer or prompts that cannot be used."""
    source, revision = _source(config, checkpoint)
    tokenizer = load_tokenizer(source, revision=revision)
    judge = Judge(tokenizer, task, config)
    # A chat template that is missing or refuses the problem shows at once, too.
    PromptEncoder(tokenizer, config.data).encode(task.problem(0))
    return Judging(task, tokenizer, judge)


def load_policy(
    config: TrainConfig, checkpoint: Path | None, judging: Judging, turns: Turns, display: Display
) -> Policy:
    """Loads the policy from the checkpoint, or from config.model without one.

    Raises UserError for a model that cannot be used.
    """
    source, revision = _source(config, checkpoint)
    task, tokenizer, judge = judging.task, judging.tokenizer, judging.judge
    if PromptEncoder(tokenizer, config.data).in_chat(first := task.problem(0)) and first.prompt:
        display.note(TEXTS_ARE_MESSAGES)
    display.note(f"loading the model {source}")
    model = load_model(source, revision=revision, device=config.device, dtype=config.dtype)
    return Policy(
        tokenizer=tokenizer,
        learner=_make_learner(config, model, checkpoint, display),
        sampler=HFSampler(model, tokenizer),
        evaluator=make_evaluator(config, task, judge, model, tokenizer, batch_size=config.evaluation.batch_size),
        tagged_rewards=tagged_rewards(config, task),
        turns=turns,
    )


def _source(config: TrainConfig, checkpoint: Path | None) -> tuple[str, str | None]:
    """Where weights and tokenizer are, and the revision of a Hub model."""
    return (str(checkpoint), None) if checkpoint else (config.model, config.revision)


def _make_learner(config: TrainConfig, model: PreTrainedModel, checkpoint: Path | None, display: Display) -> Learner:
    if config.gradient_checkpointing:
        checkpoint_layers(model)
    forward = choose_forward(model)
    display.note(f"checked: log-probs, computed in the {forward.name} form, equal those of a plain forward")
    learner = Learner(
        model,
        forward,
        loss=config.loss,
        optimizer=config.optimizer,
        steps=config.max_steps,
        micro_batch_tokens=config.micro_batch_tokens,
        max_completion_length=config.sampling.max_completion_length,
        num_iterations=config.num_iterations,
        minibatches=config.minibatches,
    )
    if model.dtype == torch.bfloat16 and config.optimizer.master_weights == "none":
        display.note(PURE_BFLOAT16)
    if model.device.type == "cpu" and config.optimizer.offload == "cpu":
        display.note(OFFLOADED_FROM_CPU)
    for caution in cautions(config):
        display.note(caution)
    if checkpoint:
        restore(checkpoint, learner.weights)
    return learner
