"""`GRPOConfig` and `GRPOTrainer` with TRL's interface, on top of `GRPO`: a TRL script has to change only its import.

Other names imported from here, such as `TrlParser`, come from the installed TRL.
"""

from importlib.util import find_spec
from typing import Any

from policy_trainer.trl.config import GRPOConfig
from policy_trainer.trl.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer"]


def __getattr__(name: str) -> Any:
    if name.startswith("_") or not find_spec("trl"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import trl

    return getattr(trl, name)
