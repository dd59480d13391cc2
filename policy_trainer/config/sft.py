"""Settings of supervised fine-tuning."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from policy_trainer.config.commands import ModelConfig
from policy_trainer.config.data import PromptConfig
from policy_trainer.config.sections import CheckpointConfig, OptimizerConfig


class SftDataConfig(PromptConfig):
    """Where demonstrations come from. Its names are those of the data of other commands, which one file describes."""

    path: Path
    """JSONL file of {"prompt", "completion"}, {"messages", "completion"}, or {"messages"} that end with the answer."""
    eval_path: Path | None = None
    """File of held-out demonstrations. Without it every tenth line of `path` is held out."""
    too_long: Literal["drop", "refuse"] = "drop"
    """What happens to a demonstration that is too long: it is dropped and counted, or nothing is trained."""


class SftOptimizerConfig(OptimizerConfig):
    """AdamW, faster than reinforcement learning would bear."""

    learning_rate: float = Field(default=2e-5, gt=0)
    """Peak learning rate."""
    min_lr_rate: float = Field(default=0.1, ge=0, le=1)
    """The learning rate of the last step as a fraction of the peak; 1 keeps it constant."""


class SftConfig(ModelConfig):
    """Train a model to say what the completions of a file say."""

    seed: int = Field(default=0, ge=0)
    """Decides the order of the demonstrations."""
    run_dir: Path = Path("runs/sft")
    """Everything the run leaves: metrics, checkpoints, the trained model."""
    resume: bool = False
    """Continue from the newest checkpoint in run_dir."""
    data: SftDataConfig
    num_train_epochs: int = Field(default=1, ge=1)
    """Times that the demonstrations are gone through."""
    batch_size: int = Field(default=32, ge=1)
    """Demonstrations in one training step."""
    max_length: int | None = Field(default=None, ge=2)
    """Prompts and completions with more tokens together are too long; the model's context when not given."""
    micro_batch_tokens: int = Field(default=16_384, ge=1)
    """Tokens of one forward and backward, at most, unless one demonstration alone has more."""
    gradient_checkpointing: bool = False
    """Keep the inputs of layers alone, and compute the rest again on the way back: less memory, more time."""
    eval_steps: int = Field(default=50, ge=0)
    """Steps between measurements of the held-out loss; 0 measures only before the first step and after the last."""
    optimizer: SftOptimizerConfig = SftOptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
