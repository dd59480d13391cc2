"""The policy trainer: rollout workers, group advantages, the KL-penalised loss, and the training loop.

`from policy_trainer import GRPO` is its door for scripts and notebooks: docs/python.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from policy_trainer.door import GRPO, GRPOResult, RunFailed, UserError

__all__ = ["GRPO", "GRPOResult", "RunFailed", "UserError"]


def __getattr__(name: str) -> Any:
    """Imports the door when it is first used: the sandbox imports this package, which must stay cheap."""
    if name in __all__:
        return getattr(import_module("policy_trainer.door"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
