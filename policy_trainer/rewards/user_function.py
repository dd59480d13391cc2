"""A user's own reward, named as `module:function`."""

from dataclasses import dataclass
from functools import cache

from policy_trainer.data.imports import import_named
from policy_trainer.rewards.signatures import OwnReward, own_reward


@dataclass(frozen=True)
class UserFunction:
    """The name of a function. It can be sent to another process, which imports the function."""

    name: str

    def load(self) -> OwnReward:
        """Imports the function. Raises UserError if that fails."""
        return _load(self.name)


@cache
def _load(name: str) -> OwnReward:
    return own_reward(name, import_named(name, "rewards"))
