"""How a run trains, apart from the loss: optimizer, LoRA, reference, samples, checkpoints, evaluations."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_settings import CliVariadicArg

from policy_trainer.config.marks import Resume, Travel
from shared.settings import InHelp, Section
from shared.spelling import spell_setting

# Where the log-probs of the KL penalty come from.
ReferenceSource = Literal["server", "adapter-off"]


class OptimizerConfig(Section):
    """AdamW with a linear warmup, then a decay over the run."""

    learning_rate: Annotated[float, InHelp("train replay")] = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    lr_scheduler_type: Literal["linear", "cosine", "transformers"] = "linear"
    """Shape of the decay from the peak to min_lr_rate. transformers: a schedule of transformers, which
    lr_scheduler_kwargs names."""
    lr_scheduler_kwargs: dict[str, Any] = Field(default={})
    """With lr_scheduler_type = transformers: the schedule's `name` in transformers' get_scheduler and its arguments,
    such as {"name": "cosine_with_restarts", "num_cycles": 2}. num_warmup_steps sets the warmup in updates."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warmup to the peak."""
    warmup_ratio: float = Field(default=0.0, ge=0, lt=1)
    """Warmup as a share of all steps. The longer of warmup_steps and this applies."""
    min_lr_rate: float = Field(default=1.0, ge=0, le=1)
    """Learning rate of the last step as a fraction of the peak; 1 keeps it constant."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's betas."""
    adam_epsilon: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's weight decay."""
    decay_norms_and_biases: bool = True
    """Weight decay applies to all weights. False: not to biases and normalisation layers, as in transformers'
    Trainer."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Gradients are clipped to this norm; 0 turns clipping off."""
    master_weights: Literal["float32", "saved", "none"] = "float32"
    """Keep a float32 copy of a bfloat16 model's weights, which accumulates small updates. saved: the
    copy starts from the unrounded weights in the model's files, and checkpoints and the trained model hold it, in
    float32. none: update the bfloat16 weights themselves, where small updates are rounded away."""
    offload: Literal["none", "cpu"] = "none"
    """cpu: keep AdamW's moments, gradients and the float32 weights that it steps in main memory, so that the GPU holds
    only the model's weights. A step takes longer."""

    @property
    def has_masters(self) -> bool:
        """Whether a bfloat16 model has master weights."""
        return self.master_weights != "none"

    @model_validator(mode="after")
    def _betas_in_range(self) -> "OptimizerConfig":
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas: must lie in [0, 1), got {self.betas}")
        return self

    @model_validator(mode="after")
    def _names_a_schedule(self) -> "OptimizerConfig":
        if (self.lr_scheduler_type == "transformers") != ("name" in self.lr_scheduler_kwargs):
            raise ValueError(
                "optimizer.lr_scheduler_kwargs: must name a schedule with lr_scheduler_type = transformers, such as "
                '{"name": "cosine_with_restarts"}, and only then'
            )
        return self

    @model_validator(mode="after")
    def _offloads_float32(self) -> "OptimizerConfig":
        if self.offload == "cpu" and self.master_weights == "none":
            raise ValueError(
                "optimizer.offload: cpu steps float32 weights in main memory, master_weights = none bfloat16 weights "
                'on the GPU: leave master_weights at "float32", which takes no memory of the GPU then'
            )
        return self


class ReferenceConfig(Section):
    """The reference model. Iterative GRPO: it is updated from the policy during the run."""

    source: ReferenceSource = "server"
    """server: the reference server's model. adapter-off: the policy's own model without its adapters (LoRA), in the
    trainer, so that no second model is loaded and the server may be one with --no-model; with lora.load_in_4bit that is
    the default."""
    device: str = "auto"
    """Where the reference runs if server is inline. auto: the last GPU that is not the policy's, else where that is."""
    sync_steps: int = Field(default=0, ge=0)
    """Steps between updates of the server's reference model from the policy; 0 never updates it."""
    decay: float = Field(default=0.0, ge=0, lt=1)
    """The new reference is decay * reference + (1 - decay) * policy: 0 copies the policy, else a moving average."""
    snapshot_root: Path | None = None
    """Where snapshots of the reference are written: the directory of ref-server's --snapshot-root, by its path in this
    process. Default: RUN_DIR/snapshots if server is inline, or weights is server, which needs no shared directory."""


class SamplesConfig(Section):
    """What the model writes, for people to read: RUN_DIR/samples.jsonl, and the trackers of report_to."""

    every: int = Field(default=10, ge=0)
    """Steps between samples; the first step and every evaluation give some too. 0 turns all of them off."""
    prompts: int = Field(default=4, ge=1)
    """Prompts of a step or evaluation whose completions are kept, all of each."""


class CheckpointConfig(Section):
    """When checkpoints are written, and how many are kept."""

    save_steps: int = Field(default=50, ge=1)
    """Steps between checkpoints. Trained batches are acknowledged once a checkpoint contains their updates."""
    save_total_limit: int = Field(default=2, ge=1)
    """Number of newest checkpoints that are kept, besides the best one."""


class EvaluationConfig(Section):
    """Accuracy on held-out problems."""

    eval_steps: int = Field(default=50, ge=0)
    """Steps between evaluations while training; 0 evaluates only before the first step and after the last."""
    eval_on_start: bool = True
    """Evaluate before the first step, too."""
    problems: int = Field(default=128, ge=0)
    """Number of held-out problems in one evaluation. 0: there are no evaluations."""
    batch_size: Annotated[int, InHelp("eval")] = Field(default=64, ge=1)
    """Answers that are sampled together."""
    num_generations: int = Field(default=1, ge=1, le=1024)
    """Answers to each problem. 1: greedily; more: sampled at sampling.temperature, for a mean accuracy and pass@n."""


class EvalEvaluationConfig(EvaluationConfig):
    """Accuracy on held-out problems, for command eval."""

    problems: Annotated[int, InHelp("eval")] = Field(default=512, ge=1)
    """Number of held-out problems in one evaluation."""


class LoraConfig(Section):
    """Train adapters on top of the model's frozen weights (LoRA)."""

    rank: Annotated[int, Travel.PUBLISHED] = Field(default=0, ge=0)
    """Rank of the adapters; 0 trains all weights of the model instead."""
    alpha: float = Field(default=32.0, gt=0)
    """What an adapter adds is multiplied by alpha / rank."""
    target_modules: CliVariadicArg[list[str]] = Field(default=["all-linear"], min_length=1)
    """Linear layers that get an adapter, by the ends of their names, such as q_proj v_proj. all-linear: all but the LM
    head."""
    path: Annotated[Path | None, Resume.FREE] = None
    """Adapters to start from, in peft's format, with this rank, alpha and target_modules. Default: new ones."""
    load_in_4bit: Annotated[bool, Travel.PUBLISHED] = False
    """Hold the frozen weights of linear layers in 4 bits (QLoRA), in trainer and workers. The reference is the policy
    without its adapters. Needs bitsandbytes: pip install 'tandem-grpo[qlora]'."""

    @model_validator(mode="after")
    def _trains_adapters(self) -> "LoraConfig":
        if self.load_in_4bit and not self.rank:
            raise ValueError(
                "lora.load_in_4bit: 4-bit weights cannot be trained, only adapters on top of them: set "
                f"{spell_setting('lora.rank', 16)}, or leave it out"
            )
        return self
