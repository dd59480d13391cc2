"""Training from Python, for scripts and notebooks: the command line's settings, data and rewards as Python objects."""

from policy_trainer.door.grpo import GRPO
from policy_trainer.door.result import GRPOResult
from policy_trainer.lifecycle.endings import RunFailed
from shared.errors import UserError

__all__ = ["GRPO", "GRPOResult", "RunFailed", "UserError"]
