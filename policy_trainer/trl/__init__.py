"""TRL's `GRPOConfig` and `GRPOTrainer`, which run on `GRPO`: a script changes one line, the import.

Other names that such a line imports, such as `TrlParser`, are those of the installed TRL.
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
