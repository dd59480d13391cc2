"""The policy trainer: rollout workers, group advantages, the KL-penalised loss, and the training loop.

`from policy_trainer import GRPO` is for scripts and notebooks: docs/python.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from policy_trainer.python_api import GRPO, GRPOResult, RunFailed, StopTraining, UserError

__all__ = ["GRPO", "GRPOResult", "RunFailed", "StopTraining", "UserError"]


def __getattr__(name: str) -> Any:
    """Imports the Python API on first use: the sandbox imports this package, which must stay cheap."""
    if name in __all__:
        return getattr(import_module("policy_trainer.python_api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
