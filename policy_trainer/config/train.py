"""Settings of the trainer, and cautions about those that do not go together."""

import re
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_settings import CliVariadicArg

from policy_trainer.config.commands import INLINE, RunConfig, TrainingDtype
from policy_trainer.config.functions import is_function
from policy_trainer.config.loss import LossConfig
from policy_trainer.config.marks import Resume, Travel
from policy_trainer.config.samplers import samplers_with
from policy_trainer.config.sections import (
    CheckpointConfig,
    EvaluationConfig,
    LoraConfig,
    OptimizerConfig,
    ReferenceConfig,
    SamplesConfig,
)
from shared.settings import InHelp
from shared.spelling import spell_setting

# Settings that make some samplers renormalise the log-probs that they report, and the values that turn them off.
_RENORMALISING: Mapping[str, Any] = {"top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}


class TrainConfig(RunConfig):
    """Train a policy with GRPO on the scored batches of a reference server."""

    dtype: Annotated[TrainingDtype, Travel.PUBLISHED, InHelp("doctor replay")] = "float32"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Precision of the weights."""

    teacher: Annotated[str | None, Resume.FIXED] = Field(default=None, min_length=1)
    """Directory or Hub id of the model to learn from (loss.advantage = distill, or loss.distillation_coef), for the
    server that the trainer starts. A server of your own already has its teacher, so this may be left out; if given,
    it must name that teacher, or the run stops."""
    rollout: Literal["inline", "external"] = "inline"
    """inline: the trainer starts one rollout worker as a child process. external: `policy-trainer rollout` samples."""
    resume: Annotated[bool, Travel.PRIVATE, Resume.NOT_KEPT, InHelp("train")] = False
    """Continue from the newest checkpoint in run_dir."""
    max_steps: Annotated[int, InHelp("train replay")] = Field(default=100, ge=0)
    """Total training steps of the run. 0: as many as num_train_epochs make."""
    num_train_epochs: Annotated[float | None, InHelp("train")] = Field(default=None, gt=0)
    """Passes over the training problems. If max_steps is given too, it takes precedence."""
    groups_per_step: Annotated[int, InHelp("replay")] = Field(default=8, ge=1)
    """Groups in one training step: one group is one prompt with its completions."""
    num_iterations: Annotated[int, InHelp("replay")] = Field(default=1, ge=1)
    """Passes over the groups of each step (mu in the GRPO paper)."""
    minibatches: Annotated[int, InHelp("replay")] = Field(default=1, ge=1)
    """Parts that the groups of a step are split into. Each part of each pass is one optimizer update. More
    parts than groups_per_step must be a multiple of it, and split each group."""
    max_updates: int | None = Field(default=None, ge=1)
    """Most optimizer updates of the whole run, which ends there, within a step if need be. Default: all updates of
    max_steps."""
    micro_batch_tokens: int = Field(default=16_384, ge=1)
    """Maximum tokens of one forward and backward, unless a single group has more."""
    gradient_checkpointing: bool = False
    """Keep only the inputs of layers and recompute the rest in the backward: less memory, more time."""
    freeze_vision_tower: bool | None = None
    """For a model that takes images: train the language model only. Default: true with lora.rank, which then adapts
    the language model only, as vLLM requires; else false."""
    rank_timeout_seconds: float = Field(default=1800, gt=0)
    """Under torchrun: how long a rank waits for another one in a computation before the job ends."""
    publish_every: int = Field(default=1, ge=1)
    """Steps between publications of the weights to the workers."""
    max_waiting: int | None = Field(default=None, ge=1)
    """Maximum groups that wait in the server; at this number workers pause. Default: three steps' worth, or what
    max_lag allows if that is less."""
    max_lag: int | None = Field(default=None, ge=0)
    """Maximum age, in steps, of the weights that sampled a batch; older batches expire untrained. 0: each step trains
    on groups that its own weights sampled, so that the same seed gives the same weights again. Default: no limit."""
    order: Literal["fifo", "freshest"] = "fifo"
    """Which batches are trained first. fifo: the oldest. freshest: those of the newest weights; use max_lag to let the
    others expire."""
    lease_seconds: float = Field(default=120, gt=1)
    """Seconds that a batch stays leased without a renewal by this trainer; then the server may lease it again."""
    expect_reference: Literal["same", "different"] = "same"
    """same: before the first update the run stops if the KL shows that the server's reference is not the model that
    the policy begins as. different: it is another model on purpose."""
    max_unrewarded_steps: int = Field(default=50, ge=0)
    """Stop after this many steps in a row in which all completions got the same reward, 0 or less. 0: go on. In
    50 steps of 8 prompts with 8 completions, a model that solves one in a thousand is rewarded three times."""
    max_bad_steps: int = Field(default=3, ge=1)
    """Stop after this many steps in a row whose loss or gradient is not finite."""
    report_to: CliVariadicArg[list[Literal["mlflow", "tensorboard", "trackio", "wandb"]]] = Field(default=[])
    """Trackers that receive the metrics and samples, besides metrics.jsonl and samples.jsonl."""
    record: Path | None = None
    """Directory that keeps the batches of each step, for `policy-trainer replay`. Default: none are kept."""
    show_samples: bool = False
    """Print the best and the worst completion of one prompt whenever samples are kept."""
    samples: SamplesConfig = SamplesConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    reference: ReferenceConfig = ReferenceConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @model_validator(mode="after")
    def _choose_steps_or_epochs(self) -> "TrainConfig":
        if self.num_train_epochs is not None and "max_steps" not in self.model_fields_set:
            self.max_steps = 0
        if not self.max_steps and self.num_train_epochs is None:
            raise ValueError("max_steps: must be at least 1, unless num_train_epochs is given; got 0")
        return self

    @model_validator(mode="after")
    def _choose_reference(self) -> "TrainConfig":
        if self.lora.load_in_4bit and "source" not in self.reference.model_fields_set:
            self.reference = self.reference.model_copy(update={"source": "adapter-off"})
        return self

    @model_validator(mode="after")
    def _check_training(self) -> "TrainConfig":
        checks = (_single_completion_errors, _teacher_errors, _sampler_errors, _reference_errors, _lag_errors)
        if message := next(chain.from_iterable(check(self) for check in checks), None):
            raise ValueError(message)
        if self.loss.advantage == "process" and not (self.judging.steps or self.environment):
            raise ValueError(
                "loss.advantage: process supervision needs the rewards of steps: set judging.steps, or give an "
                "environment that rewards turns"
            )
        if self.loss.advantage == "gdpo" and self.reward_weights and not any(self.reward_weights):
            raise ValueError("reward_weights: gdpo takes rewards with a weight other than 0, and there is none")
        if self.minibatches > self.groups_per_step and self.minibatches % self.groups_per_step:
            raise ValueError(
                f"minibatches: a step has {self.groups_per_step} groups, too few for {self.minibatches} parts: "
                "lower minibatches, raise groups_per_step, or make minibatches a multiple of it"
            )
        if self.minibatches > self.groups_per_step * self.sampling.num_generations:
            raise ValueError(f"minibatches: a step has fewer completions than {self.minibatches}: lower minibatches")
        return self

    @property
    def updates_per_step(self) -> int:
        return self.num_iterations * self.minibatches

    @property
    def freezes_vision_tower(self) -> bool:
        return self.lora.rank > 0 if self.freeze_vision_tower is None else self.freeze_vision_tower

    @property
    def penalised_by_server(self) -> bool:
        """Whether the KL penalty needs the log-probs of a server's model."""
        return self.loss.beta > 0 and self.reference.source == "server"

    @property
    def teaches_itself(self) -> bool:
        """Whether the teacher is the initial policy, which reads more than the policy does (SDFT), unless a server of
        yours has another."""
        return self.loss.distillation > 0 and self.teacher is None and self.data.teacher_prompt_template is not None

    @property
    def serves_first_policy(self) -> bool:
        """Whether the model of the trainer's own server is the initial policy."""
        return self.penalised_by_server or self.teaches_itself

    @property
    def scored_by_server(self) -> bool:
        """Whether a server's model has to score batches: as the reference of the KL penalty, or as the teacher."""
        return self.penalised_by_server or self.loss.distillation > 0


class DoctorConfig(TrainConfig):
    """Check everything that a run with these settings needs: settings, versions, devices, memory, model, task,
    rewards, server, and one full step of one group, also under torchrun. Keeps nothing. Exit status 1: there are
    problems. --json prints the findings as JSON."""

    plan: Annotated[bool, Resume.NOT_KEPT, InHelp()] = False
    """Only print what each process of the run would need in memory and what limits its speed. Nothing is loaded. Exit
    status 1: something does not fit."""
    gpu_memory_gib: Annotated[float | None, Resume.NOT_KEPT, InHelp()] = Field(default=None, gt=0)
    """With --plan: for GPUs with this much memory, in GiB. Default: the devices of this machine."""
    ranks: Annotated[int, Resume.NOT_KEPT, InHelp()] = Field(default=1, ge=1)
    """With --plan: number of GPUs that torchrun shards the policy over. 1: without torchrun."""

    @model_validator(mode="after")
    def _check_plan(self) -> "DoctorConfig":
        if not self.plan and (self.gpu_memory_gib is not None or self.ranks > 1):
            name = "ranks" if self.gpu_memory_gib is None else "gpu_memory_gib"
            raise ValueError(f"{name}: it is for the memory plan of other machines: add `--plan`, or leave it out")
        return self


class ReplayConfig(TrainConfig):
    """Train on recorded batches, without a server and without sampling, by the settings of `train`."""

    batches: Annotated[Path, Resume.NOT_KEPT, InHelp()]
    """What to train on: a directory of `train --record`, or one with batches as safetensors files."""


def _single_completion_errors(config: TrainConfig) -> Iterator[str]:
    """Groups of one completion train only by step rewards, reinforce++, or a teacher."""
    loss = config.loss
    if config.sampling.num_generations > 1 or loss.advantage == "process" or loss.distillation:
        return
    where = "sampling.num_generations: a group of 1 has"
    if loss.advantage != "reinforce++" and not is_function(loss.advantage):
        yield (
            f"{where} nothing that loss.advantage = {loss.advantage} could compare: use a larger group, or reinforce++"
        )
    if loss.drop_zero_variance:
        yield f"{where} no variance and would be dropped: use more, or loss.drop_zero_variance = false"
    if config.sampling.max_resamples:
        yield f"{where} no variance and would be sampled again: use more, or sampling.max_resamples = 0"


def _lag_errors(config: TrainConfig) -> Iterator[str]:
    """What max_lag = 0 leaves no room for: a step's groups are sampled with its own weights, and no others are."""
    if config.max_lag != 0:
        return
    if config.publish_every > 1:
        yield "publish_every: max_lag = 0 needs new weights after every step: set 1, or raise max_lag"
    if config.sampling.regroup:
        yield "sampling.regroup: it mixes completions of several steps: set 0, or raise max_lag, which is 0"
    if config.max_waiting is not None:
        yield "max_waiting: workers sample only the groups of a step with max_lag = 0: leave it out, or raise max_lag"


def _teacher_errors(config: TrainConfig) -> Iterator[str]:
    """What does not go together with a teacher, or without one."""
    teacher, template = config.teacher, config.data.teacher_prompt_template
    if not config.loss.distillation:
        if template is not None:
            yield (
                "data.teacher_prompt_template: no teacher would read it: set "
                f"{spell_setting('loss.advantage', 'distill')}, or leave it out"
            )
        if teacher:
            yield (
                f"teacher: nothing would use it: set {spell_setting('loss.advantage', 'distill')}, or "
                f"{spell_setting('loss.distillation_coef')} with rewards"
            )
        return
    if config.sampling.max_resamples:
        yield "sampling.max_resamples: the teacher teaches on groups of equal rewards, too, so none is replaced: set 0"
    if template is not None and config.environment:
        yield (
            "data.teacher_prompt_template: an environment makes its own prompts, which have no row to take a context "
            "from: leave out the template or the environment"
        )
    if config.server == INLINE and teacher is None and template is None:
        yield (
            f"teacher: distillation needs a model to learn from: give {spell_setting('teacher')} PATH_OR_HUB_ID, or "
            f"{spell_setting('data.teacher_prompt_template')} for the policy as its own teacher"
        )


def _sampler_errors(config: TrainConfig) -> Iterator[str]:
    """Adapters that the sampler does not take, and renormalised log-probs, which cannot be the ratio's denominator."""
    traits = config.sampler_traits
    if config.lora.rank and not config.freezes_vision_tower and not traits.adapts_vision_tower:
        yield (
            f"freeze_vision_tower: {traits.engine} takes adapters of the language model only: leave it out, or use "
            f"{spell_setting('sampler')} {samplers_with('adapts_vision_tower')}"
        )
    changed = [name for name, off in _RENORMALISING.items() if getattr(config.sampling, name) != off]
    if changed and not traits.sampling_masks and config.loss.old_logps in ("sampler", "log_linear"):
        yield (
            f"sampling.{changed[0]}: {traits.engine} reports log-probs of what it drew from, and the learner's are of "
            f"all tokens, so the ratio of loss.old_logps = {config.loss.old_logps} would be wrong: set it to "
            f"{_RENORMALISING[changed[0]]}, or use loss.old_logps = recomputed, with "
            "loss.importance_sampling_correction = tis or mask"
        )


def _reference_errors(config: TrainConfig) -> Iterator[str]:
    reference = config.reference
    if reference.source == "adapter-off" and not config.lora.rank:
        yield (
            "reference.source: adapter-off is the policy without its adapters, and there are none: set "
            f"{spell_setting('lora.rank', 16)}, or leave {spell_setting('reference.source')} at server"
        )
    if reference.source == "server" and config.lora.load_in_4bit:
        yield (
            "reference.source: with lora.load_in_4bit the policy begins as the quantised model, and a server has the "
            f"model before it was quantised: set {spell_setting('reference.source', 'adapter-off')}, the policy "
            "without its adapters"
        )
    if not reference.sync_steps:
        return
    if config.lora.rank:
        yield (
            "reference.sync_steps: with LoRA the reference stays the model that the adapters belong to: set "
            f"{spell_setting('reference.sync_steps', 0)}"
        )
    if not config.loss.beta and not config.teaches_itself:
        yield (
            "reference.sync_steps: with loss.beta = 0 no reference is used: set "
            f"{spell_setting('reference.sync_steps', 0)}"
        )
    if reference.snapshot_root is None and config.server != INLINE and config.weights == "directory":
        yield (
            "reference.snapshot_root: must be the directory of ref-server's `--snapshot-root`; without one, set "
            f"{spell_setting('weights', 'server')}, or {spell_setting('reference.sync_steps', 0)}, which never "
            "updates the reference"
        )
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}", config.run, re.ASCII):
        yield (
            "run: it names the snapshots of the reference, so it may have at most 100 letters, digits, '.', '_', "
            f"'-', and must not begin with a dot: choose another {spell_setting('run')}; got {config.run!r}"
        )


