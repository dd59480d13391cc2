"""Settings of the `policy-trainer` commands, from a file, the environment (`POLICY_TRAINER_…`) or the command line.

One TOML file serves every command: each command reads its own fields from it.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, CliSuppress, CliVariadicArg

from policy_trainer.config.data import DataConfig, TaskName, check_source
from policy_trainer.config.marks import Resume, Travel
from policy_trainer.config.samplers import SAMPLER_HELP, SamplerName, SamplerTraits, sampler_traits, samplers_with
from policy_trainer.config.sampling import JudgingConfig, SamplingConfig, TurnsConfig, VllmConfig
from policy_trainer.config.sections import EvalEvaluationConfig, LoraConfig
from shared.api import PLAIN_NAME
from shared.settings import Dtype, InHelp, Section, settings_config
from shared.spelling import spell_setting

# Where published weights meet.
WeightsPlace = Literal["directory", "server"]
ENV_PREFIX = "POLICY_TRAINER_"
# The value of `server` for which the trainer starts one.
INLINE = "inline"
# The name of the reward that environments give themselves, and of the task whose problems are theirs.
ENVIRONMENT = "environment"


def _refuse_float16(dtype: object) -> object:
    if dtype == "float16":
        raise ValueError("gradients vanish in float16, which would need loss scaling: train in bfloat16")
    return dtype


# Precisions that a model can be trained in.
TrainingDtype = Annotated[Literal["float32", "bfloat16", "auto"], BeforeValidator(_refuse_float16)]


class ModelConfig(BaseSettings):
    """Settings of every command that loads a model."""

    model_config = settings_config(ENV_PREFIX)

    config: Annotated[Path | None, Travel.PRIVATE, Resume.NOT_KEPT, InHelp()] = None
    """TOML file with any of these settings. A run writes its own to RUN_DIR/config.toml."""
    model: Annotated[str, Travel.PUBLISHED, Resume.FIXED, InHelp("train doctor replay eval sft")] = Field(min_length=1)
    """Directory or Hub id of a Hugging Face causal LM."""
    revision: Annotated[str | None, Travel.PUBLISHED, Resume.FIXED] = None
    """Branch, tag or commit of a Hub model."""
    device: Annotated[str, InHelp()] = "auto"
    """Where the model runs: auto (the GPU if there is one, else the CPU), cpu, cuda:0, …"""
    dtype: Annotated[Dtype, Travel.PUBLISHED, InHelp("rollout eval")] = "float32"
    """Precision of the weights."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of this process. Default: PyTorch's choice; half as many for trainer, worker and reference server
    of a run that compute at the same time on one CPU."""


class CommonConfig(ModelConfig):
    """Settings of every command that samples answers to problems from a model."""

    preset: Annotated[str | None, Resume.FIXED] = None
    """Published recipe whose settings replace the defaults. `policy-trainer presets` lists them."""
    seed: Annotated[int, Travel.PUBLISHED, Resume.FIXED] = Field(default=0, ge=0)
    """Random seed for drawing problems and sampling tokens."""
    task: Annotated[TaskName, Resume.FIXED, InHelp("train doctor eval")] = "arithmetic"
    """Source of the problems, and how an answer is judged: arithmetic, countdown, geometry3k, gsm8k, math, jsonl,
    dataset, environment, mixture, or module:name for your own task. Default: jsonl with data.path, dataset with
    data.dataset, environment with `environment` and neither."""
    rewards: Annotated[CliVariadicArg[list[str]], Travel.NAME, Resume.FIXED, InHelp("train doctor eval")] = []
    """Names of reward functions, or module:function for your own, or the URL of a server that judges. Default: those of
    the task."""
    reward_weights: Annotated[CliVariadicArg[list[float]], Travel.PUBLISHED, Resume.FIXED] = []
    """Weight of each reward in the total, in the order of `rewards`. Default: 1 each."""
    judging: Annotated[JudgingConfig, Travel.PUBLISHED, Resume.FIXED] = JudgingConfig()
    data: Annotated[DataConfig, Travel.PUBLISHED, Resume.FIXED] = DataConfig()
    sampling: Annotated[SamplingConfig, Travel.PUBLISHED, Resume.FIXED] = SamplingConfig()
    tools: Annotated[CliVariadicArg[list[str]], Travel.PUBLISHED, Resume.FIXED, InHelp("train eval")] = []
    """Functions that the model may call, as module:function."""
    environment: Annotated[CliVariadicArg[list[str]], Travel.PUBLISHED, Resume.FIXED, InHelp("train eval")] = []
    """Class whose methods the model may call, as module:Class, or several as NAME=module:Class. The column
    `environment` of a row then has the name."""
    turns: Annotated[TurnsConfig, Travel.PUBLISHED, Resume.FIXED] = TurnsConfig()
    sampler: SamplerName = Field(default="hf", description=SAMPLER_HELP)
    vllm_url: Annotated[str | None, Travel.PRIVATE] = None
    """URL of the `vllm serve` of sampler vllm-server, such as http://127.0.0.1:8000."""
    vllm: VllmConfig = VllmConfig()

    @property
    def sampler_traits(self) -> SamplerTraits:
        return sampler_traits(self.sampler)

    @model_validator(mode="after")
    def _check_sampler(self) -> "CommonConfig":
        traits = self.sampler_traits
        if traits.server and not (self.vllm_url or "").startswith(("http://", "https://")):
            got = "none" if self.vllm_url is None else repr(self.vllm_url)
            raise ValueError(
                f"vllm_url: {spell_setting('sampler')} {self.sampler} needs the URL of {traits.about}, got {got}"
            )
        if traits.takes_first_gpus and self.device.startswith("cuda:") and self.device != "cuda:0":
            raise ValueError(
                f"device: {traits.engine} takes the first GPUs that it sees, not {self.device}: "
                f"set CUDA_VISIBLE_DEVICES={self.device.removeprefix('cuda:')} and leave device out"
            )
        return self

    @model_validator(mode="after")
    def _check_task(self) -> "CommonConfig":
        if "task" not in self.model_fields_set and (self.data.path or self.data.dataset):
            self.task = "jsonl" if self.data.path else "dataset"
        elif "task" not in self.model_fields_set and self.environment:
            self.task = ENVIRONMENT
        check_source(self.task, self.data)
        if self.task == "mixture" and not self.data.mixture:
            raise ValueError("data.mixture: task mixture needs a list of tasks")
        if self.sampling.regroup and self.judging.steps:
            raise ValueError("sampling.regroup: steps of completions are not regrouped: use it without judging.steps")
        self._check_turns()
        if self.environment and ENVIRONMENT not in self.rewards:  # as in TRL, with the weight 1
            self.reward_weights = [*self.reward_weights, 1.0] if self.reward_weights else []
            self.rewards = [*self.rewards, ENVIRONMENT]
        if self.reward_weights and len(self.reward_weights) != len(self.rewards):
            raise ValueError(
                f"reward_weights: there must be one for each of rewards {self.rewards}, got {self.reward_weights}: "
                "give both or neither; a preset or a file may have set one of them"
            )
        return self

    def _check_turns(self) -> None:
        """Raises ValueError for unusable names of tools and environments, and for settings that exclude them."""
        for setting, names in (("tools", self.tools), ("environment", self.environment)):
            labels = [*self.named_environments().values()] if setting == "environment" else names
            if wrong := [label for label in labels if not all(label.partition(":"))]:
                raise ValueError(f"{setting}: must be module:name, got {wrong[0]!r}")
            if names and self.judging.steps:
                raise ValueError(
                    f"{setting}: judging.steps judges the steps of single answers: leave one out; an environment "
                    "rewards turns by get_step_reward"
                )
        functions = [name.rpartition(":")[2] for name in self.tools]
        if twice := [name for name in functions if functions.count(name) > 1]:
            raise ValueError(f"tools: the model knows tools by name, and two are called {twice[0]}: rename one")
        if (self.tools or self.environment) and self.sampling.regroup:
            setting = "environment" if self.environment else "tools"
            raise ValueError(f"{setting}: sampling.regroup samples single answers again, not rollouts: leave one out")

    def named_environments(self) -> dict[str, str]:
        """`module:Class` of each environment by its name, which is empty for a single one without a name."""
        named: dict[str, str] = {}
        for text in self.environment:
            name, _, label = text.rpartition("=")
            if name in named or (not name and len(self.environment) > 1):
                raise ValueError(
                    f"environment: each of several has a name of its own, as in chess={label}; got {self.environment}"
                )
            named[name] = label
        return named


