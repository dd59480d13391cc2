"""The policy trainer: rollout workers, group advantages, the KL-penalised loss, and the training loop.

`from policy_trainer import GRPO` is for scripts and notebooks: docs/python.md.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from policy_trainer.python_api import GRPO, GRPOResult, RunFailed, StopTraining, UserError

# A script's own file or folder of this name comes before ours, whose errors would then say nothing about it.
_shared = find_spec("shared")
if _shared is not None and _shared.origin != str(Path(__file__).parents[1] / "shared" / "__init__.py"):
    raise ImportError(f"Tandem's package `shared` is hidden by {_shared.origin}: give that another name")

__all__ = ["GRPO", "GRPOResult", "RunFailed", "StopTraining", "UserError"]


def __getattr__(name: str) -> Any:
    """Imports the Python API on first use: the sandbox imports this package, which must stay cheap."""
    if name in __all__:
        return getattr(import_module("policy_trainer.python_api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
