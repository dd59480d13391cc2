"""TRL's `GRPOConfig` and `GRPOTrainer`, which run on `GRPO`: a script changes one line, the import."""

from policy_trainer.trl.config import GRPOConfig
from policy_trainer.trl.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer"]
