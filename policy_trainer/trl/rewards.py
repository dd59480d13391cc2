"""TRL's reward functions and reward models: how a run knows them, and mistakes in their arguments."""

from collections.abc import Mapping
from functools import partial
from inspect import isclass
from itertools import islice
from pathlib import Path
from typing import Any

from policy_trainer.trl.config import GRPOConfig
from policy_trainer.trl.objects import place
from shared.errors import UserError


def check_rewards(args: GRPOConfig, rewards: list[Any], tokenizers: list[Any], environments: Any) -> None:
    """Raises UserError, with TRL's words, for rewards that are missing, for lists of different lengths, and for a class
    that is no environment."""
    several = _factories(environments)
    if any(isclass(each) and not callable(getattr(each, "reset", None)) for each in several):
        raise UserError(
            "environment_factory: Each environment instance returned by `environment_factory` must define a callable "
            "`reset`"
        )
    if not rewards and not any(map(_owns_reward, several)):
        raise UserError(
            "reward_funcs: No reward source provided. Pass functions or a reward model, or an environment_factory "
            "whose environment has a method get_reward"
        )
    if args.reward_weights is not None and len(args.reward_weights) != len(rewards):
        raise UserError(
            f"reward_weights: Number of reward weights ({len(args.reward_weights)}) must match number of reward "
            f"functions ({len(rewards)}); an environment's reward has the weight 1"
        )
    if tokenizers and len(tokenizers) != len(rewards):
        raise UserError(
            f"reward_processing_classes: The number of reward processing classes ({len(tokenizers)}) must match the "
            f"number of reward functions ({len(rewards)}): pass a list with None for functions"
        )


def reward_input(reward: Any, tokenizer: Any, target: Path) -> Any:
    """What the run takes for it: the function, or a name that has the directory of the reward model. A model that other
    processes cannot load is written to `target`."""
    if not isinstance(reward, str) and not hasattr(reward, "config"):
        return reward
    return f"model/{place(reward, tokenizer, target, scores=True)}"


def reward_names(rewards: list[Any], environments: Any) -> list[str]:
    """TRL's names of the rewards. Environments that have rewards of their own share the last one, which has the name of
    the first."""
    owners = (each for each in _factories(environments) if _owns_reward(each))
    return [*map(_name, rewards), *(_name(each) for each in islice(owners, 1))]


def _name(reward: Any) -> str:
    """reward: a function, a model, or an environment's class."""
    while isinstance(reward, partial):
        reward = reward.func
    model = getattr(getattr(reward, "config", None), "_name_or_path", reward)
    if isinstance(model, str):
        return model.rpartition("/")[2]
    return getattr(reward, "__name__", type(reward).__name__)


def _factories(environments: Any) -> list[Any]:
    if isinstance(environments, Mapping):
        return list(environments.values())
    return [environments] if environments else []


def _owns_reward(factory: Any) -> bool:
    """factory: a class, or a function that makes an environment."""
    made = factory() if callable(factory) and not isclass(factory) else factory
    return hasattr(made, "get_reward")