# Steps whose groups may be sampled at once: more make the staleness of the last ones worth a word.
_STEPS_AHEAD = 2


def cautions(config: TrainConfig) -> list[str]:
    """One warning for each questionable combination of settings; each names its fields."""
    loss, sampling = config.loss, config.sampling
    warnings = []
    if loss.penalises_loss and loss.kl == "k1" and loss.kl_weight == "one":
        warnings.append(
            "loss.kl = k1 in the loss has an expected gradient of 0 on-policy, so it bounds nothing. Use k3 or k2, "
            "loss.kl_weight = ratio, or loss.kl_in = reward"
        )
    if loss.kl_in == "both":
        warnings.append("loss.kl_in = both applies the KL penalty twice, in the rewards and in the loss")
    if loss.weighs_completions and loss.importance_sampling_level != "token":
        warnings.append(
            f"loss.importance_sampling_level: {loss.surrogate} weighs whole completions in a way of its own; this is "
            "only the ratio of the metrics and of loss.kl_weight"
        )
    if loss.aggregation == "luspo" and loss.importance_sampling_level == "token":
        warnings.append(
            "loss.aggregation = luspo sums over tokens, and is published with one ratio for a completion: set "
            "loss.importance_sampling_level = sequence"
        )
    if sampling.leaves_tokens_out and not config.sampler_traits.sampling_masks:
        warnings.append(
            f"sampling.top_p, top_k or min_p: {config.sampler_traits.engine} does not say which tokens they kept, so "
            "the learner's log-probs are of all tokens, and the ratio and the KL are biased; top_p = 1, top_k = 0 and "
            f"min_p = 0 turn them off, or use {spell_setting('sampler')} {samplers_with('sampling_masks')}"
        )
    if loss.echo_coef and not (config.tools or config.environment) and config.rollout == INLINE:
        warnings.append("loss.echo_coef: without tools or an environment nothing is answered, so it has no effect")
    if sampling.repetition_penalty != 1:
        warnings.append(
            "sampling.repetition_penalty: completions are drawn from penalised probabilities, and the learner computes "
            "the others, so the ratio and the KL are biased; repetition_penalty = 1 turns it off"
        )
    if (steps := sampling.prompts_per_round / config.groups_per_step) > _STEPS_AHEAD:
        warnings.append(
            f"sampling.prompts_per_round: a round has the groups of {steps:g} steps, so the last of them are that many "
            f"steps old when they are trained; {config.groups_per_step} keeps them fresh"
        )
    if config.reference.decay and not config.reference.sync_steps:
        warnings.append("reference.decay does nothing while reference.sync_steps is 0: the reference never changes")
    if not config.lora.rank and config.lora != LoraConfig():
        warnings.append("lora.alpha and lora.target_modules do nothing while lora.rank is 0: all weights are trained")
    if config.judging.model.path and "model" not in config.rewards:
        warnings.append(
            f"judging.model.path: this reward model is not used, because {spell_setting('rewards')} does not name "
            "`model`"
        )
    if config.judging.steps and loss.advantage != "process":
        warnings.append(
            f"judging.steps: loss.advantage = {loss.advantage} does not use the rewards of steps: use process"
        )
    return [*warnings, *_answer_cautions(config)]


def _answer_cautions(config: TrainConfig) -> Iterator[str]:
    data, tagged = config.data, {"format", "tags"}.intersection(config.rewards)
    if data.answer_in != "tags" and tagged:
        yield (
            f"data.answer_in = {data.answer_in}: the rewards {', '.join(sorted(tagged))} look for <answer> tags, for "
            f"which no prompt asks unless {spell_setting('data.system_prompt')} does"
        )
    if data.answer_in == "last_number" and data.answer_rule == "exact":
        yield (
            "data.answer_in = last_number: numbers are compared as text, so 1,000 and 72.0 are not 1000 and 72; "
            f"{spell_setting('data.answer_rule')} number compares their values"
        )
