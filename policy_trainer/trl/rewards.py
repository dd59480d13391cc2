"""Converts, names and checks TRL's reward functions and reward models."""

from collections.abc import Mapping
from functools import partial
from inspect import isclass, signature
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from policy_trainer.rollout.environments.toolbox import method_names
from policy_trainer.trl.config import GRPOConfig
from policy_trainer.trl.objects import saved_path
from shared.errors import UserError

if TYPE_CHECKING:
    from transformers import TrainerState


def check_rewards(args: GRPOConfig, rewards: list[Any], tokenizers: list[Any], environments: Any) -> None:
    """Raises UserError, in TRL's words, if there is no reward, if lists differ in length, or if a class is not an
    environment."""
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
            f"number of reward functions ({len(rewards)})",
            "pass a list, with None for each function",
        )


def listed(value: Any) -> list[Any]:
    """Returns a list: TRL also accepts a single reward function."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def reward_inputs(rewards: list[Any], tokenizers: list[Any], run_dir: Path, state: "TrainerState") -> list[Any]:
    """Converts the rewards to what `GRPO` accepts: functions, and `model/DIRECTORY` for reward models. Models that
    other processes cannot load are written to `run_dir`. state: passed to functions that take `trainer_state`."""
    pairs = enumerate(zip(rewards, tokenizers or [None] * len(rewards), strict=True))
    return [
        f"model/{saved_path(reward, tokenizer, run_dir / f'reward-model-{number}', scores=True)}"
        if isinstance(reward, str) or hasattr(reward, "config")
        else _with_state(reward, state)
        for number, (reward, tokenizer) in pairs
    ]


def _with_state(reward: Any, state: "TrainerState") -> Any:
    """Binds this process's state to a function that takes `trainer_state`, by name or through `**kwargs`. Such a
    function is called in this process.

    TRL's own functions take `**kwargs` without using it, and run with the worker.
    """
    if getattr(reward, "__module__", "").startswith("trl."):
        return reward
    try:
        parameters = signature(reward).parameters
    except ValueError:  # a builtin, which takes no such argument
        return reward
    if "trainer_state" not in parameters and all(each.kind is not each.VAR_KEYWORD for each in parameters.values()):
        return reward
    bound: Any = partial(reward, trainer_state=state)
    bound.__name__ = getattr(reward, "__name__", "reward")
    return bound


def reward_names(rewards: list[Any], environments: Any) -> list[str]:
    """Returns TRL's names of the rewards. Rewards that environments compute themselves share the last name: that of the
    first such environment."""
    owners = (each for each in _factories(environments) if _owns_reward(each))
    return [*map(_name, rewards), *(_name(each) for each in islice(owners, 1))]


def environment_reward(environments: list[Any], **columns: Any) -> list[float | None]:
    """Returns the rewards that environments compute themselves; None for an environment without any. As in TRL, it is
    one of the trainer's `reward_funcs`."""
    return [each.get_reward() if hasattr(each, "get_reward") else None for each in environments]


def tool_functions(tools: Any, environments: Any) -> list[Any]:
    """Returns the tools, including the tool methods of the environment if there is a single class."""
    methods = [getattr(environments, name) for name in method_names(environments)] if isclass(environments) else []
    return [*(tools or ()), *methods]


def _name(reward: Any) -> str:
    """Returns a reward's name. reward: a function, a model, or an environment's class."""
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
    """Whether an environment computes its own reward. factory: a class, or a function that returns an instance."""
    made = factory() if callable(factory) and not isclass(factory) else factory
    return hasattr(made, "get_reward")
