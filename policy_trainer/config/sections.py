"""How a run trains, beside its loss: optimizer, checkpoints, evaluation, the reference's renewal."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False)


class OptimizerConfig(Section):
    """AdamW: a linear warm-up, then a decay over the run."""

    learning_rate: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    lr_scheduler_type: Literal["linear", "cosine"] = "linear"
    """How the learning rate falls to min_lr_rate."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps until the peak."""
    warmup_ratio: float = Field(default=0.0, ge=0, lt=1)
    """The same as a share of all steps; the longer of the two holds."""
    min_lr_rate: float = Field(default=1.0, ge=0, le=1)
    """The learning rate of the last step as a fraction of the peak; 1 keeps it constant."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's betas."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's weight decay."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Gradients are scaled down to this norm; 0 leaves them."""
    master_weights: Literal["float32", "none"] = "float32"
    """What a bfloat16 model's small steps are gathered in; none is pure bfloat16, where they vanish."""

    @model_validator(mode="after")
    def _betas_in_range(self) -> "OptimizerConfig":
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must lie in [0, 1), got {self.betas}")
        return self


class ReferenceConfig(Section):
    """Iterative GRPO: the reference is renewed while the run goes on."""

    sync_steps: int = Field(default=0, ge=0)
    """Steps between renewals of the server's reference model; 0 keeps it as it began."""
    decay: float = Field(default=0.0, ge=0, lt=1)
    """The new reference is decay * reference + (1 - decay) * policy: 0 copies the policy, else a moving average."""
    snapshot_root: Path | None = None
    """The directory that ref-server was given as --snapshot-root, as this process sees it."""


class CheckpointConfig(Section):
    """When the run can be resumed from, and what is kept."""

    save_steps: int = Field(default=50, ge=1)
    """Steps between checkpoints. Trained batches are acknowledged once a checkpoint holds their effect."""
    save_total_limit: int = Field(default=2, ge=1)
    """Newest checkpoints that are kept, beside the best one."""


class EvaluationConfig(Section):
    """Accuracy on held-out problems."""

    eval_steps: int = Field(default=50, ge=0)
    """Steps between evaluations while training; 0 evaluates only before the first step and after the last."""
    problems: int = Field(default=128, ge=1)
    """Held-out problems of one evaluation."""
    batch_size: int = Field(default=64, ge=1)
    """Problems that are answered together."""


class EvalEvaluationConfig(EvaluationConfig):
    """Accuracy on held-out problems, by itself."""

    problems: int = Field(default=512, ge=1)
    """Held-out problems of one evaluation."""
