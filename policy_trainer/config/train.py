"""Settings of the trainer."""

import re
from typing import Literal

from pydantic import Field, model_validator
from pydantic_settings import CliVariadicArg

from policy_trainer.config.commands import RunConfig
from policy_trainer.config.loss import LossConfig
from policy_trainer.config.sections import CheckpointConfig, EvaluationConfig, OptimizerConfig, ReferenceConfig


class TrainConfig(RunConfig):
    """Train a policy with GRPO on the scored batches of a reference server."""

    rollout: Literal["inline", "external"] = "inline"
    """inline starts a rollout worker as a process of its own; external leaves sampling to `policy-trainer rollout`."""
    resume: bool = False
    """Continue from the newest checkpoint in run_dir."""
    max_steps: int = Field(default=100, ge=1)
    """Training steps of the whole run."""
    groups_per_step: int = Field(default=8, ge=1)
    """Groups (prompts) in one training step."""
    num_iterations: int = Field(default=1, ge=1)
    """Times that a step's groups are gone through."""
    minibatches: int = Field(default=1, ge=1)
    """Parts that a step's groups are cut into, with an optimizer update for each part of each pass."""
    micro_batch_tokens: int = Field(default=16_384, ge=1)
    """Tokens of one forward and backward, at most, unless one group alone has more."""
    gradient_checkpointing: bool = False
    """Keep the inputs of layers alone, and compute the rest again on the way back: less memory, more time."""
    publish_every: int = Field(default=1, ge=1)
    """Steps between publications of the weights to the workers."""
    max_waiting: int | None = Field(default=None, ge=1)
    """Groups that may wait in the server before workers wait too; three steps' worth when not given."""
    max_lag: int | None = Field(default=None, ge=0)
    """Batches sampled by weights more than so many steps old expire untrained; any age is trained when not given."""
    order: Literal["fifo", "freshest"] = "fifo"
    """Which batches are trained first: the oldest, or those of the newest weights; max_lag lets others expire."""
    lease_seconds: float = Field(default=120, gt=1)
    """How long a batch stays leased without a sign of life of this trainer."""
    max_bad_steps: int = Field(default=3, ge=1)
    """Stop after so many steps in a row with a loss or gradient that is not finite."""
    report_to: CliVariadicArg[list[Literal["tensorboard", "trackio", "wandb"]]] = Field(default=[])
    """Where metrics go besides metrics.jsonl."""
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    reference: ReferenceConfig = ReferenceConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @model_validator(mode="after")
    def _can_learn(self) -> "TrainConfig":
        if self.dtype == "float16":
            raise ValueError("dtype: gradients vanish in float16, which would need loss scaling: train in bfloat16")
        if self.sampling.num_generations == 1 and (reason := _lonely(self)):
            raise ValueError(f"sampling.num_generations: {reason}")
        if self.loss.advantage == "process" and not self.judging.steps:
            raise ValueError("loss.advantage: process supervision wants the rewards of steps: set judging.steps")
        if self.minibatches > self.groups_per_step:
            raise ValueError(
                f"minibatches: a step has {self.groups_per_step} groups, too few for {self.minibatches} parts: "
                "lower it, or raise groups_per_step"
            )
        return self

    @model_validator(mode="after")
    def _renewal_has_what_it_needs(self) -> "TrainConfig":
        if not self.reference.sync_steps:
            return self
        if not self.loss.beta:
            raise ValueError(
                "reference.sync_steps: with loss.beta = 0 nothing depends on a reference: --reference.sync-steps 0"
            )
        if self.reference.snapshot_root is None:
            raise ValueError(
                "reference.snapshot_root: must be the directory that ref-server was given as --snapshot-root; without "
                "one, --reference.sync-steps 0 keeps the reference as it began"
            )
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}", self.run, re.ASCII):
            raise ValueError(
                "run: names the snapshots of the reference, and must then be of letters, digits, '.', '_' and '-', not "
                f"begin with a dot and have 100 characters at most: choose another --run; got {self.run!r}"
            )
        return self


def _lonely(config: TrainConfig) -> str | None:
    """Why groups of one teach nothing; None where they do: by their steps, or beside the rest of a batch."""
    if config.loss.advantage == "process":
        return None
    if config.loss.advantage != "reinforce++":
        return (
            f"a completion alone has nothing to be better than, and loss.advantage = {config.loss.advantage} is "
            "always 0: take more, or reinforce++"
        )
    if config.loss.drop_zero_variance:
        return "a group of 1 has no variance and would be dropped: take more, or loss.drop_zero_variance = false"
    if config.sampling.max_resamples:
        return "a group of 1 has no variance and would be sampled again: take more, or sampling.max_resamples = 0"
    return None
