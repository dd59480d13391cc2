"""User-defined functions in place of a built-in surrogate or advantage: `loss.surrogate`, `loss.advantage`.

A surrogate computes the loss of each token, before the KL penalty and the aggregation:

    def surrogate(tokens: SurrogateInputs) -> Tensor            # (C,), dtype and device of tokens.logps

tokens are the C completion tokens of a micro-batch, of several groups one after the other. The loss is minimised, and
its gradient flows through tokens.logps or tokens.ratio. Values where tokens.mask is False are ignored. The function may
also return a tuple, in which the loss is followed by two bool tensors (C,), True where a lower and an upper bound
removed the gradient, for the metrics clip_ratio_*; or by a dict of metrics, (C,) each, whose means over the tokens that
train are logged under their names; or by the bounds and the dict.

An advantage is computed from the rewards of whole groups, all those of a step that train:

    def advantage(groups: Sequence[Group], config: LossConfig) -> list      # of arrays, one for each group

groups[i].rewards: float32 (G,), the weighted totals, NaN for completions that are left out; groups[i].lengths: int64
(G,), number of tokens in each completion. Each array has one value per completion, (G,), or one per token of the group,
(C,). It may be a NumPy array or a tensor on the CPU. The values of completions that are left out become 0. Groups whose
rewards are all equal are dropped first, unless loss.drop_zero_variance = false.

Both functions read their settings from the table loss.settings, as tokens.config.settings and config.settings. The
built-in ones are in `policy_trainer/algorithms/surrogates/` and in ADVANTAGES of advantages.py.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from policy_trainer.algorithms.objective.group import Group
from policy_trainer.algorithms.surrogates import SurrogateInputs, SurrogateLoss
from policy_trainer.config import LossConfig
from policy_trainer.config.functions import CALLER, function_label, is_function
from policy_trainer.data.user_code import accepts, explained, import_named
from policy_trainer.metrics import is_taken
from shared.batch import Array
from shared.errors import UserError


def check_functions(config: LossConfig) -> None:
    """Raises UserError if a function in the settings cannot be imported, or does not accept these arguments."""
    for setting, function, arguments in (
        ("loss.surrogate", config.surrogate, ("tokens",)),
        ("loss.advantage", config.advantage, ("groups", "config")),
    ):
        if is_function(function) and (reason := accepts(_imported(function, setting), *arguments)):
            raise UserError(
                f"{setting}: {function_label(function)} is called with {' and '.join(arguments)}, but {reason}"
            )


def call_surrogate(tokens: SurrogateInputs) -> SurrogateLoss:
    """Calls the user's loss.surrogate. Raises UserError if it raises an exception or returns a wrong result."""
    setting, logps = "loss.surrogate", tokens.logps
    name, returned = _call(setting, tokens.config.surrogate, tokens)
    values, *bounds = returned if isinstance(returned, tuple) else (returned,)
    metrics = _metrics(bounds.pop(), logps, name) if bounds and isinstance(bounds[-1], Mapping) else {}
    for value, dtype in ((values, logps.dtype), *((bound, torch.bool) for bound in bounds)):
        wanted = (logps.shape, dtype, logps.device)
        if not isinstance(value, Tensor) or (value.shape, value.dtype, value.device) != wanted:
            raise UserError(
                f"{setting}: {name} must return one {dtype} for each token, shape {tuple(logps.shape)} on "
                f"{logps.device} as tokens.logps; it returned {_described(value)}"
            )
    if len(bounds) not in (0, 2):
        raise UserError(
            f"{setting}: {name} must return one tensor, or three, and perhaps a dict of metrics, got {1 + len(bounds)} "
            "tensors"
        )
    if logps.requires_grad and not values.requires_grad:
        raise UserError(
            f"{setting}: {name} returned values without a gradient, so nothing would train",
            "compute them from tokens.logps or tokens.ratio, and detach only weights",
        )
    return SurrogateLoss(values, *bounds, metrics=metrics)


def _metrics(metrics: Mapping[Any, Any], logps: Tensor, name: str) -> Mapping[str, Tensor]:
    """Checks the metrics and sorts them by name, since ranks add them in order and a set's order differs among them."""
    for metric, value in metrics.items():
        if not isinstance(metric, str) or not re.fullmatch(r"[A-Za-z][\w/.-]*", metric, re.ASCII):
            raise UserError(
                f"loss.surrogate: {name} returned a metric called {metric!r}: a name begins with a letter, and has "
                "only letters, digits and '_', '/', '.', '-'"
            )
        if is_taken(metric):
            raise UserError(
                f"loss.surrogate: {name} returned a metric {metric}, a name that is taken (docs/metrics.md): give "
                "yours another one"
            )
        if not isinstance(value, Tensor) or (value.shape, value.device) != (logps.shape, logps.device):
            raise UserError(
                f"loss.surrogate: {name} must return a number for each token as metric {metric}, shape "
                f"{tuple(logps.shape)} on {logps.device} as tokens.logps; it returned {_described(value)}"
            )
    return dict(sorted(metrics.items()))


def call_advantage(groups: Sequence[Group], config: LossConfig) -> list[Array]:
    """Calls the user's loss.advantage. Returns float64 (C,) for each group. Raises UserError as call_surrogate does."""
    setting = "loss.advantage"
    name, returned = _call(setting, config.advantage, groups, config)
    if not isinstance(returned, Sequence | np.ndarray) or len(returned) != len(groups):
        raise UserError(
            f"{setting}: {name} must return a list with an array for each of the {len(groups)} groups; it returned "
            f"{_described(returned)}"
        )
    return [_of_tokens(value, group, name) for value, group in zip(returned, groups, strict=True)]


def _of_tokens(value: Any, group: Group, name: str) -> Array:
    size, tokens = len(group.lengths), int(group.lengths.sum())
    try:
        values = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor that requires grad
        values = np.zeros(())
    if values.shape not in ((size,), (tokens,)):
        raise UserError(
            f"loss.advantage: {name} must return for each group one number for each completion, here shape ({size},), "
            f"or for each of its tokens, here ({tokens},); it returned {_described(value)}"
        )
    values = values if len(values) == tokens else np.repeat(values, group.lengths)
    values = np.where(np.repeat(np.isnan(group.rewards), group.lengths), 0, values)
    if not np.isfinite(values).all():
        raise UserError(
            f"loss.advantage: {name} returned NaN or infinity for a completion with a reward; a standard deviation "
            "may be 0",
            "add config.advantage_eps, and leave NaN rewards out of means: numpy.nanmean",
        )
    return values


def _call(setting: str, function: str | Callable[..., Any], *arguments: Any) -> tuple[str, Any]:
    """Returns the function's name and its result."""
    name, called = function_label(function), _imported(function, setting)
    with explained(setting, name):
        return name, called(*arguments)


def _imported(function: str | Callable[..., Any], setting: str) -> Callable[..., Any]:
    if callable(function):
        return function
    if function.startswith(f"{CALLER}:"):
        raise UserError(f"{setting}: {function} was a function in a script", "give module:name, or run the script")
    imported = import_named(function, setting)
    if not callable(imported):
        raise UserError(f"{setting}: {function} must be a function, got a {type(imported).__name__}")
    return imported


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} on {value.device}"
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} {value.shape}"
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, list | tuple) else "")