class RunConfig(CommonConfig):
    """Settings that the trainer and its rollout workers share."""

    run_dir: Annotated[Path, Resume.NOT_COMPARED, InHelp("train rollout doctor replay")] = Path("runs/default")
    """Directory for everything that the run writes: metrics, checkpoints, published weights, the trained model."""
    run: Annotated[str, Resume.FIXED, InHelp("rollout")] = ""
    """Name of the run on the reference server. Default: the name of run_dir."""
    server: Annotated[str, Travel.PRIVATE, InHelp("train rollout doctor")] = INLINE
    """URL of the reference server. inline: the trainer starts one on this machine, with a queue in run_dir, and stops
    it at the end."""
    weights: Annotated[WeightsPlace, InHelp("rollout")] = "directory"
    """Where workers get the published weights. directory: RUN_DIR/weights, which they share with the trainer. server:
    the reference server, for workers elsewhere."""
    token_file: Annotated[Path | None, Travel.PRIVATE, InHelp("doctor")] = None
    """File whose first token is sent to the server. Lines are TOKEN or ROLE TOKEN; `#` begins a comment."""
    token: Annotated[CliSuppress[SecretStr | None], Travel.PRIVATE, Resume.NOT_COMPARED] = Field(
        default=None, exclude=True
    )
    """The token itself, from the environment only. It is never written to a file."""
    tls_ca: Annotated[Path | None, Travel.PRIVATE] = None
    """PEM file of the private authority that signed the server's certificate. Default: the public authorities."""
    lora: Annotated[LoraConfig, Resume.FIXED] = LoraConfig()

    @field_validator("server")
    @classmethod
    def _check_server(cls, server: str) -> str:
        if server != INLINE and not server.startswith(("http://", "https://")):
            raise ValueError(f"must begin with http:// or https://, or be {INLINE}")
        return server

    @model_validator(mode="after")
    def _check_places(self) -> "RunConfig":
        if self.tls_ca is not None and not self.server.startswith("https://"):
            raise ValueError(f"tls_ca: needs a server at https://, got {self.server}")
        traits = self.sampler_traits
        if self.lora.load_in_4bit and not traits.takes_4bit:
            raise ValueError(
                f"lora.load_in_4bit: {traits.engine} would sample with the weights before they were quantised, so its "
                f"log-probs would not be the trainer's: use {spell_setting('sampler')} {samplers_with('takes_4bit')}, "
                "or leave it out"
            )
        if self.vllm.enable_sleep_mode and not traits.can_sleep:
            raise ValueError(
                f"vllm.enable_sleep_mode: sampler {self.sampler} has no engine that sleeps: leave it out, or use "
                f"{spell_setting('sampler')} {samplers_with('can_sleep')}"
            )
        if self.vllm.enable_sleep_mode and self.weights == "server":
            raise ValueError(
                "vllm.enable_sleep_mode: workers elsewhere do not share the trainer's GPU: leave it out, or use "
                f"{spell_setting('weights', 'directory')} with workers on the trainer's machine"
            )
        return self

    @model_validator(mode="after")
    def _name_the_run(self) -> "RunConfig":
        if not self.run:
            self.run = self.run_dir.resolve().name
        if self.weights == "server" and not re.fullmatch(PLAIN_NAME, self.run, re.ASCII):
            raise ValueError(
                "run: it names the weights on the server, so it has only letters, digits and '.', '_', '-', and does "
                f"not begin with a dot: choose another {spell_setting('run')}; got {self.run!r}"
            )
        return self


