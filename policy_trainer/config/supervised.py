"""Settings of sft and reward-model, which both train on the rows of a file."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from policy_trainer.config.commands import ModelConfig, TrainingDtype
from policy_trainer.config.data import PromptConfig
from policy_trainer.config.marks import Resume, Travel
from policy_trainer.config.sections import CheckpointConfig, OptimizerConfig
from shared.settings import InHelp, Section
from shared.spelling import spell_setting


class SupervisedOptimizerConfig(OptimizerConfig):
    """AdamW, with a higher learning rate than reinforcement learning tolerates."""

    learning_rate: Annotated[float, InHelp()] = Field(default=2e-5, gt=0)
    """Peak learning rate."""
    min_lr_rate: float = Field(default=0.1, ge=0, le=1)
    """Learning rate of the last step as a fraction of the peak; 1 keeps it constant."""
    master_weights: Literal["float32", "none"] = "float32"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Keep a float32 copy of a bfloat16 model's weights, which accumulates small updates. none: update the bfloat16
    weights themselves, where small updates are rounded away."""


class SupervisedConfig(ModelConfig):
    """How a model is trained on rows. A step takes batch_size of them."""

    dtype: Annotated[TrainingDtype, InHelp()] = "float32"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Precision of the weights."""
    seed: Annotated[int, Resume.FIXED] = Field(default=0, ge=0)
    """Random seed for the order of the rows, and for a new head."""
    run_dir: Annotated[Path, Resume.NOT_COMPARED, InHelp()]
    """Directory for everything that the run writes: metrics, checkpoints, the trained model."""
    resume: Annotated[bool, Travel.PRIVATE, Resume.NOT_KEPT, InHelp()] = False
    """Continue from the newest checkpoint in run_dir."""
    num_train_epochs: Annotated[int, InHelp()] = Field(default=1, ge=1)
    """Passes over the rows."""
    batch_size: Annotated[int, Resume.FIXED, InHelp()] = Field(default=32, ge=1)
    """Rows in one training step: demonstrations, or pairs."""
    micro_batch_tokens: int = Field(default=16_384, ge=1)
    """Maximum tokens of one forward and backward, unless a single row has more."""
    gradient_checkpointing: bool = False
    """Keep only the inputs of layers and recompute the rest in the backward: less memory, more time."""
    eval_steps: int = Field(default=50, ge=0)
    """Steps between measurements on held-out rows; 0 measures only before the first step and after the last."""
    optimizer: SupervisedOptimizerConfig = SupervisedOptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()


class SftDataConfig(PromptConfig):
    """Where demonstrations come from. The names are those of DataConfig, since one file serves every command."""

    path: Annotated[Path, InHelp()]
    """JSONL file of {"prompt", "completion"}, {"messages", "completion"}, or {"messages"} that end with the answer."""
    eval_path: Annotated[Path | None, InHelp()] = None
    """File of held-out demonstrations. Default: every tenth line of `path` is held out."""
    too_long: Literal["drop", "refuse"] = "drop"
    """What happens to a demonstration over max_length. drop: it is skipped and counted. refuse: nothing is trained."""


class SftConfig(SupervisedConfig):
    """Fine-tune a model on the completions of a file (supervised fine-tuning)."""

    run_dir: Annotated[Path, Resume.NOT_COMPARED, InHelp()] = Path("runs/sft")
    """Directory for everything that the run writes: metrics, checkpoints, the trained model."""
    data: Annotated[SftDataConfig, Resume.FIXED]
    max_length: Annotated[int | None, Resume.FIXED, InHelp()] = Field(default=None, ge=2)
    """Maximum tokens of prompt and completion together. Default: the model's context length."""


class PairsConfig(Section):
    """Where pairs come from. The names are those of DataConfig."""

    path: Annotated[Path | None, InHelp()] = None
    """File of pairs, {"prompt", "chosen", "rejected"}: parquet if it ends in .parquet, else JSONL. It takes precedence
    over `dataset`."""
    eval_path: Annotated[Path | None, InHelp()] = None
    """File of held-out pairs. Default: every tenth pair of `path` is held out."""
    dataset: Annotated[str | None, InHelp()] = None
    """Name of a Hugging Face dataset of pairs, or a directory that holds one."""
    subset: str | None = None
    """Configuration of the dataset, if it has several."""
    split: str = "train"
    """Split of the dataset to train on."""
    eval_split: Annotated[str | None, InHelp()] = None
    """Split of the dataset to hold out. Default: every tenth pair of `split` is held out."""
    too_long: Literal["truncate", "drop", "refuse"] = "truncate"
    """What happens to a pair with a text over max_length. truncate: the text's last max_length tokens count, as when it
    is scored. drop: the pair is skipped and counted. refuse: nothing is trained."""


class RewardOptimizerConfig(SupervisedOptimizerConfig):
    """AdamW, with a learning rate for reward models."""

    learning_rate: Annotated[float, InHelp()] = Field(default=1e-5, gt=0)
    """Peak learning rate."""


class RewardTrainingConfig(SupervisedConfig):
    """Train a reward model on pairs of a better and a worse answer (Bradley-Terry)."""

    model: Annotated[str, Resume.FIXED, InHelp()] = Field(min_length=1)
    """Directory or Hub id of a causal LM, which gets a new head, or of a sequence classifier."""
    run_dir: Annotated[Path, Resume.NOT_COMPARED, InHelp()] = Path("runs/reward-model")
    """Directory for everything that the run writes: metrics, checkpoints, the trained model."""
    data: Annotated[PairsConfig, Resume.FIXED] = PairsConfig()
    max_length: Annotated[int, Resume.FIXED, InHelp()] = Field(default=2048, ge=1)
    """Maximum tokens of a text, prompt and completion together. Give judging.model.max_length the same."""
    center_rewards_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the squared sum of a pair's scores in the loss, which keeps the mean score near 0."""
    optimizer: RewardOptimizerConfig = RewardOptimizerConfig()  # pyright: ignore[reportIncompatibleVariableOverride]

    @model_validator(mode="after")
    def _check_source(self) -> "RewardTrainingConfig":
        if self.data.path is None and self.data.dataset is None:
            raise ValueError(
                f"data.path: a reward model needs pairs: give {spell_setting('data.path')} FILE, or "
                f"{spell_setting('data.dataset')} NAME"
            )
        return self
