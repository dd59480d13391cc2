"""Settings of supervised fine-tuning."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from policy_trainer.config.commands import ModelConfig, TrainingDtype
from policy_trainer.config.data import PromptConfig
from policy_trainer.config.sections import CheckpointConfig, OptimizerConfig


class SftDataConfig(PromptConfig):
    """Where demonstrations come from. The names are those of DataConfig, since one file serves every command."""

    path: Path
    """JSONL file of {"prompt", "completion"}, {"messages", "completion"}, or {"messages"} that end with the answer."""
    eval_path: Path | None = None
    """File of held-out demonstrations. Default: every tenth line of `path` is held out."""
    too_long: Literal["drop", "refuse"] = "drop"
    """What happens to a demonstration over max_length. drop: it is skipped and counted. refuse: nothing is trained."""


class SftOptimizerConfig(OptimizerConfig):
    """AdamW, with a higher learning rate than reinforcement learning tolerates."""

    learning_rate: float = Field(default=2e-5, gt=0)
    """Peak learning rate."""
    min_lr_rate: float = Field(default=0.1, ge=0, le=1)
    """Learning rate of the last step as a fraction of the peak; 1 keeps it constant."""


class SftConfig(ModelConfig):
    """Fine-tune a model on the completions of a file (supervised fine-tuning)."""

    dtype: TrainingDtype = "float32"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Precision of the weights."""
    seed: int = Field(default=0, ge=0)
    """Random seed for the order of the demonstrations."""
    run_dir: Path = Path("runs/sft")
    """Directory for everything that the run writes: metrics, checkpoints, the trained model."""
    resume: bool = False
    """Continue from the newest checkpoint in run_dir."""
    data: SftDataConfig
    num_train_epochs: int = Field(default=1, ge=1)
    """Passes over the demonstrations."""
    batch_size: int = Field(default=32, ge=1)
    """Demonstrations in one training step."""
    max_length: int | None = Field(default=None, ge=2)
    """Maximum tokens of prompt and completion together. Default: the model's context length."""
    micro_batch_tokens: int = Field(default=16_384, ge=1)
    """Maximum tokens of one forward and backward, unless a single demonstration has more."""
    gradient_checkpointing: bool = False
    """Keep only the inputs of layers and recompute the rest in the backward: less memory, more time."""
    eval_steps: int = Field(default=50, ge=0)
    """Steps between measurements of the held-out loss; 0 measures only before the first step and after the last."""
    optimizer: SftOptimizerConfig = SftOptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
