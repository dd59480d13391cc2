"""`GRPOConfig` and `GRPOTrainer` with TRL's interface, on top of `GRPO`: a script for TRL changes only its import.

Other names imported from here, such as `TrlParser`, come from the installed TRL.
"""

from contextlib import suppress
from typing import Any

from policy_trainer.trl.config import GRPOConfig
from policy_trainer.trl.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer"]


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):
        with suppress(ImportError):
            import trl

            return getattr(trl, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}: TRL is not installed")
