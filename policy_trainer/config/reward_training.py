"""Settings of training a reward model."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from policy_trainer.config.sections import Section
from policy_trainer.config.supervised import SupervisedConfig, SupervisedOptimizerConfig


class PairsConfig(Section):
    """Where pairs come from. The names are those of DataConfig."""

    path: Path | None = None
    """File of pairs, {"prompt", "chosen", "rejected"}: parquet if it ends in .parquet, else JSONL. It takes precedence
    over `dataset`."""
    eval_path: Path | None = None
    """File of held-out pairs. Default: every tenth pair of `path` is held out."""
    dataset: str | None = None
    """Name of a Hugging Face dataset of pairs, or a directory that holds one."""
    subset: str | None = None
    """Configuration of the dataset, if it has several."""
    split: str = "train"
    """Split of the dataset to train on."""
    eval_split: str | None = None
    """Split of the dataset to hold out. Default: every tenth pair of `split` is held out."""
    too_long: Literal["truncate", "drop", "refuse"] = "truncate"
    """What happens to a pair with a text over max_length. truncate: the text's last max_length tokens count, as when it
    is scored. drop: the pair is skipped and counted. refuse: nothing is trained."""


class RewardOptimizerConfig(SupervisedOptimizerConfig):
    """AdamW, with a learning rate for reward models."""

    learning_rate: float = Field(default=1e-5, gt=0)
    """Peak learning rate."""


class RewardTrainingConfig(SupervisedConfig):
    """Train a reward model on pairs of a better and a worse answer (Bradley-Terry)."""

    model: str = Field(min_length=1)
    """Directory or Hub id of a causal LM, which gets a new head, or of a sequence classifier."""
    run_dir: Path = Path("runs/reward-model")
    """Directory for everything that the run writes: metrics, checkpoints, the trained model."""
    data: PairsConfig = PairsConfig()
    max_length: int = Field(default=2048, ge=1)
    """Maximum tokens of a text, prompt and completion together. Give judging.model.max_length the same."""
    center_rewards_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the squared sum of a pair's scores in the loss, which keeps the mean score near 0."""
    optimizer: RewardOptimizerConfig = RewardOptimizerConfig()  # pyright: ignore[reportIncompatibleVariableOverride]

    @model_validator(mode="after")
    def _check_source(self) -> "RewardTrainingConfig":
        if self.data.path is None and self.data.dataset is None:
            raise ValueError("data.path: a reward model needs pairs: give --data.path FILE, or --data.dataset NAME")
        return self
