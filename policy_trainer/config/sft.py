"""Settings of supervised fine-tuning."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from policy_trainer.config.data import PromptConfig
from policy_trainer.config.supervised import SupervisedConfig


class SftDataConfig(PromptConfig):
    """Where demonstrations come from. The names are those of DataConfig, since one file serves every command."""

    path: Path
    """JSONL file of {"prompt", "completion"}, {"messages", "completion"}, or {"messages"} that end with the answer."""
    eval_path: Path | None = None
    """File of held-out demonstrations. Default: every tenth line of `path` is held out."""
    too_long: Literal["drop", "refuse"] = "drop"
    """What happens to a demonstration over max_length. drop: it is skipped and counted. refuse: nothing is trained."""


class SftConfig(SupervisedConfig):
    """Fine-tune a model on the completions of a file (supervised fine-tuning)."""

    run_dir: Path = Path("runs/sft")
    """Directory for everything that the run writes: metrics, checkpoints, the trained model."""
    data: SftDataConfig
    max_length: int | None = Field(default=None, ge=2)
    """Maximum tokens of prompt and completion together. Default: the model's context length."""