class RolloutLossConfig(Section):
    """What a worker has to know of the loss. The rest of the table is the trainer's."""

    model_config = ConfigDict(extra="ignore")

    advantage: Annotated[str, Travel.NAME] = "outcome"
    """The trainer's: it says which rewards must differ within a group, for sampling.max_resamples."""


class RolloutConfig(RunConfig):
    """Sample completions with the run's published weights, judge them, and upload them to the reference server."""

    worker: Annotated[int, InHelp()] = Field(default=0, ge=0)
    """Number of this worker, from 0. Worker k of n takes the problems whose index is k modulo n."""
    workers: Annotated[int, InHelp()] = Field(default=1, ge=1)
    """Number of workers in all. Default: one for each of `devices`, else 1."""
    devices: Annotated[CliVariadicArg[list[str]], InHelp()] = []
    """Instead of device: start one worker on each of these devices, such as cuda:0 cuda:1. The first has the number
    `worker`."""
    loss: RolloutLossConfig = RolloutLossConfig()
    trust_settings: Annotated[bool, InHelp()] = False
    """Without config: accept all published settings, including those that name code, files or hosts. Everyone who
    may publish weights of the run can then execute code on this machine. Default: such settings are refused; the error
    names the options to give instead."""

    @model_validator(mode="after")
    def _check_worker(self) -> "RolloutConfig":
        if "workers" not in self.model_fields_set:
            self.workers = max(1, len(self.devices))
        last = self.worker + max(1, len(self.devices)) - 1
        if last >= self.workers:
            raise ValueError(f"worker: must be below workers ({self.workers}), got {last}")
        return self

    @model_validator(mode="after")
    def _take_a_single_device(self) -> "RolloutConfig":
        if len(self.devices) == 1:
            self.device = self.devices[0]
        return self


