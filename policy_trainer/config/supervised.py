"""Settings that sft and reward-model share: both train on the rows of a file."""

from pathlib import Path

from pydantic import Field

from policy_trainer.config.commands import ModelConfig, TrainingDtype
from policy_trainer.config.sections import CheckpointConfig, OptimizerConfig


class SupervisedOptimizerConfig(OptimizerConfig):
    """AdamW, with a higher learning rate than reinforcement learning tolerates."""

    learning_rate: float = Field(default=2e-5, gt=0)
    """Peak learning rate."""
    min_lr_rate: float = Field(default=0.1, ge=0, le=1)
    """Learning rate of the last step as a fraction of the peak; 1 keeps it constant."""


class SupervisedConfig(ModelConfig):
    """How a model is trained on rows. A step takes batch_size of them."""

    dtype: TrainingDtype = "float32"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Precision of the weights."""
    seed: int = Field(default=0, ge=0)
    """Random seed for the order of the rows, and for a new head."""
    run_dir: Path
    """Directory for everything that the run writes: metrics, checkpoints, the trained model."""
    resume: bool = False
    """Continue from the newest checkpoint in run_dir."""
    num_train_epochs: int = Field(default=1, ge=1)
    """Passes over the rows."""
    batch_size: int = Field(default=32, ge=1)
    """Rows in one training step: demonstrations, or pairs."""
    micro_batch_tokens: int = Field(default=16_384, ge=1)
    """Maximum tokens of one forward and backward, unless a single row has more."""
    gradient_checkpointing: bool = False
    """Keep only the inputs of layers and recompute the rest in the backward: less memory, more time."""
    eval_steps: int = Field(default=50, ge=0)
    """Steps between measurements on held-out rows; 0 measures only before the first step and after the last."""
    optimizer: SupervisedOptimizerConfig = SupervisedOptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
