"""Training from Python, for scripts and notebooks: the command line's settings, data and rewards as Python objects."""

from policy_trainer.processes.lifecycle.endings import RunFailed, StopTraining
from policy_trainer.python_api.grpo import GRPO, GRPOResult
from shared.errors import UserError

__all__ = ["GRPO", "GRPOResult", "RunFailed", "StopTraining", "UserError"]
