"""Rewards as Python objects: names for the settings, and the functions that must run in this process."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count
from typing import Any

from policy_trainer.rewards.callers import MODULE
from policy_trainer.rewards.signatures import OwnReward, own_reward
from shared.errors import UserError

Function = Callable[..., Any]


@dataclass(frozen=True)
class OwnRewards:
    """names: of all rewards, for `rewards`. here: those that run in this process, by the name after `caller:`."""

    names: list[str]
    here: dict[str, OwnReward]


def own_rewards(rewards: str | Function | Iterable[str | Function]) -> OwnRewards:
    """Raises UserError for what is neither a name nor a function."""
    several = [rewards] if isinstance(rewards, str) or callable(rewards) else list(rewards)
    names, here = [], {}
    for reward in several:
        if isinstance(reward, str):
            names.append(reward)
        elif not callable(reward):
            raise UserError(f"rewards: must be names and functions, got {reward!r}")
        elif name := importable_name(reward):
            names.append(name)
        else:
            own = _unused(_name_of(reward), here)
            names.append(f"{MODULE}:{own}")
            here[own] = own_reward(own, reward)
    return OwnRewards(names, here)


def importable_name(function: Any) -> str | None:
    """`module:name`, if another process finds this very function there; else None.

    It does not find what a notebook, a script or another function has defined, nor lambdas and methods.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not module or not name or module == "__main__" or getattr(sys.modules.get(module), name, None) is not function:
        return None
    return f"{module}:{name}" if _is_file(module) else None


def _is_file(module: str) -> bool:
    """Whether a module is imported from a file, and not made in this process."""
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.has_location


def _name_of(function: Any) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    return name if name.isidentifier() else "function"


def _unused(name: str, taken: Iterable[str]) -> str:
    return next(one for number in count(1) if (one := name if number == 1 else f"{name}_{number}") not in taken)
