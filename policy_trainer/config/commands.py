"""What `policy-trainer` can be told, by file, environment (`POLICY_TRAINER_…`) or command line.

One TOML file serves every command: each takes its own fields from it.
"""

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, CliSuppress, CliVariadicArg

from policy_trainer.config.data import DataConfig, TaskName, refuse_missing_source
from policy_trainer.config.loss import LossConfig
from policy_trainer.config.rewards import JudgingConfig
from policy_trainer.config.sampling import SamplingConfig
from policy_trainer.config.training import (
    CheckpointConfig,
    EvalEvaluationConfig,
    EvaluationConfig,
    OptimizerConfig,
    ReferenceConfig,
)
from shared.settings import Dtype, settings_config

ENV_PREFIX = "POLICY_TRAINER_"


class ModelConfig(BaseSettings):
    """Settings of every command that has a model of its own."""

    model_config = settings_config(ENV_PREFIX)

    config: Path | None = None
    """TOML file with any of these settings; a run's own is RUN_DIR/config.toml."""
    model: str = Field(min_length=1)
    """Directory or hub id of a Hugging Face causal LM."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    device: str = "cpu"
    """Where the model runs: cpu, cuda:0, …"""
    dtype: Dtype = "float32"
    """Precision of the weights."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of this process; PyTorch's choice when not given."""


class CommonConfig(ModelConfig):
    """Settings of every command that answers problems with a model."""

    preset: str | None = None
    """Settings of a published recipe where nothing else is said: `policy-trainer presets` lists them."""
    seed: int = Field(default=0, ge=0)
    """Decides which problems are drawn and which tokens are sampled."""
    task: TaskName = "arithmetic"
    """Where prompts come from and how an answer is judged: arithmetic, countdown, gsm8k, math, jsonl, dataset, mixture,
    or module:name of your own."""
    rewards: CliVariadicArg[list[str]] = []
    """Reward functions by name, or module:function of your own. Each task has its own default."""
    reward_weights: CliVariadicArg[list[float]] = []
    """The weight of each reward in the total; 1 each when not given."""
    judging: JudgingConfig = JudgingConfig()
    data: DataConfig = DataConfig()
    sampling: SamplingConfig = SamplingConfig()

    @model_validator(mode="after")
    def _task_has_what_it_needs(self) -> "CommonConfig":
        refuse_missing_source(self.task, self.data)
        if self.task == "mixture" and not self.data.mixture:
            raise ValueError("data.mixture: task mixture needs the tasks that it is made of")
        if self.reward_weights and len(self.reward_weights) != len(self.rewards):
            raise ValueError(
                f"reward_weights: there must be one for each of rewards {self.rewards}, got {self.reward_weights}: "
                "give both or neither; a preset or a file may have said one of them"
            )
        return self


class RunConfig(CommonConfig):
    """Settings that a trainer and its workers share."""

    run_dir: Path = Path("runs/default")
    """Everything the run leaves: metrics, checkpoints, published weights, the trained model."""
    run: str = ""
    """The name of the run on the server; the name of run_dir when not given."""
    server: str = "http://127.0.0.1:8400"
    """URL of the reference server."""
    token_file: Path | None = None
    """File whose first token the server wants: a line of TOKEN, or of ROLE TOKEN; `#` begins a comment."""
    token: CliSuppress[SecretStr | None] = Field(default=None, exclude=True)
    """The token itself, from the environment only: it is written nowhere."""
    tls_ca: Path | None = None
    """PEM file of the authority that signed the server's certificate, where it is a private one."""

    @field_validator("server")
    @classmethod
    def _server_is_a_url(cls, server: str) -> str:
        if not server.startswith(("http://", "https://")):
            raise ValueError("must begin with http:// or https://")
        return server

    @model_validator(mode="after")
    def _authority_goes_with_https(self) -> "RunConfig":
        if self.tls_ca is not None and not self.server.startswith("https://"):
            raise ValueError(f"tls_ca: goes with a server at https://, got {self.server}")
        return self

    @model_validator(mode="after")
    def _name_the_run(self) -> "RunConfig":
        if not self.run:
            self.run = self.run_dir.resolve().name
        return self


class RolloutConfig(RunConfig):
    """Sample completions with the run's published weights, judge them, and upload them to the reference server."""

    worker: int = Field(default=0, ge=0)
    """Which worker this is: worker k of n takes the problems that are k modulo n."""
    workers: int = Field(default=1, ge=1)
    """How many workers there are in all."""

    @model_validator(mode="after")
    def _worker_is_one_of_them(self) -> "RolloutConfig":
        if self.worker >= self.workers:
            raise ValueError(f"worker: must be below workers ({self.workers}), got {self.worker}")
        return self


class TrainConfig(RunConfig):
    """Train a policy with GRPO on the scored batches of a reference server."""

    rollout: Literal["inline", "external"] = "inline"
    """inline starts a rollout worker as a process of its own; external leaves sampling to `policy-trainer rollout`."""
    resume: bool = False
    """Continue from the newest checkpoint in run_dir."""
    steps: int = Field(default=100, ge=1)
    """Training steps of the whole run."""
    groups_per_step: int = Field(default=8, ge=1)
    """Groups (prompts) in one training step."""
    passes: int = Field(default=1, ge=1)
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
    track: CliVariadicArg[list[Literal["tensorboard", "trackio", "wandb"]]] = []
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
        if self.sampling.group_size == 1 and (reason := _lonely(self)):
            raise ValueError(f"sampling.group_size: {reason}")
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
        if not self.reference.renew_every:
            return self
        if not self.loss.beta:
            raise ValueError(
                "reference.renew_every: with loss.beta = 0 nothing depends on a reference: --reference.renew-every 0"
            )
        if self.reference.snapshot_root is None:
            raise ValueError(
                "reference.snapshot_root: must be the directory that ref-server was given as --snapshot-root; without "
                "one, --reference.renew-every 0 keeps the reference as it began"
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


class EvalConfig(CommonConfig):
    """Measure a model's accuracy on held-out problems. The table goes to standard error, JSON to standard output."""

    evaluation: EvalEvaluationConfig = EvalEvaluationConfig()


class DemoChoices(BaseSettings):
    """What can be chosen of the demo, whoever starts its processes."""

    model_config = settings_config(ENV_PREFIX)

    config: Path | None = None
    """TOML file with any of these settings."""
    seed: int = Field(default=0, ge=0)
    """Decides the base model, the problems and the sampling."""
    run_dir: Path = Path("runs/demo")
    """Everything the demo leaves."""
    steps: int = Field(default=160, ge=1)
    """Training steps."""


class DemoConfig(DemoChoices):
    """Train a tiny model to do arithmetic: everything on this machine, in a few minutes."""

    resume: bool = False
    """Continue an interrupted demo from its newest checkpoint."""


class DemoSetupConfig(DemoChoices):
    """Write the demo's base model and its config.toml into run_dir, for processes that somebody else starts."""

    server: str = "http://127.0.0.1:8400"
    """URL of the reference server that will serve the base model."""