class ExportConfig(BaseSettings):
    """Make a Hugging Face model directory of a checkpoint of LoRA's adapters, or of one that torchrun's ranks wrote."""

    model_config = settings_config(ENV_PREFIX)

    config: Path | None = None
    """TOML file with any of these settings."""
    checkpoint: Path
    """Directory of the checkpoint, such as RUN_DIR/checkpoints/step-00000100."""
    output: Path
    """Directory to write, which must not exist yet."""
    model: str | None = None
    """Directory or Hub id of the model that the adapters were trained on. Default: the one that their files name."""


def _not_a_runs(samples: Any) -> Any:
    """0 for the table [samples] of a run's config.toml: it says what the run keeps."""
    return 0 if isinstance(samples, dict) else samples


class EvalConfig(CommonConfig):
    """Measure a model's accuracy on held-out problems. The table goes to standard error, JSON to standard output."""

    evaluation: EvalEvaluationConfig = EvalEvaluationConfig()
    samples: Annotated[int, Field(ge=0), BeforeValidator(_not_a_runs), InHelp()] = 0
    """Print this many problems with their answers and rewards too, 5 if no number is given."""


class DemoChoices(BaseSettings):
    """Settings that both demo commands share."""

    model_config = settings_config(ENV_PREFIX)

    config: Path | None = None
    """TOML file with any of these settings."""
    seed: int = Field(default=0, ge=0)
    """Random seed for the base model, the problems and the sampling."""
    run_dir: Path = Path("runs/demo")
    """Directory for everything that the demo writes."""
    max_steps: int = Field(default=60, ge=1)
    """Total training steps."""
    vision: bool = False
    """Draw the sums into pictures, which a tiny Qwen2-VL reads. Needs Pillow: pip install 'tandem-grpo[vision]'."""
    tools: bool = False
    """Products instead of sums, and a tool that multiplies, which the model learns to call."""

    @model_validator(mode="after")
    def _check_kind(self) -> "DemoChoices":
        if self.vision and self.tools:
            raise ValueError("tools: give `--vision` or `--tools`, not both")
        return self


class DemoConfig(DemoChoices):
    """Train a tiny model to do arithmetic: everything on this machine, in about a minute, or three with --vision or
    --tools."""

    resume: bool = False
    """Continue an interrupted demo from its newest checkpoint."""


class DemoSetupConfig(DemoChoices):
    """Write the demo's base model and config.toml into run_dir without starting any process (Compose starts them)."""

    server: str = "http://127.0.0.1:8400"
    """URL of the reference server that will serve the base model."""
